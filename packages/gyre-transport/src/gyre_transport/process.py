"""Processes that ack readiness and never outlive their parent.

    parent                                   child (ours)
    Child.start(argv) ── spawn ──────────▶   follow_parent(); … ; ready(url=…)
        ▲ info ◀── one JSON line on a pipe ──────────────────────────┘
        │ the parent's end of a second pipe closes when the parent dies ──▶ SIGTERM, then exit

A foreign program (an engine, a harness) knows neither pipe: `Child(guarded=True)` runs it under `gyre_transport.guard`,
which does the watching and ends the program's whole process tree, daemons included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gyre_transport.errors import ProcessError

_PARENT_FD, _READY_FD = "GYRE_PARENT_FD", "GYRE_READY_FD"
_GUARD = str(Path(__file__).with_name("guard.py"))
_GRACE = 20.0  # seconds between SIGTERM and the hard end


def follow_parent(grace: float = _GRACE) -> None:
    """Child side: SIGTERM this process when its parent dies, and end it hard `grace` seconds later.

    Does nothing when the process was not started by `Child`.
    """
    text = os.environ.pop(_PARENT_FD, None)
    if text is None:
        return
    fd = int(text)
    os.set_inheritable(fd, False)

    def watch() -> None:
        while os.read(fd, 1):  # blocks; empty at the parent's end
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()


def ready(**info: Any) -> None:
    """Child side: tell the parent that this process serves; `info` must be JSON (addresses, ports)."""
    fd = os.environ.pop(_READY_FD, None)
    if fd is None:
        return
    with os.fdopen(int(fd), "w") as pipe:
        pipe.write(json.dumps(info) + "\n")


class _End(NamedTuple):
    """One step towards a child's end."""

    act: Callable[[], None]
    wait: float | None  # seconds for it to work; None: it will


class Child:
    """One child process, its log file and its end.

    Use `start`, then `stop`; `wait` returns the exit code whenever it ends.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, log: Path, parent_fd: int, *, guarded: bool = False
    ) -> None:
        self.name = name
        self.log = log
        self.info: dict[str, Any] = {}
        self._process = process
        self._parent_fd = parent_fd
        self._guarded = guarded

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Path | None = None,
        ready_within: float | None = 60.0,
        guarded: bool = False,
    ) -> Child:
        """Start `argv`; stdout and stderr go to `log` (appended).

        env: the child's whole environment (default: this process's). stdin: a file it reads (default: nothing).
        ready_within: seconds until the child must call `ready`; None does not wait (foreign programs).
        guarded: run under `gyre_transport.guard`.
        Raises `ProcessError` naming the log and its last lines when the child cannot start or is not ready in time.
        """
        if guarded:
            argv = [sys.executable, "-I", "-S", _GUARD, *argv]  # by path: the program's environment stays as given
        watched, held = os.pipe()
        told, tells = os.pipe()
        child_env = {**(os.environ if env is None else env), _PARENT_FD: str(watched)}
        child_env.pop(_READY_FD, None)
        if ready_within is not None:
            child_env[_READY_FD] = str(tells)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as out, open(stdin or os.devnull, "rb") as given:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=given,
                    stdout=out,
                    stderr=asyncio.subprocess.STDOUT,
                    env=child_env,
                    cwd=cwd,
                    pass_fds=(watched, tells) if ready_within is not None else (watched,),
                    start_new_session=True,
                )
        except BaseException as e:
            os.close(held)
            os.close(told)
            if isinstance(e, OSError):
                raise ProcessError(
                    f"cannot start {name} ({argv[0]!r}): {e}; is it installed, is its log writable?"
                ) from e
            raise
        finally:
            os.close(watched)
            os.close(tells)
        child = cls(name, process, log, held, guarded=guarded)
        if ready_within is None:
            os.close(told)
            return child
        try:
            child.info = await child._await_ready(told, ready_within)
        except BaseException:
            await child.stop(grace=2.0)
            raise
        return child

    async def _await_ready(self, fd: int, within: float) -> dict[str, Any]:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
        )
        line = asyncio.create_task(reader.readline())
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({line, ended}, timeout=within, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not line.done():
                await asyncio.wait({line}, timeout=1.0)  # the line may be on its way; a grandchild may hold the pipe
            if line.done() and line.exception() is None and line.result():
                return self._info(line.result())
            if not ended.done() and line.done():  # the pipe was closed: the process is ending, or has lost it
                await asyncio.wait({ended}, timeout=min(within, 5.0))
            if ended.done():
                raise ProcessError(
                    f"{self.name} ended with exit code {ended.result()} before it was ready; {self.tail()}"
                )
            raise ProcessError(f"{self.name} was not ready in {within:g} s; {self.tail()}")
        finally:
            line.cancel()
            ended.cancel()
            await asyncio.gather(line, ended, return_exceptions=True)
            transport.close()

    def _info(self, line: bytes) -> dict[str, Any]:
        try:
            info = json.loads(line)
        except ValueError:
            info = None
        if not isinstance(info, dict):
            raise ProcessError(f"{self.name} announced {line[:200]!r}, not one line of JSON; {self.tail()}")
        return info

    @property
    def pid(self) -> int:
        """Process id (the guard's for a guarded child)."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the end; returns the exit code (negative: the signal)."""
        code = await self._process.wait()
        self._let_go()
        return code

    async def stop(self, grace: float = _GRACE) -> int:
        """SIGTERM, then the hard end after `grace` seconds; returns the exit code. Idempotent.

        The hard end is SIGKILL to the process group; a guarded child's guard is told to end the tree without grace.
        """
        try:
            for end in self._ends(grace):
                if self._process.returncode is not None:
                    break
                with contextlib.suppress(ProcessLookupError):
                    end.act()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(end.wait):
                        await self._process.wait()
            return await self._process.wait()
        finally:
            self._let_go()

    def _ends(self, grace: float) -> list[_End]:
        ends = [_End(self._terminate, grace)]
        if self._guarded:
            ends.append(_End(self._terminate, 10.0))
        return [*ends, _End(lambda: os.killpg(self._process.pid, signal.SIGKILL), None)]

    def _terminate(self) -> None:
        # Not the process's own method: that looks first whether it has ended, and takes the exit code from the loop.
        os.kill(self._process.pid, signal.SIGTERM)

    def _let_go(self) -> None:
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
            self._parent_fd = -1

    def tail(self, lines: int = 12) -> str:
        """The last lines of the log, for an error message."""
        try:
            with self.log.open("rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - 8192))
                text = f.read().decode(errors="replace")
        except OSError as e:
            return f"its log {str(self.log)!r} cannot be read: {e.strerror}"
        return f"the end of its log {str(self.log)!r}:\n" + "\n".join(text.splitlines()[-lines:])
