"""Paths: token sequences as views of the records they come from, a segment for each stretch that is alike.

    path      [context: sys task][output of a][context: result][output of b]
    segment           0                1              2              3          ids: views, nothing is copied
    target          False             True          False           True

What a token carries beside its id (is it a target, at which temperature, by which weights) is the same through a
segment, so a path costs its segments and not its tokens. The arrays of one entry a token are made when asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre_traj.records import Span

_SHORT = 1 << 14  # tokens
_FLOAT32_END = (2 - 2**-24) * 2.0**127  # from here on float32 rounds to infinity
_NO_IDS = np.zeros(0, dtype="<u4")


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A stretch of n > 0 tokens of a path that differ in nothing but their ids and log-probabilities."""

    ids: NDArray[np.uint32]  # [n] little-endian, contiguous
    logprobs: NDArray[np.float32]  # [n] behaviour log-probabilities; [0] where there are none, so nothing is trainable
    target: bool = False  # all are loss targets, or none is
    temperature: float = 1.0  # what their logits were divided by
    versions: tuple[Span, ...] = ()  # weights that sampled them: ascending, disjoint; outside of them not known

    def __len__(self) -> int:
        return len(self.ids)

    def runs(self) -> Iterator[Span]:
        """Spans that cover the whole segment, with version -1 where it is not known."""
        at = 0
        for span in self.versions:
            if span.start > at:
                yield Span(-1, at, span.start)
            yield span
            at = span.end
        if at < len(self.ids):
            yield Span(-1, at, len(self.ids))


class Path:
    """Segments one after the other. Every array [n] below is made anew each time it is read."""

    __slots__ = ("segments",)

    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        """n: tokens."""
        return sum(len(s.ids) for s in self.segments)

    @property
    def targets(self) -> int:
        """Number of targets."""
        return sum(len(s.ids) for s in self.segments if s.target)

    @property
    def ids(self) -> NDArray[np.uint32]:
        """Token ids [n]."""
        return np.concatenate([_NO_IDS, *(s.ids for s in self.segments)])

    @property
    def target(self) -> NDArray[np.bool_]:
        """Which tokens are loss targets, bool [n]."""
        return self._spread([s.target for s in self.segments], np.bool_)

    @property
    def trainable(self) -> NDArray[np.bool_]:
        """Which tokens have a behaviour log-probability, bool [n]."""
        return self._spread([len(s.logprobs) > 0 for s in self.segments], np.bool_)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Behaviour log-probabilities, float32 [n]; 0 where there are none, never read there."""
        out = np.zeros(len(self), dtype=np.float32)
        for start, segment in self.placed():
            out[start : start + len(segment.logprobs)] = segment.logprobs
        return out

    @property
    def version(self) -> NDArray[np.int32]:
        """Weights that sampled each token, int32 [n]; -1 where not sampled, or not known."""
        out = np.full(len(self), -1, dtype=np.int32)
        for start, segment in self.placed():
            for span in segment.versions:
                out[start + span.start : start + span.end] = span.version
        return out

    @property
    def temperature(self) -> NDArray[np.float32]:
        """What the logits of each token were divided by, float32 [n]; 1 where not sampled."""
        return self._spread([s.temperature for s in self.segments], np.float32)

    def placed(self) -> Iterator[tuple[int, Segment]]:
        """Segments, each with the depth of its first token."""
        depth = 0
        for segment in self.segments:
            yield depth, segment
            depth += len(segment.ids)

    def _spread[T: np.generic](self, values: Sequence[float], dtype: type[T]) -> NDArray[T]:
        return np.repeat(np.array(values, dtype=dtype), [len(s.ids) for s in self.segments])


class Fork(NamedTuple):
    """Where two paths part: how many ids they share, and the next id of each (-1: it ends there)."""

    shared: int
    left: int
    right: int


def fork(left: Path, right: Path) -> Fork:
    """Compare two paths by their ids, at memory speed; segments that both begin with are not looked at."""
    same, shared = 0, 0
    for x, y in zip(left.segments, right.segments, strict=False):
        if x.ids is not y.ids:
            break
        same, shared = same + 1, shared + len(x.ids)
    ours, theirs = iter(left.segments[same:]), iter(right.segments[same:])
    a = b = _NO_IDS
    while True:
        a = a if len(a) else _next(ours)
        b = b if len(b) else _next(theirs)
        n = common_prefix(a, b)
        shared += n
        a, b = a[n:], b[n:]
        if n == 0 or (len(a) and len(b)):  # n is 0 where the next ids differ, or a path has ended
            return Fork(shared, int(a[0]) if len(a) else -1, int(b[0]) if len(b) else -1)


def _next(segments: Iterator[Segment]) -> NDArray[np.uint32]:
    segment = next(segments, None)
    return _NO_IDS if segment is None else segment.ids


def in_float32(value: float, *, above: float = -math.inf) -> bool:
    """Whether a number is finite as a float32, which is what the arrays hold, and there still over `above`."""
    return abs(value) < _FLOAT32_END and above < struct.unpack("<f", struct.pack("<f", value))[0]


def common_prefix(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    """Length of what two arrays share at their start, looked at in steps that grow while they agree."""
    n = min(len(a), len(b))
    if n <= _SHORT and a[:n].tobytes() == b[:n].tobytes():  # an array operation costs more than these copies
        return n
    start, step = 0, 256
    while start < n:
        stop = min(start + step, n)
        differs = a[start:stop] != b[start:stop]
        if differs.any():
            return start + int(differs.argmax())
        start, step = stop, min(step * 4, 1 << 20)
    return n
