"""Whose a process or a folder is, and the end of what a dead runner left behind.

A run's owner name is made of its secret and its directory, so that no other run has it, not even a copy of it.
Processes of an execution carry `GYRE_OWNER=<owner>/<execution>` in their environment, folders have it in a file beside
them. Only what carries this run's own is ended or removed; nothing is ever found by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from gyre_agent_proxy.runner.errors import RunnerError

LABEL = "GYRE_OWNER"
_MARK = ".owner"
_PAUSE = 0.05  # seconds between looks at what is left


def owner_name(secret: bytes, directory: Path) -> str:
    """The owner name of the run in `directory`; its secret cannot be told from it."""
    return hmac.new(secret, b"owner:" + os.fsencode(directory.resolve()), hashlib.sha256).hexdigest()[:20]


@contextlib.asynccontextmanager
async def alone(directory: Path, within: float) -> AsyncIterator[None]:
    """Be the only runner of the run in `directory`. One that is being stopped is waited for, `within` seconds.

    Raises `RunnerError` while there is another one after that.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end = asyncio.get_running_loop().time() + within
    with (directory / "runner.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if asyncio.get_running_loop().time() >= end:
                    raise RunnerError(
                        f"another runner is at work in {str(directory)!r}; stop it first, or use another run directory"
                    ) from None
            await asyncio.sleep(_PAUSE)
        yield


# --- processes ------------------------------------------------------------------------------------------------------


class Process(msgspec.Struct, frozen=True):
    """A process of an execution."""

    pid: int
    started: int  # clock ticks after the machine's start; with the pid, it names the process
    execution: str


def processes(owner: str) -> list[Process]:
    """Those that carry `owner`, as far as this user may look at them."""
    found = (_process(int(name), owner) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


async def end_processes(owner: str, grace: float) -> tuple[list[Process], list[Process]]:
    """End what carries `owner`: SIGTERM, so that guards end their trees, and SIGKILL after `grace` seconds.

    Returns (those found, those that are still there after as long again).
    """
    found: dict[int, Process] = {}
    clock = asyncio.get_running_loop().time
    began = clock()
    told: set[tuple[Process, int]] = set()
    while left := processes(owner):
        if clock() > began + 2 * grace:
            return list(found.values()), left
        number = signal.SIGTERM if clock() < began + grace else signal.SIGKILL
        for process in left:
            found[process.pid] = process
            if (process, number) not in told:
                told.add((process, number))
                _send(process, owner, number)
        await asyncio.sleep(_PAUSE)
    return list(found.values()), []


def _process(pid: int, owner: str) -> Process | None:
    prefix = f"{LABEL}={owner}/".encode()
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        label = next((v for v in environment.split(b"\0") if v.startswith(prefix)), None)
        if label is None:
            return None
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # gone, or not ours to look at
        return None
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[19]), os.fsdecode(label[len(prefix) :]))


def _send(process: Process, owner: str, number: int) -> None:
    """Signal the process that was looked at: not one that took its pid since."""
    try:
        held = os.pidfd_open(process.pid)
    except OSError as e:
        if e.errno == errno.ESRCH:
            return
        raise
    try:
        if _process(process.pid, owner) == process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(held, number)
    finally:
        os.close(held)


# --- folders --------------------------------------------------------------------------------------------------------


def mark(folder: Path, owner: str, execution: str) -> None:
    """Say whose `folder` is, before it is made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}{_MARK}.partial")
    partial.write_text(f"{owner}/{execution}\n")
    partial.rename(folder.with_name(folder.name + _MARK))


def marked(parent: Path, owner: str) -> dict[Path, str]:
    """Folders in `parent` that are `owner`'s, and the execution each one belongs to."""
    found = {}
    for file in sorted(parent.glob(f"*{_MARK}")):
        try:
            whose, _, execution = file.read_text().strip().partition("/")
        except (OSError, UnicodeDecodeError):
            continue
        if whose == owner:
            found[file.with_name(file.name.removesuffix(_MARK))] = execution
    return found


def remove(folder: Path) -> bool:
    """Remove `folder` and its mark, whatever permissions it was left with; returns whether it is gone."""
    shutil.rmtree(folder, onexc=_once_more)
    gone = not os.path.lexists(folder)
    if gone:
        folder.with_name(folder.name + _MARK).unlink(missing_ok=True)
    return gone


def _once_more(act: Callable[..., Any], path: str, error: BaseException) -> None:
    """A folder that may not be looked into, or not be emptied."""
    if not isinstance(error, PermissionError):
        return
    with contextlib.suppress(OSError):
        for each in (os.path.dirname(path), path):
            if not os.path.islink(each):
                os.chmod(each, 0o700)
        if act in (os.open, os.scandir, os.listdir):
            shutil.rmtree(path, ignore_errors=True)
        else:
            act(path)
