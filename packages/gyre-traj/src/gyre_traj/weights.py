"""Loss weights: L = 1/units · Σ_t w_t · ℓ_t, with w_t known as soon as one execution is selected.

    aggregation            w_t                      units an execution adds to the batch's denominator
    two-level (default)    1 / |T_e|                1
    token-mean             1                        |T_e|
    seq-mean-token-mean    1 / |T_trajectory|       trajectories with targets
    seq-mean-token-sum     1                        trajectories with targets
    seq-mean-token-sum-norm  1 / norm (Dr. GRPO)    trajectories with targets

A sampled token that several selected trajectories share is a target once an execution (`Counting.EXECUTION`, the
paper's way), or once in each trajectory through it (`Counting.TRAJECTORY`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gyre_traj.errors import BadChoice
from gyre_traj.paths import Segment
from gyre_traj.rows import Row
from gyre_traj.selection import Selection


class Counting(StrEnum):
    """How often a sampled token shared by several selected trajectories is a target."""

    EXECUTION = "per_execution"
    TRAJECTORY = "per_trajectory"


class Aggregation(StrEnum):
    """How per-target losses become one number; see the module's table."""

    TWO_LEVEL = "two-level"
    BY_TOKEN = "token-mean"  # noqa: S105 - not a secret
    BY_SEQUENCE = "seq-mean-token-mean"
    BY_SEQUENCE_SUM = "seq-mean-token-sum"
    BY_SEQUENCE_NORM = "seq-mean-token-sum-norm"


@dataclass(frozen=True, slots=True)
class Weighted:
    """Rows of one execution, and its units: what it adds to the batch's denominator.

    An execution without targets (a placeholder) has no rows; its units are 1 under two-level, else 0.
    """

    rows: tuple[Row, ...]
    units: float


def target_weights(
    counts: ArrayLike, aggregation: Aggregation | str = Aggregation.TWO_LEVEL, norm: float = 1.0
) -> tuple[NDArray[np.float64], float]:
    """Targets of an execution's trajectories [k] -> (weight of each target of trajectory i [k], units).

    A trajectory without targets has weight 0. `norm` is Dr. GRPO's constant. Raises `BadChoice`.
    """
    aggregation = _choose(Aggregation, aggregation)
    targets = np.asarray(counts, dtype=np.int64)
    used = (targets > 0).astype(np.float64)
    trajectories = float(used.sum())
    if aggregation is Aggregation.TWO_LEVEL:
        return used / max(1, int(targets.sum())), 1.0
    if aggregation is Aggregation.BY_TOKEN:
        return used, float(targets.sum())
    if aggregation is Aggregation.BY_SEQUENCE:
        return used / np.maximum(1, targets), trajectories
    if aggregation is Aggregation.BY_SEQUENCE_NORM:
        if not 0 < norm < math.inf:
            raise BadChoice(
                f"{aggregation.value!r} divides by a positive norm, got {norm!r}; a usual one is the length limit"
            )
        return used / norm, trajectories
    return used, trajectories


def weigh(
    selection: Selection,
    *,
    advantage: float,
    first_trajectory: int = 0,
    counting: Counting | str = Counting.EXECUTION,
    aggregation: Aggregation | str = Aggregation.TWO_LEVEL,
    norm: float = 1.0,
) -> Weighted:
    """Turn one execution's selection into rows; trajectory numbers count from `first_trajectory`.

    Trajectories without a target give no row. Raises `BadChoice` for an unknown name.
    """
    paths = [t.segments for t in selection.trajectories]
    if _choose(Counting, counting) is Counting.TRAJECTORY:
        paths = [tuple(_unmasked(segment) for segment in path) for path in paths]
    counts = [sum(len(segment) for segment in path if segment.target) for path in paths]
    weights, units = target_weights(counts, aggregation, norm)
    rows = [
        Row.from_segments(
            t.execution, first_trajectory + i, path, weight=float(weight), advantage=advantage, role=t.role
        )
        for i, (t, path, weight) in enumerate(zip(selection.trajectories, paths, weights, strict=True))
        if weight
    ]
    return Weighted(tuple(rows), units)


def _unmasked(segment: Segment) -> Segment:
    """Return the segment with whatever is trainable in it as targets."""
    return replace(segment, target=True) if len(segment.logprobs) and not segment.target else segment


def _choose[E: StrEnum](choices: type[E], name: str) -> E:
    try:
        return choices(name)
    except ValueError:
        raise BadChoice(
            f"unknown {choices.__name__.lower()} {name!r}; choose one of {[c.value for c in choices]}"
        ) from None
