"""Role priority as data: which kind of trajectory is worth its place in a batch first.

A table in TOML:

    [roles]
    priority = ["main", "main-summary", "sub-agent", "sub-agent-summary"]
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from gyre_traj.errors import BadChoice


class RolePriority(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Roles from most to least important; a role not named comes after all that are."""

    priority: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.priority)) != len(self.priority):
            raise BadChoice(
                f"each role may appear once in the priority, got {list(self.priority)!r}; remove the repeats"
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
    try:
        return msgspec.convert(data["roles"], RolePriority)
    except msgspec.ValidationError as error:
        raise BadChoice(f'role table {str(path)!r}: {error}; expected `[roles] priority = ["main", ...]`') from error
