"""What other processes leave in a run's `metrics/`: one line a step from the feed, counters of proxy and runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The records of `metrics/steps.jsonl` in order of their steps; of a step that was replayed, the last.

    A line that is being written is left for the next look.
    """
    if not path.is_file():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    latest = {record["step"]: record for record in records}
    return [latest[step] for step in sorted(latest)]


def read_counters(path: Path) -> dict[str, Any]:
    """A JSON object that a process rewrites, such as `metrics/proxy.json`; empty while there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
