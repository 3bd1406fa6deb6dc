"""What the policy does to cells, each with its journal line: moves, calls to agents, failures, admissions."""

from __future__ import annotations

import msgspec

from gyre_sched import rules
from gyre_sched.actions import Action, Call, Record
from gyre_sched.cell import Cell, Pending
from gyre_sched.config import SchedConfig
from gyre_sched.protocol import EnterRollout, EnterTraining, Refresh, Role
from gyre_sched.state import State

Numbers = dict[str, float | int | str | None]


class Motions:
    """Changes `state` and collects the actions that carry the change out."""

    def __init__(self, state: State, config: SchedConfig) -> None:
        self.state = state
        self.config = config
        self.out: list[Action] = []
        self.rerouted = False

    def begin(self) -> None:
        """A new step."""
        self.out, self.rerouted = [], False

    def record(self, kind: str, at: float, cell: Cell | None = None, numbers: Numbers | None = None) -> None:
        """A line for the journal."""
        self.out.append(Record(at, kind, cell.index if cell else None, numbers or {}))

    def reroute(self) -> None:
        """The routes have changed."""
        self.state.epoch += 1
        self.rerouted = True

    def move(self, cell: Cell, to: Role, at: float) -> None:
        """Along an edge of the cell's state machine; raises `IllegalEdge`."""
        before = cell.role
        seconds = self.state.move(cell, to, at)
        if {before, to} & {Role.ROLLOUT, Role.DRAINING}:
            self.reroute()
        numbers: Numbers = {"from": before.value, "to": to.value, "seconds": round(seconds, 6)}
        self.record("role", at, cell, {**numbers, "epoch": self.state.epoch})

    def _call(self, cell: Cell, request: EnterTraining | EnterRollout | Refresh, deadline: float) -> None:
        self.state.calls += 1
        order = msgspec.structs.replace(request, term=self.state.term, registration=cell.registration)
        cell.pending = Pending(self.state.calls, order)
        self.out.append(Call(cell.index, cell.agent, self.state.calls, order, deadline))

    def again(self, cell: Cell) -> None:
        """Give the order that is not answered once more: the one who was given it, or who gave it, is another now."""
        if cell.pending is not None:
            entering = isinstance(cell.pending.request, EnterTraining)
            deadline = self.config.enter_timeout if entering else self.config.return_timeout
            self._call(cell, cell.pending.request, deadline)

    def enter(self, cell: Cell, at: float) -> None:
        """DRAINING -> ENTERING."""
        self.move(cell, Role.ENTERING, at)
        self._call(cell, EnterTraining(), self.config.enter_timeout)

    def leave(self, cell: Cell, at: float, why: str) -> None:
        """TRAINING -> LEAVING, or FAILED -> REFRESHING: the trainer leaves, the engine takes the current weights."""
        self.record("leave", at, cell, {"why": why, **self.state.numbers()})
        if cell.role is Role.TRAINING:
            cell.enter_failures = 0  # it entered, and stayed until it was told to leave
            self.move(cell, Role.LEAVING, at)
        else:
            self.move(cell, Role.REFRESHING, at)
        version, manifest = self.state.weights
        self._call(cell, EnterRollout(version=version, manifest=manifest), self.config.return_timeout)

    def refresh(self, cell: Cell, at: float, *, in_place: bool = False) -> None:
        """The engine takes the current weights; in place: without leaving the routes."""
        if not in_place:
            self.move(cell, Role.REFRESHING, at)
        version, manifest = self.state.weights
        self._call(cell, Refresh(version=version, manifest=manifest), self.config.return_timeout)

    def admit(self, cell: Cell, at: float) -> None:
        """A healthy engine outside the routes joins them, or takes newer weights first."""
        if cell.version < rules.wanted_version(self.state):
            self.refresh(cell, at)
        else:
            cell.return_failures = 0
            self.move(cell, Role.ROLLOUT, at)

    def fail(
        self, cell: Cell, at: float, kind: str, retry_after: float, numbers: Numbers, to: Role = Role.FAILED
    ) -> None:
        """Take a cell out of everything; the policy brings it back."""
        self.record(kind, at, cell, {"role": cell.role.value, **numbers})
        if self.state.moving and self.state.moving.cell == cell.index:
            self.state.moving = None
        cell.pending, cell.routable, cell.trainer_lost, cell.retry_at = None, False, None, at + retry_after
        cell.state = None  # whatever the agent says next says something new
        if cell.role is not to:
            self.move(cell, to, at)

    def enter_failed(self, cell: Cell, at: float, detail: str) -> None:
        """The cell could not enter training, or lost its trainer for good."""
        cell.enter_failures += 1
        cell.suspect = True
        numbers: Numbers = {"detail": detail, "failures": cell.enter_failures}
        self.fail(cell, at, "enter_failed", self._backoff(cell.enter_failures), numbers)
        if cell.barred(self.config):
            self.record("barred", at, cell, {"failures": cell.enter_failures})

    def return_failed(self, cell: Cell, at: float, detail: str) -> None:
        """The cell could not return to rollout, or not with the right weights."""
        cell.return_failures += 1
        cell.suspect = True
        numbers: Numbers = {"detail": detail, "failures": cell.return_failures}
        self.fail(cell, at, "return_failed", self._backoff(cell.return_failures), numbers)
        if cell.lost(self.config):
            self.record("lost", at, cell, {"failures": cell.return_failures})

    def _backoff(self, failures: int) -> float:
        return self.config.retry_delay * 2.0 ** min(failures - 1, 10)
