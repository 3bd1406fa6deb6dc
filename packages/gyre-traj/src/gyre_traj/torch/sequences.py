"""Sequences: which targets belong to one trajectory, and sums over them.

What depends on a whole sequence needs its targets in one micro-step. Packing never parts them; `check_whole` says so
of micro-steps that come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gyre_traj.errors import BadRow
from gyre_traj.packing import Packed


class Sequences:
    """k trajectories among m targets. Sums are float64: a trajectory may have a million targets."""

    def __init__(self, trajectory: torch.Tensor) -> None:
        """`trajectory` [m]: any integers, equal where targets belong together, in any order."""
        self.ids, self.index, self.count = torch.unique(trajectory, return_inverse=True, return_counts=True)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """[m] -> [k], float64."""
        return torch.zeros(len(self.count), dtype=torch.float64, device=values.device).index_add(
            0, self.index, values.double()
        )

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """[m] -> [k], float64."""
        return self.sum(values) / self.count

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Bool [m] -> bool [k]."""
        return self.sum(flags) > 0

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[k] -> [m]."""
        return values[self.index]

    def check(self, name: str, values: torch.Tensor) -> None:
        """Raise `BadRow` unless `values` [m] are equal within each trajectory."""
        one = torch.zeros(len(self.count), dtype=values.dtype, device=values.device).scatter(0, self.index, values)
        differs = values != self.spread(one)
        if bool(differs.any()):
            at = int(differs.int().argmax())
            raise BadRow(
                f"the targets of trajectory {int(self.ids[self.index[at]])} differ in {name}: {values[at].item()!r} "
                f"and {one[self.index[at]].item()!r}; trajectory numbers must be unique in the batch"
            )


def check_whole(packs: Iterable[Packed]) -> None:
    """Raise `BadRow` when a trajectory has targets in more than one of a batch's micro-steps.

    gspo, the levels "sequence" and "geometric", and the veto would then see parts of it, and the batch's loss would
    depend on the cut.
    """
    where: dict[int, int] = {}
    for number, packed in enumerate(packs):
        for trajectory in {row.trajectory for row in packed.rows if row.targets}:
            if (first := where.setdefault(trajectory, number)) != number:
                raise BadRow(
                    f"trajectory {trajectory} has targets in micro-steps {first} and {number}; pack all rows of a "
                    "batch together, or number trajectories through it"
                )
