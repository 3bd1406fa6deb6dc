"""Rows: trajectories with a weight and an advantage, ready to be packed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gyre_traj.errors import BadRow
from gyre_traj.paths import Path, Segment, in_float32
from gyre_traj.records import Span, token_ids

_NO_LOGPROBS = np.zeros(0, dtype="<f4")


class Row(Path):
    """One trajectory, ready to train on; all its targets share weight and advantage. Do not change it once made.

    Made from arrays here, and by `from_segments` without a copy. ids: [n]. target: bool [n], never the first token,
    which nothing predicts. logprobs: [n], read at targets. weight: w_t of each target. temperature: [n], what the
    logits of targets were divided by (None: 1). version: [n], weights that sampled the targets (-1, None: not known).
    trajectory: a number of its own among the rows packed together. Raises `BadRow` for arrays of different lengths,
    `BadIds`.
    """

    __slots__ = ("advantage", "execution", "role", "trajectory", "weight")

    def __init__(
        self,
        execution: str,
        trajectory: int,
        ids: ArrayLike,
        target: ArrayLike,
        logprobs: ArrayLike,
        weight: float,
        advantage: float,
        temperature: ArrayLike | None = None,
        version: ArrayLike | None = None,
        role: str = "main",
    ) -> None:
        tokens = token_ids(ids)
        n = len(tokens)
        columns = {
            "target flags": np.asarray(target, dtype=np.bool_),
            "log-probabilities": np.ascontiguousarray(logprobs, dtype="<f4"),
            "temperatures": np.ones(n, np.float32) if temperature is None else np.asarray(temperature, np.float32),
            "versions": np.full(n, -1, np.int32) if version is None else np.asarray(version, np.int32),
        }
        if any(column.shape != (n,) for column in columns.values()):
            found = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
            raise BadRow(f"row {trajectory} of {execution!r}: {n} ids, {found}; expected as many of each")
        self._set(execution, trajectory, _cut(tokens, *columns.values()), weight, advantage, role)

    @classmethod
    def from_segments(
        cls,
        execution: str,
        trajectory: int,
        segments: tuple[Segment, ...],
        *,
        weight: float,
        advantage: float,
        role: str = "main",
    ) -> Self:
        """Make a row of views."""
        row = cls.__new__(cls)
        row._set(execution, trajectory, segments, weight, advantage, role)
        return row

    def numbered(self, trajectory: int) -> Self:
        """Return the same row under another trajectory number."""
        return self._with(trajectory, self.segments)

    def trimmed(self) -> Self:
        """Return the row without what follows its last target: no loss depends on it. Raises `BadRow`."""
        self.check()
        last = max((i for i, segment in enumerate(self.segments) if segment.target), default=-1)
        return self._with(self.trajectory, self.segments[: last + 1])

    def _with(self, trajectory: int, segments: tuple[Segment, ...]) -> Self:
        return self.from_segments(
            self.execution, trajectory, segments, weight=self.weight, advantage=self.advantage, role=self.role
        )

    def check(self) -> None:
        """Raise `BadRow` if no loss could be computed from the row."""
        name = f"row {self.trajectory} of {self.execution!r}"
        if self.segments and self.segments[0].target:
            raise BadRow(f"{name}: the first token cannot be a target, for nothing predicts it")
        if not (in_float32(self.weight) and in_float32(self.advantage)):
            raise BadRow(f"{name}: weight {self.weight!r} and advantage {self.advantage!r} must be finite in float32")
        for segment in self.segments:
            if not segment.target:
                continue
            if len(segment.logprobs) != len(segment.ids):
                raise BadRow(
                    f"{name}: {len(segment.ids)} targets with {len(segment.logprobs)} log-probabilities; "
                    "what has none cannot be a target"
                )
            # A sum is finite iff its terms are, for float32 cannot overflow float64.
            if not (
                math.isfinite(segment.logprobs.sum(dtype=np.float64)) and in_float32(segment.temperature, above=0.0)
            ):
                raise BadRow(
                    f"{name}: log-probabilities at targets must be finite, and temperatures too and above 0; "
                    f"got temperature {segment.temperature!r}"
                )

    def _set(
        self,
        execution: str,
        trajectory: int,
        segments: tuple[Segment, ...],
        weight: float,
        advantage: float,
        role: str,
    ) -> None:
        self.execution = execution
        self.trajectory = trajectory
        self.segments = tuple(segment for segment in segments if len(segment.ids))
        self.weight = float(weight)
        self.advantage = float(advantage)
        self.role = role

    def __repr__(self) -> str:
        return f"Row({self.execution!r}, {self.trajectory}, {len(self)} tokens, {self.targets} targets)"


def _cut(
    ids: NDArray[Any], target: NDArray[Any], logprobs: NDArray[Any], temperature: NDArray[Any], version: NDArray[Any]
) -> tuple[Segment, ...]:
    """Cut arrays where anything but ids and log-probabilities changes; context is one segment whatever it carries."""
    if not len(ids):
        return ()
    changes = (temperature[1:] != temperature[:-1]) | (version[1:] != version[:-1])
    new = (target[1:] != target[:-1]) | (target[1:] & changes)
    edges = [0, *(np.flatnonzero(new) + 1).tolist(), len(ids)]
    segments = []
    for start, stop in pairwise(edges):
        if target[start]:
            span = Span(int(version[start]), 0, stop - start)
            known = (span,) if span.version >= 0 else ()
            segments.append(Segment(ids[start:stop], logprobs[start:stop], True, float(temperature[start]), known))
        else:
            segments.append(Segment(ids[start:stop], _NO_LOGPROBS))
    return tuple(segments)
