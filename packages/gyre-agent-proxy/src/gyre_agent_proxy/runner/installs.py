"""What of the host a program needs to be seen by: its links, the folder it was installed in, its interpreter's.

    .venv/bin/mini ─▶ .venv, and by "#!.venv/bin/python" ─▶ the Python below it
    ~/.local/bin/codex ─▶ node_modules it links into, and by "#!/usr/bin/env node" ─▶ where node is installed

A folder is shown only if it looks like an installation; of anything else, the file alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")


class Needs(msgspec.Struct):
    """Paths to be shown, and links (path -> what it points to) to be made anew."""

    paths: set[Path] = msgspec.field(default_factory=set)
    links: dict[Path, Path] = msgspec.field(default_factory=dict)


def needs(program: str) -> Needs:
    """What `program`, a path or a name on PATH, needs beside the system's own folders; nothing if it is not found."""
    found = Needs()
    _add(program, found, set())
    return found


def within(path: Path, folders: Iterable[str | Path]) -> bool:
    """Whether `path` is one of `folders` or below one."""
    return any(path.is_relative_to(folder) for folder in folders)


def _add(program: str, found: Needs, seen: set[Path]) -> None:
    where = shutil.which(program)
    if where is None or (path := Path(os.path.abspath(where))) in seen:
        return
    seen.add(path)
    real = path.resolve()
    for place in (path, real):
        if not within(place, SYSTEM) and (folder := _installation(place)) is not None:
            found.paths.add(folder)
    if not within(real, SYSTEM) and not within(real, found.paths):
        found.paths.add(real)
    if real != path and not within(path, SYSTEM) and not within(path, found.paths):
        found.links[path] = real
    if interpreter := _interpreter(real):
        _add(interpreter, found, seen)


def _installation(path: Path) -> Path | None:
    """The virtual environment, outermost node_modules or prefix that `path` is installed in."""
    parts = path.parts
    if "node_modules" in parts:
        return Path(*parts[: parts.index("node_modules") + 1])
    prefix = path.parent.parent
    if (prefix / "pyvenv.cfg").is_file():
        return prefix
    home = Path.home()
    shared = prefix in (home, home / ".local") or len(prefix.parts) < 3  # others keep things there, too
    return prefix if path.parent.name == "bin" and not path.is_symlink() and not shared else None


def _interpreter(path: Path) -> str:
    """The program named after #!, empty if there is none."""
    try:
        with path.open("rb") as f:
            line = f.readline(512)
    except OSError:
        return ""
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[0] if words else ""
