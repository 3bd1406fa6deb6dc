"""JSON Lines: one object a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gyre_traj.errors import BadLine


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, object) of each line that is not blank. Raises `BadLine`."""
    try:
        with Path(path).open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                try:
                    line = msgspec.json.decode(raw)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise BadLine(f"{str(path)!r}, line {number}: not JSON: {error}") from error
                if not isinstance(line, dict):
                    raise BadLine(f"{str(path)!r}, line {number}: expected a JSON object, got {raw[:40]!r}")
                yield number, line
    except OSError as error:
        raise BadLine(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
