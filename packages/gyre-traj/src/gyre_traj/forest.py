"""Forests: paths in the order of their ids, each with what it shares with the one before.

    paths   abcde   abxy   b       shared   0   2   0       tokens 8

Neighbours share most, so the order and those numbers are the trie: it is laid out by writing of each path only what
the one before does not have, and a range of it is a forest again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from itertools import pairwise

from gyre_traj.paths import Path, fork


class Forest[P: Path]:
    """See the module; paths of the same ids stay in the order in which they were added.

    sharing: whether paths share at all; if not they stay in the order in which they were added.
    """

    def __init__(self, *, sharing: bool = True) -> None:
        self.sharing = sharing
        self.paths: list[P] = []
        self.lengths: list[int] = []
        self.shared: list[int] = []  # ids that path i shares with path i - 1; 0 for the first
        self.tokens = 0  # to lay out: shared ones count once

    def add(self, path: P) -> None:
        """Put a path in its place; costs O(log paths) comparisons."""
        if not self.sharing:
            self._insert(len(self.paths), path, 0, 0)
            return
        place = cmp_to_key(_compare)
        at = bisect_right(self.paths, place(path), key=place)
        before = fork(self.paths[at - 1], path).shared if at else 0
        after = fork(path, self.paths[at]).shared if at < len(self.paths) else 0
        self._insert(at, path, before, after)

    def among(self, places: Sequence[int]) -> list[int]:
        """What the path at each of these places, ascending, shares with the one before it of them."""
        return [min(self.shared[a + 1 : b + 1]) if a >= 0 else 0 for a, b in pairwise((-1, *places))]

    def remove(self, places: Iterable[int]) -> None:
        """Take the paths at these places out."""
        gone = set(places)
        stay = [i for i in range(len(self.paths)) if i not in gone]
        self.shared = self.among(stay)
        self.paths, self.lengths = [self.paths[i] for i in stay], [self.lengths[i] for i in stay]
        self.tokens = sum(self.lengths) - sum(self.shared)

    def _insert(self, at: int, path: P, before: int, after: int) -> None:
        self.paths.insert(at, path)
        self.lengths.insert(at, len(path))
        self.shared.insert(at, before)
        self.tokens += len(path) - before
        if at + 1 < len(self.paths):
            self.tokens += self.shared[at + 1] - after
            self.shared[at + 1] = after


@dataclass(frozen=True, slots=True)
class Piece:
    """Paths [first, last) of a forest, which stay together."""

    first: int
    last: int
    tokens: int


def cut[P: Path](forest: Forest[P], limit: int, free: int = 0) -> list[Piece]:
    """Cut a forest between paths into pieces of at most `limit` tokens, repeating as few tokens as possible.

    A cut repeats what the paths beside it share, so the best cuts of the first j paths are the best cuts of the first
    i, for some i < j, and one before path i. Where that repeats at most `free` tokens there is always a cut. A path
    longer than the limit is a piece of its own. O(paths).
    """
    n = len(forest.paths)
    lengths, shared = forest.lengths, forest.shared
    new = [0]  # tokens that the first i paths add, each to the one before it
    for length, common in zip(lengths, shared, strict=True):
        new.append(new[-1] + length - common)
    repeated = [0] * (n + 1)  # at least, when the first j paths are cut
    start = [0] * (n + 1)  # of the last piece then
    best: deque[tuple[int, int]] = deque()  # (repeated, start of the last piece), ascending in both
    for j in range(n):
        cost = repeated[j] + (shared[j] if shared[j] > free else 0)
        while best and best[-1][0] >= cost:  # a later start is as good and leaves more room
            best.pop()
        best.append((cost, j))
        while best[0][1] < j and shared[best[0][1]] + new[j + 1] - new[best[0][1]] > limit:
            best.popleft()
        repeated[j + 1], start[j + 1] = best[0]
    pieces = []
    last = n
    while last:
        first = start[last]
        pieces.append(Piece(first, last, shared[first] + new[last] - new[first]))
        last = first
    return pieces[::-1]


def unique_tokens(paths: Iterable[Path]) -> int:
    """Tokens of the paths when a prefix that several share is counted once: the nodes of their trie."""
    forest: Forest[Path] = Forest()
    for path in paths:
        forest.add(path)
    return forest.tokens


def _compare(left: Path, right: Path) -> int:
    parted = fork(left, right)
    return parted.left - parted.right
