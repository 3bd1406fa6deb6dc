"""The picture of a run at one moment, as JSON: what page, terminal, report and Prometheus show, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

from gyre_sched.face.chronicle import Cell, Chronicle, Level, Mark, Note

STEPS = 500  # optimizer steps shown
_STEP_KEYS = (
    "step",
    "version",
    "new_version",
    "executions",
    "excluded",
    "placeholders",
    "mean_score",
    "trajectories",
    "tokens_total",
    "tokens_unique",
    "targets",
    "staleness",
    "micro_steps",
    "loss",
    "grad_norm",
    "learning_rate",
    "seconds",
)


class Picture(msgspec.Struct, kw_only=True):
    """Times are unix seconds."""

    name: str
    at: float  # of the last event
    seq: int  # of the last event
    began: float | None
    ended: bool
    steps_total: int
    dispatched: int
    started: int
    terminated: int
    water: int
    capacity: int
    version: int
    burst: int | None
    moved: int  # calls that a leaving cell's engine handed to others
    halted: str | None
    backlog: dict[str, Any]
    cells: list[Cell]
    seconds: dict[int, dict[str, float]]  # cell -> role -> seconds, the present role included
    levels: list[Level]
    transfers: list[Mark]
    bursts: list[Mark]
    versions: list[Mark]
    notes: list[Note]
    failures: dict[str, int]
    steps: list[dict[str, Any]]
    steps_dropped: int  # older than those shown
    proxy: dict[str, Any]
    runner: dict[str, Any]
    damage: str = ""  # why no more of the journal can be read


def picture(
    chronicle: Chronicle,
    *,
    name: str,
    steps_total: int = 0,
    steps: list[dict[str, Any]] | None = None,
    proxy: dict[str, Any] | None = None,
    runner: dict[str, Any] | None = None,
    damage: str = "",
) -> Picture:
    """Put what is known together."""
    c, rows = chronicle, steps or []
    return Picture(
        name=name,
        at=c.at,
        seq=c.seq,
        began=c.began,
        ended=c.ended,
        steps_total=steps_total,
        dispatched=c.dispatched,
        started=c.started,
        terminated=c.terminated,
        water=c.water,
        capacity=c.capacity,
        version=c.version,
        burst=c.burst,
        moved=c.moved,
        halted=c.halted,
        backlog=dict(c.backlog),
        cells=[c.cells[i] for i in sorted(c.cells)],
        seconds={i: _spent(c, i) for i in sorted(c.cells)},
        levels=c.levels,
        transfers=list(c.transfers),
        bursts=list(c.bursts),
        versions=list(c.versions),
        notes=list(c.notes),
        failures=c.failures,
        steps=[{key: row.get(key) for key in _STEP_KEYS} for row in rows[-STEPS:]],
        steps_dropped=max(0, len(rows) - STEPS),
        proxy=proxy or {},
        runner=runner or {},
        damage=damage,
    )


def _spent(chronicle: Chronicle, index: int) -> dict[str, float]:
    cell, spent = chronicle.cells[index], dict(chronicle.seconds.get(index, {}))
    if not chronicle.ended:
        spent[cell.role] = spent.get(cell.role, 0.0) + max(0.0, chronicle.at - cell.since)
    return spent
