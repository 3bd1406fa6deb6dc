"""Colocate whose idle cells train: a cell whose executions have all ended trains; nothing is moved.

No policy is at work here: a scheduler that knows only the water level cannot know which engine is empty. It is the
baseline that elasticity has to beat, and without `eager` (every cell waits for the last execution) a second opinion on
the policy's own colocate schedule. To its advantage, any cell may open a batch.
"""

from __future__ import annotations

from gyre_sched.protocol import Role
from gyre_sched.simulate.clock import Clock
from gyre_sched.simulate.engine import Job
from gyre_sched.simulate.roles import Roles
from gyre_sched.simulate.rollout import Rollout
from gyre_sched.simulate.scenario import Scenario
from gyre_sched.simulate.training import Training
from gyre_sched.simulate.workload import Workload


class IdleDriver:
    """Bursts of `per_burst` batches, trained where and when cells are empty."""

    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        clock: Clock,
        *,
        per_burst: int,
        steps: int,
        eager: bool = True,
    ) -> None:
        self._scenario, self._workload, self._clock = scenario, workload, clock
        self._per_burst, self._steps, self._eager = per_burst, steps, eager
        self.rollout = Rollout(scenario, clock, self._started, self._ended)
        self.training = Training(
            scenario, clock, core=False, on_change=self._look, on_publish=lambda version: self._look()
        )
        self.roles = Roles(clock, scenario.fleet.cells, Role.ROLLOUT)
        self.switches = 0
        self._bursts = 0
        self._unfinished = 0

    def start(self) -> None:
        """The first burst."""
        self._grant()

    def _grant(self) -> None:
        if (self._bursts + 1) * self._per_burst > self._steps:
            return
        first = self._bursts * self._per_burst
        jobs = [job for b in range(first, first + self._per_burst) for job in self._workload.batch(b)]
        self._bursts += 1
        self._unfinished = len(jobs)
        self.rollout.route(list(self.roles))
        self.rollout.dispatch(jobs, len(self.roles) * self._scenario.fleet.slots)

    def _started(self, job: Job) -> None:
        job.version = self.training.published

    def _ended(self, job: Job) -> None:
        self._unfinished -= 1
        self._clock.after(self._scenario.workload.score_seconds, self.training.submit, job)
        self._look()

    def _look(self) -> None:
        due = self._bursts * self._per_burst
        trained = self.training.version >= due and self.training.published == self.training.version
        if trained and not self._unfinished:
            for cell, role in self.roles.items():
                if role is Role.TRAINING:
                    self.roles[cell] = Role.LEAVING
                    self.training.leave(cell, lambda cell=cell: self._leave(cell))  # type: ignore[misc]
            return
        if self.rollout.queue or (self._unfinished and not self._eager):
            return
        empty = [i for i, r in self.roles.items() if r is Role.ROLLOUT and not self.rollout.engines[i].jobs]
        for cell in empty:
            self.roles[cell] = Role.ENTERING
            self.switches += 1
            self._clock.after(self._scenario.switch.enter, self._entered, cell)

    def _entered(self, cell: int) -> None:
        self.roles[cell] = Role.TRAINING
        self.training.enter(cell)
        self._look()

    def _leave(self, cell: int) -> None:
        switch = self._scenario.switch
        self._clock.after(switch.leave + switch.refresh, self._back, cell)

    def _back(self, cell: int) -> None:
        self.roles[cell] = Role.ROLLOUT
        if all(role is Role.ROLLOUT for role in self.roles.values()):
            self._grant()
