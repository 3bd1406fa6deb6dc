"""Workspaces: the folder an execution works in, what it holds in the end, and copies of it for verifiers.

Only regular files, folders and symbolic links are looked at or copied: a harness may leave sockets and pipes behind.
What it made unreadable is made readable first: nobody gets another try by locking their work away.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from gyre_agent_proxy.runner.errors import RunnerError
from gyre_agent_proxy.runner.tasks import Task


class WorkspaceTooLarge(RunnerError):
    """A workspace holds more than a verifier's copy of it may."""


def prepare(task: Task, workspace: Path) -> None:
    """Make `workspace` anew with the task's environment files in it.

    Links are followed, as tasks may share files; in what an image holds they stay: they lead to files of the image.
    """
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.parent.mkdir(parents=True, exist_ok=True)
    if task.environment.is_dir():
        shutil.copytree(task.environment, workspace, symlinks=task.seed is not None)
    else:
        workspace.mkdir()


def files(folder: Path) -> Iterator[Path]:
    """Regular files below `folder`; links are not followed."""
    for root, _, names in _walk(folder):
        for name in names:
            path = Path(root) / name
            try:
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path
            except OSError:  # gone, or not ours to see
                continue


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, which passes over folders that may not be read. Raises `OSError` for one that still may not be."""

    def fail(error: OSError) -> None:
        raise error

    _open(folder)
    for root, folders, names in os.walk(folder, onerror=fail):
        for name in folders:  # before the walk looks into them
            path = Path(root) / name
            if not path.is_symlink():
                _open(path)
        yield root, folders, names


def _open(folder: Path) -> None:
    """Let its owner look into a folder."""
    mode = stat.S_IMODE(folder.lstat().st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        folder.chmod(mode | stat.S_IRWXU)


def produced(task: Task, workspace: Path) -> list[str]:
    """What there is to score: files matching the task's artifacts, or, when it names none, every file that the
    environment did not put there as it is (hidden files and folders aside: HOME is the workspace)."""
    if task.artifacts:
        found = {path for glob in task.artifacts for path in workspace.glob(glob)}
        return sorted(str(path.relative_to(workspace)) for path in found if path.is_file() and not path.is_symlink())
    made = (path.relative_to(workspace) for path in files(workspace))
    shown = (path for path in made if not any(part.startswith(".") for part in path.parts))
    return sorted(str(path) for path in shown if not _same(workspace / path, task.environment / path))


def _same(path: Path, original: Path) -> bool:
    try:
        if path.stat().st_size != original.stat().st_size:
            return False
        with path.open("rb") as a, original.open("rb") as b:
            return hashlib.file_digest(a, "sha256").digest() == hashlib.file_digest(b, "sha256").digest()
    except OSError:
        return False


def copy(workspace: Path, target: Path, limit: int) -> None:
    """Copy `workspace` to `target`; raises `WorkspaceTooLarge` beyond `limit` bytes of file content."""
    target.mkdir(parents=True)
    total = 0
    for root, folders, names in _walk(workspace):
        to = target / Path(root).relative_to(workspace)
        for name in (*folders, *names):
            source = Path(root) / name
            try:
                status = source.lstat()
            except OSError:
                continue
            if stat.S_ISLNK(status.st_mode):
                (to / name).symlink_to(source.readlink())
            elif stat.S_ISDIR(status.st_mode):
                (to / name).mkdir()
            elif stat.S_ISREG(status.st_mode):
                total += status.st_size
                if total > limit:
                    raise WorkspaceTooLarge(
                        f"the workspace {str(workspace)!r} holds more than {limit >> 20} MiB; raise "
                        "runner.workspace_limit_mb or have the harness leave less behind"
                    )
                _copy(source, to / name, status.st_mode)


def _copy(source: Path, target: Path, mode: int) -> None:
    try:
        shutil.copy2(source, target)
    except PermissionError:
        source.chmod(stat.S_IMODE(mode) | stat.S_IRUSR)
        shutil.copy2(source, target)


def full(error: OSError) -> bool:
    """Whether there is no space left; shutil gathers what went wrong in a list of (source, target, why)."""
    words = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    if isinstance(error, shutil.Error):
        return any(word in str(error) for word in words)
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
