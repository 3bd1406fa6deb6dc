"""Selection: at most J_max root-to-leaf paths an execution, drawn by role priority, each sampled token a target once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_traj.roles import DEFAULT_PRIORITY, RolePriority
from gyre_traj.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A root-to-leaf path of n tokens."""

    execution: str
    call: str  # the call whose output ends it
    role: str
    ids: NDArray[np.uint32]  # [n]
    target: NDArray[np.bool_]  # [n] trainable, and not a target of a trajectory selected earlier
    trainable: NDArray[np.bool_]  # [n] sampled by the policy, with its log-probability
    logprobs: NDArray[np.float32]  # [n] behaviour log-probability where trainable, else 0 and never read
    version: NDArray[np.int32]  # [n] weights that sampled the token; -1 where not sampled, or not known


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The trajectories of one execution, in the order drawn, and the trainable tokens nobody drew, by role."""

    execution: str
    trajectories: tuple[Trajectory, ...]
    left_out: dict[str, int]

    @property
    def targets(self) -> int:
        """|T_e|: targets over all trajectories."""
        return sum(int(t.target.sum()) for t in self.trajectories)


def select(tree: Tree, j_max: int | None, seed: int, priority: RolePriority = DEFAULT_PRIORITY) -> Selection:
    """Draw trajectories from `tree`.

    From the highest role class that still has unmasked trainable tokens, draw a leaf with probability proportional to
    the unmasked trainable tokens on its path, take the path, mask it; until nothing is left or `j_max` are taken
    (None: no cap). The same (tree, seed) gives the same selection on every machine. Raises `BadChoice` for j_max < 1.
    """
    raise NotImplementedError
