"""Every interleaving of a small run: two cells, one burst, drains, failures and returns in any order.

From each state all that may happen next is tried, until no new state turns up. In each state the rules hold; and from
each the burst can still end with every healthy cell back in rollout, so there is no state in which the run is stuck.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from gyre_sched import protocol as p
from gyre_sched.actions import Answer, Call, Publish, Received, Record, Refuse, Restarted, Returned, Silent, Tick
from gyre_sched.cell import EDGES, MOVING
from gyre_sched.config import SchedConfig
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role

CELLS, EXECUTIONS = 2, 2
LATER = 400.0  # longer than any role may last


@dataclass
class Truth:
    """What a cell really is."""

    engine: bool = True
    mode: str = "rollout"
    call: Call | None = None  # that it was told to carry out


@dataclass
class World:
    """A moment: the policy, the cells, and how many faults may still happen."""

    policy: Policy
    faults: int
    at: float = 0.0
    cells: list[Truth] = field(default_factory=lambda: [Truth() for _ in range(CELLS)])
    ended: int = 0
    closed: int = 0
    routes: tuple[str, ...] = ()

    def take(self, event: object) -> p.Reply | None:
        reply, before = None, {c.index: c.role for c in self.policy.state.cells}
        for action in self.policy.step(event):
            match action:
                case Record(kind="role", cell=cell, numbers=n):
                    assert Role(n["from"]) is before[cell]
                    assert Role(n["to"]) in EDGES[before[cell]]
                    before[cell] = Role(n["to"])
                case Record(kind="transfer", numbers=n):
                    assert n["w"] <= n["C_R"] - n["C_e"], "water"
                    assert n["w"] == EXECUTIONS - self.ended
                case Call():
                    self.cells[action.cell].call = action
                case Publish(routes):
                    self.routes = tuple(e.engine for e in routes.engines)
                case Answer(reply):
                    pass
                case Refuse(reason):
                    raise AssertionError(reason)
        self.check()
        return reply

    def check(self) -> None:
        state = self.policy.state
        moving = [c for c in state.cells if c.role in MOVING]
        assert len(moving) <= 1, "transfers are serial"
        assert sorted(i for cells in state.by_role.values() for i in cells) == list(range(CELLS)), "lost or duplicated"
        assert all(c.index in state.by_role[c.role] for c in state.cells)
        assert self.routes == tuple(f"cell-{c.index}" for c in state.cells if c.role is Role.ROLLOUT)
        for c in state.cells:
            if c.role is Role.ROLLOUT:
                assert self.cells[c.index].mode == "rollout", "requests are sent to an engine without memory"

    def send(self, request: p.Request) -> p.Reply | None:
        return self.take(Received(self.at, request))

    def tell_feed(self) -> None:
        waiting = self.ended - self.closed
        self.send(
            p.Backlog(
                waiting=waiting, open_batch=None, micro_steps_left=0, batches_closed=self.closed,
                executions_trained=self.closed, executions_excluded=0, batches_ready=waiting,
            )
        )  # fmt: skip

    def tell_state(self, i: int) -> None:
        truth, cell = self.cells[i], self.policy.state.cells[i]
        trainer = "training" if truth.mode == "training" else "idle"
        routable = truth.engine and truth.mode == "rollout" and truth.call is None
        self.send(
            p.CellState(
                cell=i, engine_alive=truth.engine, trainer_alive=True, trainer=trainer, routable=routable,
                registration=cell.registration,
            )
        )  # fmt: skip

    def hello(self, i: int, instance: str = "a") -> None:
        names = {"agent": f"agent-{i}", "engine": f"cell-{i}", "engine_url": f"http://{i}", "instance": instance}
        role = "between" if self.cells[i].call else self.cells[i].mode
        self.send(p.CellHello(cell=i, capacity=1, role=role, **names))

    # --- what may happen

    def choices(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        state = self.policy.state
        if self.ended < EXECUTIONS:
            yield "an execution ends", World.end
        if state.moving and state.moving.waiting:
            yield "the proxy has drained", World.drained
        if self.cells[0].mode == "training" and state.core.role is Role.TRAINING and self.ended > self.closed:
            yield "a batch is trained", World.train
        yield "time passes", World.wait
        for i, (truth, cell) in enumerate(zip(self.cells, state.cells, strict=True)):
            if truth.call and truth.engine:
                yield f"cell {i} does as told", lambda w, i=i: w.done(i)
            if cell.role is Role.FENCED:
                yield f"cell {i} is heard again", lambda w, i=i: w.hello(i)
            if not truth.engine:
                yield f"the engine of cell {i} is back", lambda w, i=i: w.engine(i, up=True)
            elif cell.role is Role.FAILED and not truth.call:
                yield f"cell {i} says what it is", lambda w, i=i: w.tell_state(i)
            if self.faults and cell.role is not Role.FENCED:
                if truth.engine:
                    yield f"the engine of cell {i} dies", lambda w, i=i: w.engine(i, up=False)
                if truth.call:
                    yield f"cell {i} fails to do as told", lambda w, i=i: w.fails(i)
                yield f"the lease of cell {i} ends", lambda w, i=i: w.silent(i)
        if self.faults:
            yield "the scheduler is started again", World.restart

    def end(self) -> None:
        self.ended += 1
        self.send(p.Terminated(execution=str(self.ended)))
        self.tell_feed()

    def drained(self) -> None:
        moving = self.policy.state.moving
        assert moving is not None
        self.send(p.Drained(proxy="proxy", engine=f"cell-{moving.cell}", epoch=moving.epoch, moved=0))

    def train(self) -> None:
        self.closed += 1
        self.tell_feed()

    def wait(self) -> None:
        self.at += LATER
        self.take(Tick(self.at))

    def answer(self, i: int, reply: p.Done | p.Failed) -> None:
        call, self.cells[i].call = self.cells[i].call, None
        assert call is not None
        self.take(Returned(self.at, i, call.call, reply))

    def done(self, i: int) -> None:
        truth = self.cells[i]
        assert truth.call is not None
        truth.mode = "training" if isinstance(truth.call.request, p.EnterTraining) else "rollout"
        self.answer(i, p.Done(seconds=1.0))
        if self.policy.state.cells[i].role is not Role.FENCED:
            self.tell_state(i)

    def fails(self, i: int) -> None:
        self.faults -= 1
        self.answer(i, p.Failed(detail="scripted"))

    def engine(self, i: int, *, up: bool) -> None:
        self.faults -= not up
        self.cells[i].engine = up
        if self.policy.state.cells[i].role is not Role.FENCED:
            self.tell_state(i)

    def silent(self, i: int) -> None:
        self.faults -= 1
        self.take(Silent(self.at, (i,), (31.0,)))

    def restart(self) -> None:
        """It goes on from its journal, so in the same state; answers that were on their way are lost."""
        self.faults -= 1
        self.take(Restarted(self.at))

    # --- telling states apart

    @property
    def key(self) -> tuple[object, ...]:
        """What the future depends on: no clock, no numbers that only count up."""
        state = self.policy.state
        cells = tuple(
            (
                c.role, self.at > c.since, self.at >= c.retry_at, c.engine_alive, c.routable, c.suspect, c.trainer,
                c.pending and (type(c.pending.request), c.pending.refused),
                truth.engine, truth.mode, truth.call and type(truth.call.request),
                bool(truth.call and c.pending and truth.call.call == c.pending.call), c.state is None,
            )
            for c, truth in zip(state.cells, self.cells, strict=True)
        )  # fmt: skip
        moving = state.moving and (state.moving.cell, bool(state.moving.waiting))
        burst = state.burst and state.burst.settled
        bare = state.bare_since is not None
        waited = (bare and self.at > state.bare_since, self.at > state.quiet_since)
        return (cells, moving, burst, waited, bool(state.proxies), self.ended, self.closed, self.faults)

    @property
    def over(self) -> bool:
        """The burst has ended, and whoever is well samples again."""
        well = all(c.role is Role.ROLLOUT for c in self.policy.state.cells)
        return well and self.ended == EXECUTIONS


def begin(faults: int) -> World:
    config = SchedConfig(
        cells=CELLS, capacity=1, attempts=10**9, retry_delay=0.01, floor_grace=60.0, settle_timeout=300.0
    )
    world = World(Policy(config, per_burst=2, steps=4), faults)
    world.take(Restarted(0.0))
    for i in range(CELLS):
        world.hello(i)
    world.send(p.ProxyHello(proxy="proxy", url="http://proxy"))
    world.tell_feed()
    assert isinstance(world.send(p.OpenBurst(burst=0, executions=EXECUTIONS)), p.Granted)
    return world


@pytest.mark.timeout(900)  # a minute of computing, on a machine with nothing else to do
@pytest.mark.parametrize("faults", [0, 1])
def test_every_interleaving(faults):
    start = begin(faults)
    seen = {start.key: start}
    before: dict[object, set[object]] = {}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        for name, happen in world.choices():
            other = copy.deepcopy(world)
            try:
                happen(other)
            except AssertionError as e:
                raise AssertionError(f"{name}: {world.key}") from e
            before.setdefault(other.key, set()).add(world.key)
            if other.key not in seen:
                seen[other.key] = other
                queue.append(other)
    good = {key for key, world in seen.items() if world.over}
    reach, queue = set(good), deque(good)
    while queue:
        for key in before.get(queue.popleft(), ()):
            if key not in reach:
                reach.add(key)
                queue.append(key)
    stuck = [key for key in seen if key not in reach]
    assert good
    assert not stuck, f"{len(stuck)} of {len(seen)} states lead nowhere, such as {stuck[0]}"
    roles = {c.role for world in seen.values() for c in world.policy.state.cells}
    assert roles >= set(Role) - {Role.STARTING, *(() if faults else (Role.FAILED, Role.FENCED))}
    print(f"{len(seen)} states")
