"""Packing: rows of trajectories -> micro-steps under a token budget.

    rows ─▶ usable ─▶ forest ─▶ bins (`gyre_traj.bins`) ─▶ laid out: micro-steps

`gyre_traj.packed` says how they are laid out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gyre_traj.bins import Bin, balance, places
from gyre_traj.errors import BadRow
from gyre_traj.forest import Forest
from gyre_traj.packed import Packed, PackedArrays, PackedRow, TargetRun
from gyre_traj.rows import Row

__all__ = ["Packed", "PackedArrays", "Row", "pack_forests", "pack_rows"]


def pack_rows(rows: Sequence[Row], budget: int) -> list[Packed]:
    """Pack rows into micro-steps of at most `budget` tokens each, as equal in length as they come.

    Tails after a row's last target are dropped, rows without targets too: neither changes the loss. A row longer than
    the budget gets a micro-step of its own, which says so (`Packed.over_budget`). Deterministic. Raises `BadRow`.
    """
    return _pack(rows, budget, Forest(sharing=False))


def pack_forests(rows: Sequence[Row], budget: int) -> list[Packed]:
    """As `pack_rows`, but rows share their prefixes: a shared token is laid out once a micro-step.

    The branches of an execution share what they have in common, and so do the executions of a group, and groups under
    one system prompt. Each keeps its own targets: a token that two executions sampled alike is computed once and is a
    target of both. A tree larger than the budget is cut between rows, its prefix repeated as context, at the branch
    points that repeat least. The targets of a row stay in one micro-step. Raises `BadRow`.
    """
    return _pack(rows, budget, Forest())


def _pack(rows: Sequence[Row], budget: int, forest: Forest[Row]) -> list[Packed]:
    for row in usable(rows, budget):
        forest.add(row)
    return [lay_out(forest, placed, budget) for placed in balance(forest, budget)]


def usable(rows: Sequence[Row], budget: int) -> list[Row]:
    """Check rows; drop what no target depends on."""
    if budget < 1:
        raise BadRow(f"the token budget must be at least 1, got {budget!r}")
    if len({row.trajectory for row in rows}) != len(rows):
        raise BadRow("trajectory numbers must be unique among the rows packed together; number them through the batch")
    return [row for row in (row.trimmed() for row in rows) if row.segments]


def lay_out(forest: Forest[Row], placed: Bin, budget: int) -> Packed:
    """Write a bin's rows: of each, what the one before it does not have."""
    executions: dict[str, int] = {}
    ids: list[NDArray[np.uint32]] = []
    logprobs: list[NDArray[np.float32]] = []
    rows: list[PackedRow] = []
    chosen = places(placed)
    for place, shared in zip(chosen, forest.among(chosen), strict=True):
        row = forest.paths[place]
        targets: list[TargetRun] = []
        for depth, segment in row.placed():
            if depth + len(segment.ids) > shared:
                ids.append(segment.ids[max(0, shared - depth) :])
            if segment.target:
                logprobs.append(segment.logprobs)
                targets.extend(
                    TargetRun(depth + span.start, depth + span.end, segment.temperature, span.version)
                    for span in segment.runs()
                )
        rows.append(
            PackedRow(
                execution=executions.setdefault(row.execution, len(executions)),
                trajectory=row.trajectory,
                weight=row.weight,
                advantage=row.advantage,
                shared=shared,
                length=forest.lengths[place],
                targets=tuple(targets),
            )
        )
    return Packed(
        ids=b"".join(ids),
        logprobs=b"".join(logprobs),
        rows=tuple(rows),
        executions=tuple(executions),
        budget=budget,
    )
