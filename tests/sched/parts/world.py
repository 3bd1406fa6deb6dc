"""A simulated run around the real policy: agents, proxies, feed and runner as discrete events, with faults on demand.

Every action is checked when it is taken; `World` keeps its own books from the actions alone.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from gyre_sched import protocol as p
from gyre_sched.actions import Answer, Call, Input, Publish, Received, Record, Refuse, Restarted, Returned
from gyre_sched.cell import EDGES
from gyre_sched.config import SchedConfig
from gyre_sched.fence import Fence
from gyre_sched.journal import Step
from gyre_sched.leases import Leases
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role
from gyre_sched.replay import restore, says_nothing_new


def insides(value: Any) -> Any:
    """Everything a value is made of, to compare two by."""
    if isinstance(value, dict):
        return {insides(k): insides(v) for k, v in value.items()}
    if isinstance(value, list | tuple | deque):
        return [insides(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    names = (
        [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())] or list(vars(value))
        if (type(value).__module__.startswith("gyre_sched") and not isinstance(value, msgspec.Struct | StrEnum))
        else []
    )
    return {n: insides(getattr(value, n)) for n in names} if names else value


@dataclass
class Agent:
    """What a cell really does."""

    cell: int
    version: int = 0
    mode: str = "rollout"  # rollout | training
    up: bool = True
    engine: bool = True
    trainer: bool = True
    routable: bool = False
    busy: int = 0  # number of the call being carried out
    instance: int = 1  # which of the cell's agents
    fence: Fence = field(default_factory=lambda: Fence(30.0))


@dataclass
class Group:
    members: int
    excluded: bool = False
    submitted: int = 0
    batch: int = -1
    trained: bool = False


@dataclass
class World:
    """`run` drives a whole training run; the policy's decisions are in `records`."""

    cells: int = 2
    groups: int = 2  # a batch
    group_size: int = 4
    per_burst: int = 2
    steps: int = 4
    seed: int = 0
    proxies: int = 1
    long: float = 100.0  # longest execution, seconds
    slow: float = 5.0  # longest role change
    faults: tuple[tuple[float, str, int], ...] = ()  # (at, kind, cell or proxy)
    settings: dict[str, Any] = field(default_factory=dict)
    reports_ready: bool = True  # whether the feed says how many batches are ready
    replacing: float = 0.0  # share of executions that have no result: seen at their end, or when they are scored

    def __post_init__(self) -> None:
        self.config = SchedConfig(**{"cells": self.cells, "heartbeat": 2.0, **self.settings})
        self.policy = Policy(self.config, per_burst=self.per_burst, steps=self.steps)
        self.leases = Leases(self.cells, self.config.lease, 0.0)
        self.random = random.Random(self.seed)
        self.now = 0.0
        self.records: list[Record] = []
        self.refused: list[str] = []
        self.routes = p.Routes(epoch=0, engines=())
        self.agents = [Agent(i, fence=Fence(self.config.lease)) for i in range(self.cells)]
        self.roles = dict.fromkeys(range(self.cells), Role.STARTING)
        self.dispatched = self.terminated = 0  # as told to the policy
        self.ended: set[str] = set()
        self.replaced = 0
        self.version = 0
        self.open: int | None = None
        self.closed = 0
        self.all_groups: list[Group] = []
        self.bursts = 0
        self.deaf: set[int] = set()  # proxies that never ack
        self.failing: dict[int, int] = {}  # cell -> calls that will fail
        self.unanswered: dict[int, int] = {}
        self._acked: dict[int, set[tuple[str, int]]] = {i: set() for i in range(self.proxies)}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._burst_version = 0
        self.journal: list[Step] = []
        self._forgotten: set[int] = set()  # calls of schedulers that are gone
        self._step(Restarted(0.0))

    # --- time

    def later(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), do))

    def some(self, most: float) -> float:
        return self.random.choice((0.0, self.random.random() * most, self.random.random() ** 4 * most))

    def run(self, limit: float | None = None) -> World:
        """Until every step is trained and all cells are back, or `limit` seconds."""
        if limit is None:  # one execution at a time, and time for failures to heal
            limit = 20_000.0 + self.groups * self.group_size * self.steps * self.long
        for i in range(self.cells):
            self.later(self.some(self.slow), lambda i=i: self._beat(i))
        for i in range(self.proxies):
            self.later(self.some(1.0), lambda i=i: self.send(p.ProxyHello(proxy=f"proxy-{i}", url=f"http://p{i}")))
        self.later(self.some(1.0), self._tell_backlog)
        self.later(self.some(1.0), self._ask)
        self.later(self.config.heartbeat, self._tick)
        for at, kind, index in self.faults:
            self.later(at, lambda kind=kind, index=index: self._fault(kind, index))
        while self._heap and self.now <= limit and not self.finished:
            self.now, _, do = heapq.heappop(self._heap)
            do()
        return self

    @property
    def finished(self) -> bool:
        done = self.closed >= self.steps and self.policy.state.water == 0
        return done and all(r in (Role.ROLLOUT, Role.FAILED, Role.FENCED) for r in self.roles.values())

    def kinds(self, kind: str) -> list[Record]:
        return [r for r in self.records if r.kind == kind]

    # --- the policy and its checks

    def send(self, request: p.Request) -> p.Reply | None:
        if isinstance(request, p.Terminated):
            self.terminated += 1
        event = Received(self.now, request)
        self.leases.hear(event)
        reply = self._step(event)
        assert reply is not None
        return reply if not isinstance(reply, str) else None

    def _tick(self) -> None:
        for event in self.leases.tick(self.now):
            self._step(event)
        self.later(self.config.heartbeat, self._tick)

    def _step(self, event: Input) -> Any:
        if isinstance(event, Returned) and event.call in self._forgotten:
            return None  # the scheduler that asked is gone
        repeated = says_nothing_new(event, self.policy.state)
        actions = self.policy.step(event)
        if not repeated or any(not isinstance(action, Answer) for action in actions):
            made = [a for a in actions if isinstance(a, Record)]
            events = [p.Event(seq=i, at=r.at, kind=r.kind, cell=r.cell, numbers=r.numbers) for i, r in enumerate(made)]
            self.journal.append(Step(event, tuple(events)))
        return self._take(actions)

    def _restart(self) -> None:
        """The scheduler dies, and another goes on from the journal: in the same state, whatever that was."""
        before = self.policy
        self.policy = Policy(self.config, per_burst=self.per_burst, steps=self.steps)
        restore(self.policy, self.journal)
        assert insides(self.policy.state) == insides(before.state)
        self._forgotten.update(cell.pending.call for cell in before.state.cells if cell.pending)
        self.leases = Leases(self.cells, self.config.lease, self.now)
        self._step(Restarted(self.now))

    def _take(self, actions: list[Any]) -> Any:
        reply: Any = None
        for action in actions:
            match action:
                case Record():
                    self._check_record(action)
                    self.records.append(action)
                case Publish(routes):
                    self._check_routes(routes)
                    for i in range(self.proxies):
                        self._proxy_sees(i, routes)
                case Call():
                    self._carry_out(action)
                case Answer(answer):
                    assert reply is None
                    reply = answer
                case Refuse(reason):
                    assert reply is None
                    if "say hello" not in reason:
                        self.refused.append(reason)
                    reply = reason
        moving = [i for i, r in self.roles.items() if r in (Role.DRAINING, Role.ENTERING)]
        assert len(moving) <= 1, f"transfers are serial: {moving}"
        assert {c.index: c.role for c in self.policy.state.cells} == self.roles
        return reply

    def _check_record(self, record: Record) -> None:
        n, cell = record.numbers, record.cell
        if record.kind == "role":
            assert cell is not None
            assert self.roles[cell] == n["from"], "a cell is in exactly one role"
            assert Role(n["to"]) in EDGES[Role(n["from"])]
            assert n["seconds"] >= 0
            self.roles[cell] = Role(n["to"])
        elif record.kind == "transfer":
            water = self.dispatched - self.terminated
            assert cell is not None
            capacity = (sum(r is Role.ROLLOUT for r in self.roles.values()) + 1) * self.config.capacity
            assert (n["w"], n["C_R"]) == (water, capacity)
            assert n["w"] <= n["C_R"] - n["C_e"], "water"
            assert cell == 0 or self.roles[0] is Role.TRAINING, "the core goes first"
            assert n["d"] - n["f"] == n["w"]
        elif record.kind == "replaced":
            self.replaced += 1
            self.dispatched += 1
            if n["execution"] not in self.ended:
                self.terminated += 1
            elif any(r not in (Role.ROLLOUT, Role.STARTING, Role.FAILED, Role.FENCED) for r in self.roles.values()):
                assert self.dispatched - self.terminated <= n["C_R"], "what stays routable covers it"
            assert n["d"] - n["f"] == n["w"] == self.dispatched - self.terminated
        elif record.kind == "burst_granted":
            self.dispatched += n["executions"]
            self.bursts += 1
            self._burst_version = n["version"]
            assert self.routes.engines

    def _check_routes(self, routes: p.Routes) -> None:
        assert routes.epoch > self.routes.epoch
        self.routes = routes
        assert [e.engine for e in routes.engines] == [
            f"cell-{i}" for i, r in sorted(self.roles.items()) if r is Role.ROLLOUT
        ]
        assert list(routes.draining) == [f"cell-{i}" for i, r in sorted(self.roles.items()) if r is Role.DRAINING]
        for engine in routes.engines:
            agent = self.agents[engine.lasting]
            assert agent.mode == "rollout" or not agent.up
            if self.dispatched > self.terminated:
                assert engine.version >= self._burst_version, "an engine joined with older weights than the burst's"

    # --- agents

    def _hello(self, i: int) -> None:
        agent = self.agents[i]
        names = {"agent": f"agent-{i}", "engine": f"cell-{i}", "engine_url": f"http://{i}"}
        reply = self.send(
            p.CellHello(
                cell=i, capacity=self.config.capacity, version=agent.version, instance=str(agent.instance),
                role=agent.mode, **names,
            )
        )  # fmt: skip
        assert isinstance(reply, p.Registered)
        instance, sent = agent.instance, self.now

        def arrives() -> None:  # an order may overtake it
            if agent.instance == instance and reply.registration > agent.fence.registration:
                assert agent.fence.registered(reply, sent)

        self.later(self.some(min(self.slow, 1.0)), arrives)

    def _state(self, i: int) -> None:
        agent = self.agents[i]
        if not agent.up or not agent.fence.holds(self.now):
            return
        trainer = "training" if agent.mode == "training" else "idle"
        reply = self.send(
            p.CellState(
                cell=i, engine_alive=agent.engine, trainer_alive=agent.trainer, trainer=trainer,
                version=agent.version, routable=agent.routable, registration=agent.fence.registration,
            )
        )  # fmt: skip
        if reply is None:
            agent.fence.lapse()
        else:
            agent.fence.acknowledged(self.now)

    def _beat(self, i: int) -> None:
        agent = self.agents[i]
        if agent.up and not agent.fence.holds(self.now):
            self._hello(i)
        self._state(i)
        self.later(self.config.heartbeat, lambda: self._beat(i))

    def _carry_out(self, call: Call) -> None:
        agent = self.agents[call.cell]
        reason = agent.fence.refusal(call.request, self.now)
        if agent.up and reason is not None:
            reply = p.Fenced(term=agent.fence.term, detail=reason)
            self.later(0.0, lambda: self._step(Returned(self.now, call.cell, call.call, reply)))
            return
        agent.busy = call.call
        self.later(self.some(self.slow), lambda: self._end_call(call))

    def _end_call(self, call: Call) -> None:
        agent = self.agents[call.cell]
        back = lambda reply: self._step(Returned(self.now, call.cell, call.call, reply))  # noqa: E731
        if not agent.up or self.unanswered.get(call.cell, 0) > 0:
            self.unanswered[call.cell] = self.unanswered.get(call.cell, 0) - 1
            self.later(call.deadline, lambda: back(p.Failed(detail="no answer")))
            return
        if self.failing.get(call.cell, 0) > 0 or not agent.engine or agent.busy != call.call:
            self.failing[call.cell] = self.failing.get(call.cell, 0) - 1
            back(p.Failed(detail="scripted"))
            return
        if isinstance(call.request, p.EnterTraining):
            agent.mode = "training"
            back(p.Done(seconds=1.0))
            self._work()
        else:
            agent.mode, agent.version = "rollout", call.request.version
            back(p.Done(seconds=1.0, version=agent.version))

    def _fault(self, kind: str, i: int) -> None:
        if kind == "deaf":
            self.deaf.add(i % self.proxies)
        agent = self.agents[i % self.cells]
        match kind:
            case "scheduler":
                self._restart()
            case "engine":
                agent.engine = agent.routable = False
                self._state(agent.cell)
                self.later(20.0, lambda: self._engine_back(agent))
            case "trainer":
                agent.trainer = False
                self._state(agent.cell)
                self.later(10.0, lambda: self._trainer_back(agent))
            case "agent":
                agent.up = False
                self.later(60.0, lambda: self._agent_back(agent))
            case "dead":  # for good; a run needs its core
                agent.up = agent.up and agent.cell == 0
            case "silent":  # a partition: it works on, unheard
                agent.up = False
                self.later(60.0, lambda: setattr(agent, "up", True))
            case "call":
                self.failing[agent.cell] = 1
            case "hang":
                self.unanswered[agent.cell] = 1

    def _trainer_back(self, agent: Agent) -> None:
        agent.trainer = True
        self._state(agent.cell)
        self._work()

    def _engine_back(self, agent: Agent) -> None:
        agent.engine = True
        agent.routable = agent.mode == "rollout"
        self._state(agent.cell)

    def _agent_back(self, agent: Agent) -> None:
        agent.up = agent.engine = agent.trainer = True
        agent.mode, agent.version, agent.busy, agent.routable = "rollout", 0, 0, False
        agent.instance, agent.fence = agent.instance + 1, Fence(self.config.lease)
        self._hello(agent.cell)

    # --- proxies

    def _proxy_sees(self, i: int, routes: p.Routes) -> None:
        for engine in routes.draining:
            if i not in self.deaf:
                ack = p.Drained(proxy=f"proxy-{i}", engine=engine, epoch=routes.epoch, moved=1)
                for _ in range(self.random.choice((1, 1, 2))):
                    self.later(self.some(self.slow), lambda ack=ack: self.send(ack))

    # --- the runner

    def _ask(self) -> None:
        if self.bursts * self.per_burst >= self.steps:
            return
        executions = self.groups * self.group_size * self.per_burst
        burst = self.bursts
        reply = self.send(p.OpenBurst(burst=burst, executions=executions))
        if not isinstance(reply, p.Granted):
            self.later(0.5, self._ask)
            return
        again = self.send(p.OpenBurst(burst=burst, executions=executions))
        assert isinstance(again, p.Granted), "asked again, granted again"
        waiting = [f"{burst}-{e}" for e in range(executions)]
        base = len(self.all_groups)
        self.all_groups += [
            Group(self.group_size, excluded=self.random.random() < 0.1) for _ in range(executions // self.group_size)
        ]
        for execution in waiting[: reply.capacity]:
            self._dispatch(execution, waiting, base)
        del waiting[: reply.capacity]

    def _dispatch(self, execution: str, waiting: list[str], base: int) -> None:
        if self.random.random() < 0.9:
            self.later(0.0, lambda: self.send(p.Started(execution=execution)))
        self.later(self.some(self.long), lambda: self._terminate(execution, waiting, base))

    def _terminate(self, execution: str, waiting: list[str], base: int) -> None:
        group = self.all_groups[base + int(execution.rstrip("r").split("-")[1]) // self.group_size]
        if self.random.random() < self.replacing and self._replaced(execution):
            self._dispatch(f"{execution}r", waiting, base)
            return
        self.ended.add(execution)
        self.send(p.Terminated(execution=execution))
        if self.random.random() < 0.2:
            self.terminated -= 1  # a repeated message counts once
            self.send(p.Terminated(execution=execution))
        self.later(self.some(self.slow), lambda: self._scored(execution, waiting, base, group))
        if waiting:
            self._dispatch(waiting.pop(0), waiting, base)
        elif self.policy.state.water == 0:
            self.later(0.5, self._ask)

    def _scored(self, execution: str, waiting: list[str], base: int, group: Group) -> None:
        if self.random.random() < self.replacing and self._replaced(execution):
            self._dispatch(f"{execution}r", waiting, base)
        else:
            self._submit(group)

    def _replaced(self, execution: str) -> bool:
        message = p.Replace(execution=execution, by=f"{execution}r", burst=int(execution.split("-")[0]))
        reply = self.send(message)
        if isinstance(reply, p.Ack):
            assert self.send(message) == p.Ack(), "said again, and counted once"
            self._tell_backlog()
        return isinstance(reply, p.Ack)

    # --- the feed and the trainers

    @property
    def _complete(self) -> list[Group]:
        return [g for g in self.all_groups if g.submitted == g.members]

    def _submit(self, group: Group) -> None:
        group.submitted += 1
        self._work()
        self._tell_backlog()

    def _work(self) -> None:
        """Whoever is in training takes what there is: a group is a micro-step; the core opens and closes batches."""
        core = self.agents[0]
        if core.mode != "training" or not core.up or not core.trainer:
            return
        ready = [g for g in self._complete if g.batch < 0]
        if self.open is None and ready and self.policy.state.version == self.version:
            self.open = self.closed
        if self.open is None:
            return
        members = [g for g in self.all_groups if g.batch == self.open]
        for group in ready[: self.groups - len(members)]:
            group.batch = self.open
            self.later(self.some(self.slow), lambda g=group: self._trained(g))

    def _trained(self, group: Group) -> None:
        core = self.agents[0]
        if core.mode != "training" or not core.up:
            self.later(5.0, lambda: self._trained(group))
            return
        group.trained = True
        members = [g for g in self.all_groups if g.batch == self.open]
        if len(members) == self.groups and all(g.trained for g in members):
            self.later(self.some(self.slow), self._close)
        self._tell_backlog()

    def _close(self) -> None:
        if self.agents[0].mode != "training" or not self.agents[0].up:
            self.later(5.0, self._close)
            return
        self.open, self.closed, self.version = None, self.closed + 1, self.version + 1
        version = self.version
        tell = [lambda: self.send(p.Published(version=version, manifest=b"m")), self._tell_backlog]
        self.random.shuffle(tell)
        for i, do in enumerate(tell):
            self.later(i * self.some(1.0), do)
        self.later(1.0, self._work)
        self.later(1.0, self._tell_backlog)

    def _tell_backlog(self) -> None:
        free = [g for g in self._complete if g.batch < 0]
        mine = [g for g in self.all_groups if g.batch == self.open] if self.open is not None else []
        left = sum(not g.trained for g in mine)
        finished = [g for g in self.all_groups if 0 <= g.batch < self.closed]
        self.send(
            p.Backlog(
                waiting=sum(1 if g.excluded else g.members for g in free),
                open_batch=self.open,
                micro_steps_left=left,
                batches_closed=self.closed,
                executions_trained=sum(g.members for g in finished if not g.excluded),
                executions_excluded=sum(g.members for g in finished if g.excluded) + self.replaced,
                batches_ready=(len(free) // self.groups + (left > 0)) if self.reports_ready else 0,
                version=self.version,
                work_left=float(sum(not g.trained for g in (*free, *mine))),
                work_done=float(sum(g.trained for g in self.all_groups)),
            )
        )
