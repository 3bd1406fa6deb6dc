"""Outputs that exist whole or not at all: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gyre_traj.errors import OutputError


@contextmanager
def fresh_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write; when the block ends well it becomes `path`. Raises `OutputError`."""
    with _beside(Path(path)) as temporary:
        temporary.touch()  # so that a place that cannot be written is known before any work is done
        yield temporary
        _sync(temporary)


@contextmanager
def fresh_folder(path: str | Path) -> Iterator[Path]:
    """As `fresh_file`, for a folder that is there and empty when the block begins."""
    with _beside(Path(path)) as temporary:
        temporary.mkdir()
        yield temporary
        for inside in temporary.rglob("*"):
            _sync(inside)
        _sync(temporary)


def refuse_existing(path: str | Path) -> None:
    """Raise `OutputError` when something is there."""
    if os.path.lexists(path):
        raise OutputError(f"{str(path)!r} exists; remove it, or name another output")


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    refuse_existing(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise OutputError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
