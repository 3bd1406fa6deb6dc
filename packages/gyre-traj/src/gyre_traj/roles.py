"""Role priority as data: which kind of trajectory is worth its place in a batch first.

A table in TOML; `data/roles.toml` holds one for each harness whose roles are known:

    [roles]
    priority = ["main", "main-summary", "sub-agent", "sub-agent-summary"]   # a role not named comes after these
    exclude = ["side"]                                                      # never drawn; counted as left out
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from gyre_traj.errors import BadChoice


class RolePriority(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Roles from most to least important; a role not named comes after all that are. Raises `BadChoice`."""

    priority: tuple[str, ...]
    exclude: tuple[str, ...] = ()  # roles whose trajectories are never drawn

    def __post_init__(self) -> None:
        named = self.priority + self.exclude
        if len(set(named)) != len(named):
            raise BadChoice(
                f"each role may appear once in priority and exclude, got {list(named)!r}; remove the repeats"
            )

    def rank(self, role: str) -> int:
        """Return the class of `role`: 0 is the highest, unnamed roles share the last."""
        try:
            return self.priority.index(role)
        except ValueError:
            return len(self.priority)


DEFAULT_PRIORITY = RolePriority(priority=("main", "main-summary", "sub-agent", "sub-agent-summary"))


def load_priority(path: str | Path) -> RolePriority:
    """Read a role table. Raises `BadChoice` when the file is missing, not TOML, or not such a table."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadChoice(f"role table {str(path)!r} cannot be read: {error}") from error
    if "roles" not in data:
        raise BadChoice(f"role table {str(path)!r} has no section [roles]; expected `[roles] priority = [...]`")
    return _convert(data["roles"], f"role table {str(path)!r}")


def harnesses() -> tuple[str, ...]:
    """Names of the harnesses that have a built-in table."""
    return tuple(_built_in())


def resolve(table: str | Path) -> RolePriority:
    """Return the built-in table of a harness, or read a file. Raises `BadChoice`."""
    built_in = _built_in()
    if table in built_in:
        return _convert(built_in[str(table)], f"built-in role table {table!r}")
    if Path(table).suffix == ".toml" or Path(table).exists():
        return load_priority(table)
    raise BadChoice(f"no role table {str(table)!r}: expected one of {list(built_in)} or the path of a TOML file")


def _built_in() -> dict[str, Any]:
    return tomllib.loads((resources.files("gyre_traj") / "data" / "roles.toml").read_text(encoding="utf-8"))


def _convert(section: Any, what: str) -> RolePriority:
    try:
        return msgspec.convert(section, RolePriority)
    except msgspec.ValidationError as error:
        raise BadChoice(f'{what}: {error}; expected `priority = ["main", ...]`') from error
