"""Who does what, and for how long together."""

from __future__ import annotations

from gyre_sched.protocol import Role
from gyre_sched.simulate.clock import Clock, Sum


class Roles(dict[int, Role]):
    """The role of every cell; sums up how many are in each over time."""

    def __init__(self, clock: Clock, cells: int, role: Role) -> None:
        super().__init__(dict.fromkeys(range(cells), role))
        self._sums = {r: Sum(clock) for r in Role}
        self._sums[role].add(cells)

    def __setitem__(self, cell: int, role: Role) -> None:
        self._sums[self[cell]].add(-1)
        self._sums[role].add(1)
        super().__setitem__(cell, role)

    def total(self, role: Role) -> float:
        """Cell-seconds in `role` up to now."""
        return self._sums[role].total
