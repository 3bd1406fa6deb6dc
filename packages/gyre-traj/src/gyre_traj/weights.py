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

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from gyre_traj.errors import BadChoice
from gyre_traj.packing import Row
from gyre_traj.selection import Selection


class Counting(StrEnum):
    """How often a sampled token shared by several selected trajectories is a target."""

    EXECUTION = "per_execution"
    TRAJECTORY = "per_trajectory"


class Aggregation(StrEnum):
    """How per-target losses become one number; see the module's table."""

    TWO_LEVEL = "two-level"
    TOKEN_MEAN = "token-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"


@dataclass(frozen=True, slots=True)
class Weighted:
    """Rows of one execution, and what it adds to the batch's denominator (0 without targets under means over tokens or
    trajectories; 1 always under two-level)."""

    rows: tuple[Row, ...]
    units: float


def target_weights(
    counts: NDArray[np.int64] | list[int], aggregation: Aggregation | str = Aggregation.TWO_LEVEL, norm: float = 1.0
) -> tuple[NDArray[np.float64], float]:
    """Targets of an execution's trajectories [k] -> (w of each target of trajectory i [k], units)."""
    raise NotImplementedError


def weigh(
    selection: Selection,
    *,
    advantage: float,
    first_trajectory: int = 0,
    counting: Counting | str = Counting.EXECUTION,
    aggregation: Aggregation | str = Aggregation.TWO_LEVEL,
    norm: float = 1.0,
) -> Weighted:
    """Turn one execution's selection into rows with weights; trajectory numbers count from `first_trajectory`.

    Trajectories without a target give no row. Raises `BadChoice` for an unknown name.
    """
    raise NotImplementedError


_ = BadChoice
