"""What a person sees while a run goes on: pure functions from the run's state to lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gyre_sched.protocol import Event, Status


class View(msgspec.Struct, kw_only=True):
    """The latest of everything; None where a process has not answered yet."""

    status: Status | None = None
    runner: dict[str, Any] = {}
    proxy: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    total_steps: int = 0
    executions: int = 0


def lines(view: View) -> list[str]:
    """One line per process group."""
    return [_cells(view), _runner(view), _proxy(view), _training(view)]


def _cells(view: View) -> str:
    s = view.status
    if s is None:
        return "cells     starting"
    roles = "  ".join(f"{c.cell}:{c.role.value} v{c.version}" for c in s.cells) or "none yet"
    return f"cells     {roles}   water {s.water} / capacity {s.capacity}"


def _runner(view: View) -> str:
    r = view.runner
    if not r:
        return "runner    waiting for the cells"
    score = r.get("mean_score")
    shown = f"   mean score so far {score:.3f}" if isinstance(score, float) else ""
    replaced = r.get("replaced", 0)
    return (
        f"runner    {r.get('terminated', 0)}/{view.executions + replaced} executions ended, "
        f"{r.get('started', 0) - r.get('terminated', 0)} running"
        f"{f', {replaced} replaced after a failure' if replaced else ''}{shown}"
    )


def _proxy(view: View) -> str:
    p = view.proxy
    return (
        f"proxy     {p.get('calls', 0)} calls, {p.get('calls_moved', 0)} moved between engines, "
        f"{p.get('calls_failed', 0)} failed"
    )


def _training(view: View) -> str:
    backlog = view.status.backlog if view.status else None
    if backlog is None:
        return "training  no data yet"
    if backlog.open_batch is None:
        now = f"{backlog.waiting} executions wait"
    else:
        now = f"batch {backlog.open_batch + 1}: {backlog.micro_steps_left} micro-steps left"
    return f"training  step {backlog.batches_closed}/{view.total_steps} done; {now}"


STEP_COLUMNS = (
    ("step", "step"),
    ("executions", "executions"),
    ("excluded", "excluded"),
    ("mean_score", "score"),
    ("trajectories", "trajectories"),
    ("tokens_total", "tokens"),
    ("tokens_unique", "unique"),
    ("targets", "targets"),
    ("micro_steps", "micro-steps"),
    ("loss", "loss"),
    ("grad_norm", "grad norm"),
    ("version", "version"),
    ("seconds", "seconds"),
)


def cell_text(value: Any) -> str:
    """A step table's cell."""
    if isinstance(value, dict):
        return " ".join(f"{cell}:{count}" for cell, count in sorted(value.items()))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def step_table(step: dict[str, Any]) -> str:
    """A step's numbers under their names, two aligned lines."""
    cells = [(title, cell_text(step.get(key))) for key, title in STEP_COLUMNS]
    widths = [max(len(title), len(value)) for title, value in cells]
    rows = zip(*cells, strict=True)
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in rows)


def switch_line(event: Event) -> str | None:
    """A line for a role switch, None for other events."""
    if event.kind != "role":
        return None
    n = event.numbers
    seconds = n.get("seconds")
    took = f" after {seconds:.1f} s" if isinstance(seconds, int | float) else ""
    water = f" (water {n['w']}, capacity {n['C_R']})" if "w" in n and "C_R" in n else ""
    return f"cell {event.cell}: {n.get('from')} -> {n.get('to')}{took}{water}"


def shown_switches(events: Iterable[Event]) -> list[str]:
    """The lines of all role switches among `events`."""
    return [line for event in events if (line := switch_line(event)) is not None]
