"""Bins: which pieces of a forest share a micro-step.

    forest ─▶ pieces, which stay whole ─▶ bins under the budget

As few bins as there can be come first, then as few tokens, then as equal loads.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable

from gyre_traj.forest import Forest, Piece, cut
from gyre_traj.paths import Path

Bin = list[Piece]
_ROUNDS = 8  # of narrowing the budget
_SHORT = (32, 8)  # a prefix up to budget / 32 or / 8 may be repeated for a better fit


def assign[P: Path](forest: Forest[P], budget: int) -> list[Bin]:
    """Bins of at most `budget` tokens but for paths that are longer: the fewest, then those that repeat least.

    The largest pieces repeat least; those that are cut at every short prefix may fit together better.
    """
    tries = [0, *(budget // part for part in _SHORT)] if forest.sharing else [0]
    return min((fill(cut(forest, budget, free), budget) for free in tries), key=_cost)


def balance[P: Path](forest: Forest[P], budget: int) -> list[Bin]:
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
    over = [placed for placed in bins if load(placed) > budget]
    return _evened([placed for placed in bins if load(placed) <= budget]) + over


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
    """Paths of a bin, in the forest's order."""
    return sorted(i for piece in placed for i in range(piece.first, piece.last))
