"""The scheduler's own policy at work in the simulated world: what happens becomes its inputs, its actions happen."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_sched import protocol as p
from gyre_sched.actions import Answer, Call, Input, Publish, Received, Record, Refuse, Returned, Tick
from gyre_sched.config import SchedConfig
from gyre_sched.errors import ScenarioError
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role
from gyre_sched.simulate.clock import Clock
from gyre_sched.simulate.engine import Job
from gyre_sched.simulate.roles import Roles
from gyre_sched.simulate.rollout import Rollout
from gyre_sched.simulate.scenario import Scenario
from gyre_sched.simulate.training import Training
from gyre_sched.simulate.workload import Workload


class PolicyDriver:
    """Drives a `Policy` and carries out what it says."""

    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        clock: Clock,
        config: SchedConfig,
        *,
        per_burst: int,
        steps: int,
        past: Sequence[tuple[str, float]] = (),
        tick: float = 60.0,
    ) -> None:
        """config: its cells and capacity are the scenario's, and no time limit may be reached (`Schedule.config`).
        tick: seconds between looks at the clock, for rules that depend on it."""
        fleet = scenario.fleet
        self._scenario, self._workload, self._clock, self._tick_seconds = scenario, workload, clock, tick
        self._per_burst, self._steps = per_burst, steps
        self.policy = Policy(config, per_burst=per_burst, steps=steps, past=past)
        self.rollout = Rollout(scenario, clock, self._started, self._ended)
        self.training = Training(scenario, clock, core=True, on_change=self._changed, on_publish=self._published)
        self.roles = Roles(clock, fleet.cells + fleet.standalone, Role.STARTING)
        self.records: list[Record] = []
        self.switches = 0
        self._bursts = 0
        self._coming: list[Job] = []  # executions of the next burst
        self._told: p.Backlog | None = None
        self._asking = False
        self._draining: set[int] = set()
        self._dispatched = self._terminated = 0

    def start(self) -> None:
        """Everybody says hello, and the first burst is asked for."""
        fleet = self._scenario.fleet
        for i in self.roles:
            engine = f"cell-{i}"
            self._send(
                p.CellHello(cell=i, agent=engine, engine=engine, engine_url=f"http://{engine}", capacity=fleet.slots)
            )
        self._send(p.ProxyHello(proxy="proxy", url="http://proxy"))
        self._changed()
        self._ask()
        self._clock.after(self._tick_seconds, self._tick)

    # --- what happens

    def _tick(self) -> None:
        self._take(Tick(self._clock.now))
        self._ask()
        self._clock.after(self._tick_seconds, self._tick)

    def _started(self, job: Job) -> None:
        job.version = self.training.published
        self._send(p.Started(execution=job.name, task=job.task))
        if self._continuous:
            self._ask()

    def _ended(self, job: Job) -> None:
        self._terminated += 1
        self._send(p.Terminated(execution=job.name))
        self._clock.after(self._scenario.workload.score_seconds, self.training.submit, job)
        self._ask()

    def _published(self, version: int) -> None:
        self._send(p.Published(version=version, manifest=b""))

    def _changed(self) -> None:
        """The feed tells what it holds."""
        t = self.training
        backlog = p.Backlog(
            waiting=t.waiting,
            open_batch=len(t.closed) if t.open else None,
            micro_steps_left=t.micro_steps_left,
            batches_closed=len(t.closed),
            executions_trained=len(t.closed) * self._scenario.workload.executions,
            executions_excluded=0,
            batches_ready=t.batches_ready,
            version=t.version,
            work_left=t.left,
            work_done=t.done,
        )
        if backlog != self._told:
            self._told = backlog
            self._send(backlog)
            self._ask()

    @property
    def _continuous(self) -> bool:
        return self.policy.config.admission == "continuous"

    def _ask(self) -> None:
        """The runner wants its next burst, as soon as it has nobody left to start."""
        if self._asking or self.rollout.queue or (self._dispatched > self._terminated and not self._continuous):
            return
        if self._bursts * self._per_burst + self._per_burst > self._steps:
            return
        if not self._coming:
            first = self._bursts * self._per_burst
            self._coming = [job for b in range(first, first + self._per_burst) for job in self._workload.batch(b)]
        jobs = self._coming
        tasks: list[str] = []
        if self._scenario.workload.order == "group":
            tasks = [job.task for job in jobs[:: self._scenario.workload.group_size]]
        self._asking = True
        reply = self._send(p.OpenBurst(burst=self._bursts, executions=len(jobs), tasks=tuple(tasks)))
        self._asking = False
        if isinstance(reply, p.Granted):
            self._bursts += 1
            self._coming = []
            self._dispatched += len(jobs)
            size = self._scenario.workload.group_size
            if reply.order:
                jobs = [job for g in reply.order for job in jobs[g * size : (g + 1) * size]]
            self.rollout.dispatch(jobs, reply.capacity)

    # --- what the policy says

    def _send(self, request: p.Request) -> p.Reply | None:
        return self._take(Received(self._clock.now, request))

    def _take(self, event: Input) -> p.Reply | None:
        reply: p.Reply | None = None
        for action in self.policy.step(event):
            match action:
                case Record():
                    self._seen(action)
                case Publish(routes):
                    self._route(routes)
                case Call():
                    self._call(action)
                case Answer(reply):
                    pass
                case Refuse(reason):
                    raise ScenarioError(f"the policy refused {event!r}: {reason}; this is a bug in the simulator")
        return reply

    def _seen(self, record: Record) -> None:
        self.records.append(record)
        if record.kind == "role" and record.cell is not None:
            self.roles[record.cell] = Role(str(record.numbers["to"]))
        elif record.kind == "transfer":
            self.switches += 1
            water = self._dispatched - self._terminated
            left = len(self.rollout.routable) * self._scenario.fleet.slots - self._scenario.fleet.slots
            if water > left:
                raise ScenarioError(f"{water} executions were left to engines that host {left}; the policy is broken")

    def _route(self, routes: p.Routes) -> None:
        names = {f"cell-{i}": i for i in self.roles}
        self.rollout.route([names[e.engine] for e in routes.engines])
        for engine in routes.draining:
            cell = names[engine]
            if cell not in self._draining:
                self._draining.add(cell)
                self.rollout.drain(cell)
                ack = p.Drained(proxy="proxy", engine=engine, epoch=routes.epoch, moved=0)
                self._clock.after(self._scenario.switch.drain, self._drained, ack)

    def _call(self, call: Call) -> None:
        switch, cell, request = self._scenario.switch, call.cell, call.request
        self._draining.discard(cell)
        if isinstance(request, p.EnterTraining):
            self._clock.after(switch.enter, self._entered, call)
        elif isinstance(request, p.Refresh):
            self.rollout.engines[cell].pause(switch.refresh)
            self._clock.after(switch.refresh, self._back, call, request.version)
        else:
            version = request.version
            self.training.leave(
                cell, lambda: self._clock.after(switch.leave + switch.refresh, self._back, call, version)
            )

    def _drained(self, ack: p.Drained) -> None:
        self._send(ack)

    def _entered(self, call: Call) -> None:
        self._take(Returned(self._clock.now, call.cell, call.call, p.Done(seconds=self._scenario.switch.enter)))
        self.training.enter(call.cell)
        self._changed()

    def _back(self, call: Call, version: int) -> None:
        done = p.Done(seconds=self._scenario.switch.refresh, version=version)
        self._take(Returned(self._clock.now, call.cell, call.call, done))
        self.rollout.fill()
        self._ask()
