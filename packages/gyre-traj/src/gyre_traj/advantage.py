"""Group-relative advantages: one number an execution, inherited by its trajectories."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gyre_traj.errors import BadOutcome


def group_advantages(rewards: ArrayLike, *, std: bool, eps: float = 1e-6) -> NDArray[np.float64]:
    """Rewards of a group's members [g] -> advantages [g].

    `std=False`: reward - mean. `std=True`: (reward - mean) / (std + eps), std with g - 1 degrees of freedom (GRPO,
    arXiv 2402.03300, as verl and TRL compute it). Equal rewards, and a group of one, give exactly 0. g may be any
    number, so groups of unequal size need no care. Raises `BadOutcome` when a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise BadOutcome(f"expected a list of finite rewards, got {rewards!r}; exclude members without a score first")
    if values.size < 2 or values.min() == values.max():
        return np.zeros(values.shape)
    centred: NDArray[np.float64] = values - values.mean()
    if std:
        centred /= values.std(ddof=1) + eps
    return centred
