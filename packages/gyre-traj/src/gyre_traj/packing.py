"""Packing: rows of trajectories -> micro-steps under a token budget. See `gyre_traj.packed` for their layout.

rows ─▶ pieces that stay whole (a row; in forests, rows with what they share) ─▶ bins under the budget ─▶ Packed
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gyre_traj.errors import BadRow
from gyre_traj.forest import Forest, Piece, cut
from gyre_traj.packed import Packed, PackedArrays, PackedRow, TargetRun
from gyre_traj.rows import Row

__all__ = ["Packed", "PackedArrays", "Row", "pack_forests", "pack_rows"]

Bin = list[Piece]
_ROUNDS = 8  # of narrowing the budget
_SHORT = (32, 8)  # a budget's share that a prefix may be, to be repeated for a better fit


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


def assign(forest: Forest[Row], budget: int) -> list[Bin]:
    """Bins of at most `budget` tokens but for rows that are longer: the fewest, then those that repeat least.

    The largest pieces repeat least; those that are cut at every short prefix may fit together better.
    """
    tries = [0, *(budget // part for part in _SHORT)]
    return min((fill(cut(forest, budget, free), budget) for free in tries), key=_cost)


def balance(forest: Forest[Row], budget: int) -> list[Bin]:
    """As `assign`, with the loads as equal as the lowest budget that needs no more bins or tokens makes them.

    Narrowing the budget is MULTIFIT (Coffman, Garey and Johnson, 1978).
    """
    bins = assign(forest, budget)
    within = [load(placed) for placed in bins if load(placed) <= budget]
    if not within:
        return bins
    most, tokens = len(bins), sum(map(load, bins))
    low, high = -(-sum(within) // len(within)), max(within)
    for _ in range(_ROUNDS):
        if low >= high:
            break
        limit = (low + high) // 2
        tried = assign(forest, limit)
        if len(tried) <= most and sum(map(load, tried)) <= tokens:
            bins, high = tried, limit
        else:
            low = limit + 1
    return _evened([placed for placed in bins if load(placed) <= budget]) + [
        placed for placed in bins if load(placed) > budget
    ]


def _cost(bins: list[Bin]) -> tuple[int, int]:
    return len(bins), sum(map(load, bins))


def fill(pieces: Iterable[Piece], budget: int) -> list[Bin]:
    """Longest first, each into the fullest bin that has room for it; what has room nowhere opens one."""
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for piece in _longest_first(pieces):
        at = bisect_left(rooms, (piece.tokens, -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = budget, len(bins)
            bins.append([])
        bins[number].append(piece)
        insort(rooms, (room - piece.tokens, number))
    return bins


def _evened(bins: list[Bin]) -> list[Bin]:
    """Longest first, each piece into the emptiest of as many bins, unless that makes a fuller one than there was."""
    evened: list[Bin] = [[] for _ in bins]
    loads = [(0, number) for number in range(len(bins))]
    for piece in _longest_first(piece for placed in bins for piece in placed):
        tokens, number = loads[0]
        evened[number].append(piece)
        heapq.heapreplace(loads, (tokens + piece.tokens, number))
    return evened if max(loads)[0] <= max(map(load, bins)) else bins


def _longest_first(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (-piece.tokens, piece.first))


def load(placed: Bin) -> int:
    """Tokens of a bin, at most: its pieces may share what they were cut at."""
    return sum(piece.tokens for piece in placed)


def places(placed: Bin) -> list[int]:
    """Rows of a bin, in the forest's order."""
    return sorted(i for piece in placed for i in range(piece.first, piece.last))


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
