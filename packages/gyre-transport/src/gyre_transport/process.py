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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_transport.errors import ProcessError

_PARENT_FD, _READY_FD = "GYRE_PARENT_FD", "GYRE_READY_FD"
_GUARD = str(Path(__file__).with_name("guard.py"))
_GRACE = 20.0  # seconds between SIGTERM and the hard end


def follow_parent(grace: float = _GRACE) -> None:
    """Child side: SIGTERM this process when its parent dies, and end it hard `grace` seconds later.

    Does nothing when the process was not started by `Child`.
    """
    fd = os.environ.pop(_PARENT_FD, None)
    if fd is None:
        return

    def watch(fd: int) -> None:
        while os.read(fd, 1):  # blocks; empty at the parent's end
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, args=(int(fd),), daemon=True, name="follow-parent").start()


def ready(**info: Any) -> None:
    """Child side: tell the parent that this process serves; `info` must be JSON (addresses, ports)."""
    fd = os.environ.pop(_READY_FD, None)
    if fd is None:
        return
    with os.fdopen(int(fd), "w") as pipe:
        pipe.write(json.dumps(info) + "\n")


class Child:
    """One child process, its log file and its end.

    Use `start`, then `stop`; `wait` returns the exit code whenever it ends.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, parent_fd: int) -> None:
        self.name = name
        self.log = log
        self.info: dict[str, Any] = {}
        self._process = process
        self._parent_fd = parent_fd

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ready_within: float | None = 60.0,
        guarded: bool = False,
    ) -> Child:
        """Start `argv`; stdout and stderr go to `log` (appended).

        env: the child's whole environment (default: this process's).
        ready_within: seconds until the child must call `ready`; None does not wait (foreign programs).
        guarded: run under `gyre_transport.guard`.
        Raises `ProcessError` naming the log and its last lines when the child cannot start or is not ready in time.
        """
        if guarded:
            argv = [sys.executable, "-I", "-S", _GUARD, *argv]  # by path: the program's environment stays as given
        log.parent.mkdir(parents=True, exist_ok=True)
        watched, held = os.pipe()
        told, tells = os.pipe()
        child_env = {**(os.environ if env is None else env), _PARENT_FD: str(watched)}
        if ready_within is not None:
            child_env[_READY_FD] = str(tells)
        try:
            with log.open("ab") as out:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=asyncio.subprocess.STDOUT,
                    env=child_env,
                    cwd=cwd,
                    pass_fds=(watched, tells) if ready_within is not None else (watched,),
                    start_new_session=True,
                )
        except OSError as e:
            os.close(held)
            os.close(told)
            raise ProcessError(f"cannot start {name}: {argv[0]!r}: {e.strerror}; is it installed?") from e
        finally:
            os.close(watched)
            os.close(tells)
        child = cls(name, process, log, held)
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
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
        )
        try:
            async with asyncio.timeout(within):
                line = await reader.readline()
        except TimeoutError:
            raise ProcessError(f"{self.name} was not ready in {within:g} s; {self.tail()}") from None
        finally:
            transport.close()
        if not line:
            code = await self._process.wait()
            raise ProcessError(f"{self.name} ended with exit code {code} before it was ready; {self.tail()}")
        info: dict[str, Any] = json.loads(line)
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
        return await self._process.wait()

    async def stop(self, grace: float = _GRACE) -> int:
        """SIGTERM, then SIGKILL to the process group after `grace` seconds; returns the exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(grace):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
            self._parent_fd = -1
        return await self._process.wait()

    def tail(self, lines: int = 12) -> str:
        """The last lines of the log, for an error message."""
        try:
            text = self.log.read_bytes()[-8192:].decode(errors="replace")
        except OSError as e:
            return f"its log {str(self.log)!r} cannot be read: {e.strerror}"
        return f"the end of its log {str(self.log)!r}:\n" + "\n".join(text.splitlines()[-lines:])
