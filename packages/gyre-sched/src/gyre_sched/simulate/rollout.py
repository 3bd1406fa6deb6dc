"""The rollout side: executions on engines, the runner's queue, caps on time, moves away from an engine that leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gyre_sched.simulate.clock import Clock, Sum
from gyre_sched.simulate.engine import EngineModel, Job
from gyre_sched.simulate.scenario import Scenario


class Rollout:
    """Engines 0 … n-1 and the executions on them. `on_start(job)` and `on_end(job)` tell of executions."""

    def __init__(
        self, scenario: Scenario, clock: Clock, on_start: Callable[[Job], None], on_end: Callable[[Job], None]
    ) -> None:
        self._scenario, self._clock, self._on_start, self._on_end = scenario, clock, on_start, on_end
        fleet = scenario.fleet
        self.engines = [
            EngineModel(i, clock, fleet, scenario.switch, self._sampled) for i in range(fleet.cells + fleet.standalone)
        ]
        self.routable: list[EngineModel] = []
        self.queue: deque[Job] = deque()
        self.limit = 0  # executions alive at a time
        self.alive = 0
        self.busy = Sum(clock)  # executions alive
        self.moves = 0
        self._cap = scenario.workload.cap_hours * 3600.0 if scenario.workload.cap == "wall" else None

    def route(self, engines: list[int]) -> None:
        """From now on requests go to these engines."""
        self.routable = [self.engines[i] for i in engines]

    def dispatch(self, jobs: list[Job], limit: int) -> None:
        """Start `jobs` in order, at most `limit` executions alive at a time."""
        self.queue.extend(jobs)
        self.limit = limit
        self.fill()

    def fill(self) -> None:
        """Start what may be started."""
        while self.queue and self.alive < self.limit and self.routable:
            job = self.queue.popleft()
            self.alive += 1
            self.busy.add(1)
            job.started = self._clock.now
            self._settle(job, self._choose(moved=False))
            self._on_start(job)
            if self._cap is not None:
                self._clock.after(self._cap, self._cut, job)
            self._call(job)

    def drain(self, index: int) -> None:
        """Every execution of engine `index` goes on elsewhere, where it will not have to move again soon."""
        source = self.engines[index]
        for job in sorted(source.jobs, key=lambda j: (j.started, j.name)):
            running = source.withdraw(job)
            source.forget(job)
            self._settle(job, self._choose(moved=True))
            job.move = True
            self.moves += 1
            if running:
                assert job.engine is not None  # noqa: S101
                job.engine.submit(job)

    def _choose(self, *, moved: bool) -> EngineModel:
        """As the proxy does: the least loaded with a free place, of several the one that stays longest; who moves looks
        first for the engine that stays."""
        slots = self._scenario.fleet.slots

        def rank(e: EngineModel) -> tuple[bool, int, int]:
            load, full = len(e.jobs), len(e.jobs) >= slots
            return (full, -e.index, load) if moved and not full else (full, load, -e.index)

        return min(self.routable, key=rank)

    def _settle(self, job: Job, engine: EngineModel) -> None:
        job.engine = engine
        engine.jobs.add(job)

    # --- one execution

    def _call(self, job: Job) -> None:
        turn = job.turns[job.turn]
        job.fresh, job.left = turn.fresh, turn.output
        job.context = min(self._scenario.fleet.context, job.context + turn.fresh)
        job.fresh = min(job.fresh, job.context)
        assert job.engine is not None  # noqa: S101
        job.engine.submit(job)

    def _sampled(self, job: Job) -> None:
        turn = job.turns[job.turn]
        job.tokens += turn.fresh + turn.output
        job.context = min(self._scenario.fleet.context, job.context + turn.output)
        job.turn += 1
        job.token += 1
        self._clock.after(turn.pause, self._next, job, job.token)

    def _next(self, job: Job, token: int) -> None:
        if job.token == token:
            if job.turn < len(job.turns):
                self._call(job)
            else:
                self._end(job)

    def _cut(self, job: Job) -> None:
        """The wall-clock cap: what it has sampled by now counts."""
        if job.engine is None:
            return
        if job.engine.withdraw(job):
            turn = job.turns[job.turn]
            job.tokens += turn.fresh + turn.output - job.left
        job.capped = True
        self._end(job)

    def _end(self, job: Job) -> None:
        assert job.engine is not None  # noqa: S101
        job.token += 1
        job.engine.forget(job)
        job.engine = None
        self.alive -= 1
        self.busy.add(-1)
        self._on_end(job)
        self.fill()
