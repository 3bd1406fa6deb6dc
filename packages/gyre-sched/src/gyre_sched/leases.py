"""Which agents were heard lately. Kept beside the policy, which is told only of those that fell silent: heartbeats that
say nothing new need neither be decided on nor be written down.

Pure: time comes with every call.
"""

from __future__ import annotations

from gyre_sched.actions import Input, Received, Silent, Tick
from gyre_sched.protocol import CellHello, CellState


class Leases:
    """One lease a cell, renewed by whatever its agent says."""

    def __init__(self, cells: int, lease: float, at: float) -> None:
        """lease: seconds. At the beginning everyone counts as heard."""
        self._lease = lease
        self._heard = dict.fromkeys(range(cells), at)
        self._silent: set[int] = set()
        self._ticked = at

    def hear(self, event: Received) -> None:
        """Renew the lease of the agent that sent `event`, if one did."""
        request = event.request
        if isinstance(request, CellHello | CellState) and request.cell in self._heard:
            self._heard[request.cell] = event.at
            self._silent.discard(request.cell)

    def tick(self, at: float) -> list[Input]:
        """What the policy is to be told at `at`: that time has passed, and whose leases ran out since the last tick.

        When this process itself stood still for half a lease it could hear nobody, so all leases begin anew: agents
        whose own patience ended meanwhile say hello again.
        """
        slept = at - self._ticked if at - self._ticked > self._lease / 2 else 0.0
        self._ticked = at
        if slept:
            self._heard = dict.fromkeys(self._heard, at)
            return [Tick(at, slept)]
        silent = sorted(
            cell for cell, heard in self._heard.items() if at - heard > self._lease and cell not in self._silent
        )
        if not silent:
            return [Tick(at)]
        self._silent.update(silent)
        return [Silent(at, tuple(silent), tuple(at - self._heard[cell] for cell in silent)), Tick(at)]
