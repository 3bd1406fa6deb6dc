"""Schedulers, agents, engines and trainers as processes that are killed and stopped while executions go on.

The requests are real ones to scripted engines, routed by the proxy's own pool and link; runner and feed are stand-ins
that speak their protocols. An engine without memory fails a request, so a cell that acts on an order of the past shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from gyre_agent_proxy.engines import EngineState, Pool
from gyre_agent_proxy.link import Link
from gyre_sched import protocol as p
from gyre_sched.config import SchedConfig
from gyre_sched.journal import read_journal
from gyre_sched.policy import Policy
from gyre_sched.replay import restore
from gyre_transport.bus import Client
from gyre_transport.errors import BusError, RemoteError
from gyre_transport.process import Child
from gyre_transport.run import Context

PARTS = Path(__file__).parent / "parts"
CELLS, CAPACITY, BATCH = 3, 6, 6
WAIT = 120.0  # seconds until a test gives up
CALL = 20.0  # seconds a request may wait for an engine


class Request:
    """One request that goes on elsewhere when it is told to."""

    def __init__(self) -> None:
        self.moves = asyncio.Event()

    def move(self, reason: str) -> None:
        self.moves.set()


class Rig:
    """A run: processes, a pool that follows the scheduler, executions, a feed."""

    def __init__(self, folder: Path, bus: str) -> None:
        self.folder = folder
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.config = folder / "config.toml"
        self.config.write_text(f"""
[run]
dir = "{folder}"
steps = 1000
[batch]
groups = 1
group_size = {BATCH}
per_burst = 2
[bus]
dir = "{bus}"
[model]
path = "{model}"
name = "policy"
[sched]
cells = {CELLS}
capacity = {CAPACITY}
heartbeat = 0.1
lease = 2.0
drain_timeout = 20.0
attempts = 100
core_stays = false
trainer = ["{sys.executable}", "{PARTS / "trainer.py"}"]
web.on = false
[kv]
moves = false
[engine]
device = "cpu"
stop_timeout = 5.0
health_interval = 0.2
""")
        self.context = Context(self.config)
        self.pool = Pool(backoff=0.05, backoff_limit=0.5)
        self.random = random.Random(3)
        self.scheduler: Child
        self.agents: dict[int, Child] = {}
        self.http: aiohttp.ClientSession
        self.progress = 0  # requests answered
        self.asking = 0  # requests under way
        self.moved = asyncio.Condition()
        self.faults: list[str] = []
        self.ended = 0
        self.trained = 0
        self.bursts = 0
        self.retries: Counter[str] = Counter()

    # --- processes

    async def start_scheduler(self) -> None:
        argv = [sys.executable, "-m", "gyre_sched.cli", "serve", "--config", str(self.config)]
        log = self.folder / f"scheduler-{len(list(self.folder.glob('scheduler-*')))}.log"
        self.scheduler = await Child.start("scheduler", argv, log=log)

    async def start_agent(self, cell: int) -> None:
        argv = [sys.executable, str(PARTS / "cell.py"), "--config", str(self.config), "--cell", str(cell)]
        log = self.folder / f"agent-{cell}-{len(list(self.folder.glob(f'agent-{cell}-*')))}.log"
        self.agents[cell] = await Child.start(f"cell {cell}", argv, log=log, ready_within=WAIT)

    async def kill(self, child: Child) -> None:
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()

    async def tell(self, request: p.Request) -> p.Reply:
        """Say it until it was heard, as runner and feed do."""
        while True:
            try:
                return await self.client.call(request, deadline=1.0)
            except RemoteError:
                raise
            except BusError:
                self.retries[type(request).__name__] += 1

    # --- work

    async def some(self, requests: int, *, alone: bool = False) -> None:
        """Until so many more requests were answered; alone: or those that need no scheduler are at their end."""
        async with asyncio.timeout(WAIT), self.moved:
            goal = self.progress + requests
            await self.moved.wait_for(lambda: self.progress >= goal or self.faults or (alone and not self.asking))

    async def request(self, execution: str) -> None:
        self.asking += 1
        try:
            await self.sample(execution)
            self.progress += 1
        except AssertionError as e:
            self.faults.append(str(e))
            raise
        finally:
            self.asking -= 1
            async with self.moved:
                self.moved.notify_all()

    async def sample(self, execution: str) -> None:
        loop = asyncio.get_running_loop()
        left, until = self.random.random() * 0.1, loop.time() + CALL
        while left > 0:
            state = self.pool.choose(execution, loop.time())
            if state is None:
                if loop.time() > until:
                    raise AssertionError(f"{execution}: no engine for {CALL} s")
                async with self.pool.changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.pool.changed.wait(), 0.05)
                continue
            self.pool.assign(execution, state)
            began = loop.time()
            if await self.attempt(state, left):
                break
            left -= loop.time() - began  # what was sampled is kept

    async def attempt(self, state: EngineState, seconds: float) -> bool:
        request = Request()
        state.active.add(request)
        asked = asyncio.ensure_future(self.post(state, seconds))
        moves = asyncio.ensure_future(request.moves.wait())
        try:
            await asyncio.wait({asked, moves}, return_when=asyncio.FIRST_COMPLETED)
            return asked.done() and asked.result()
        finally:
            for task in (asked, moves):
                task.cancel()
            await asyncio.gather(asked, moves, return_exceptions=True)
            state.active.discard(request)
            if request.moves.is_set():
                state.moved += 1
            await self.pool.notify()

    async def post(self, state: EngineState, seconds: float) -> bool:
        try:
            async with self.http.post(state.route.url + "/generate", json={"seconds": seconds}) as answer:
                if answer.status != 200:
                    raise AssertionError(f"{state.route.name}: {await answer.text()}")
                return True
        except aiohttp.ClientError:
            self.pool.failed(state, asyncio.get_running_loop().time())
            return False

    async def execution(self, name: str, slots: asyncio.Semaphore) -> None:
        async with slots:
            await self.tell(p.Started(execution=name))
            for _ in range(self.random.randint(1, 8)):
                await self.request(name)
            self.pool.forget(name)
            await self.tell(p.Terminated(execution=name))
            self.ended += 1

    async def run_bursts(self, stop: asyncio.Event) -> None:
        for burst in itertools.count():
            while True:
                reply = await self.tell(p.OpenBurst(burst=burst, executions=2 * BATCH))
                if isinstance(reply, p.Granted):
                    break
                if stop.is_set():
                    return
                await asyncio.sleep(0.05)
            self.bursts += 1
            slots = asyncio.Semaphore(reply.capacity)
            async with asyncio.TaskGroup() as group:
                for i in range(2 * BATCH):
                    group.create_task(self.execution(f"{burst}-{i}", slots))

    async def feed(self) -> None:
        """What was terminated waits until the core trains; a batch a look."""
        while True:
            waiting = self.ended - self.trained
            if waiting >= BATCH and await self.core_trains():
                self.trained += BATCH
                waiting -= BATCH
            await self.tell(
                p.Backlog(
                    waiting=waiting,
                    open_batch=None,
                    micro_steps_left=0,
                    batches_closed=self.trained // BATCH,
                    executions_trained=self.trained,
                    executions_excluded=0,
                    batches_ready=waiting // BATCH,
                )
            )
            await asyncio.sleep(0.05)

    async def core_trains(self) -> bool:
        status = await self.tell(p.GetStatus())
        assert isinstance(status, p.Status)
        return status.cells[0].role is p.Role.TRAINING

    # --- what was written

    def events(self, kind: str | None = None) -> list[p.Event]:
        events = read_journal(self.context.dir.journal).events
        return [e for e in events if kind is None or e.kind == kind]

    async def event(self, kind: str, cell: int, since: int) -> None:
        """Until the journal has it, after event `since`."""
        async with asyncio.timeout(WAIT):
            while not any(e.cell == cell and e.seq > since for e in self.events(kind)):
                await asyncio.sleep(0.05)

    def orders(self, cell: int) -> list[dict[str, object]]:
        path = self.folder / f"orders-{cell}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
async def rig(tmp_path):
    with tempfile.TemporaryDirectory(prefix="gyre-") as bus:
        made = Rig(tmp_path, bus)
        link = Link(made.context.bus, made.pool, "http://127.0.0.1:1", silence=2.0)
        timeout = aiohttp.ClientTimeout(total=CALL)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            Client(made.context.bus.address("scheduler"), p.Reply) as made.client,
            aiohttp.ClientSession(timeout=timeout, connector=connector) as made.http,
        ):
            await made.start_scheduler()
            await asyncio.gather(*(made.start_agent(cell) for cell in range(CELLS)))
            stop = asyncio.Event()
            following = asyncio.create_task(link.run())
            feeding = asyncio.create_task(made.feed())
            bursts = asyncio.create_task(made.run_bursts(stop))
            bursts.add_done_callback(
                lambda task: made.faults.extend([] if task.cancelled() else [str(task.exception())])
            )
            made.stop, made.working = stop, bursts
            try:
                yield made
            finally:
                for task in (bursts, feeding, following):
                    task.cancel()
                await asyncio.gather(bursts, feeding, following, return_exceptions=True)
                await asyncio.gather(made.scheduler.stop(), *(a.stop() for a in made.agents.values()))


async def end(rig):
    """Let the burst under way end; every execution has then ended once, and the journal tells it all again."""
    rig.stop.set()
    async with asyncio.timeout(WAIT):
        await rig.working
    assert rig.ended == rig.bursts * 2 * BATCH
    status = await rig.tell(p.GetStatus())
    assert (status.dispatched, status.started, status.terminated) == (rig.ended,) * 3
    await rig.scheduler.stop()
    reading = read_journal(rig.context.dir.journal)
    config = SchedConfig(
        **{k: tuple(v) if k == "trainer" else v for k, v in rig.context.data["sched"].items() if k != "web"}
    )
    policy = Policy(config, per_burst=2, steps=1000, at=reading.steps[0].input.at)
    restore(policy, reading.steps)
    assert policy.state.count.terminated == rig.ended
    for e in reading.events:
        if e.kind == "transfer":
            assert e.numbers["w"] <= e.numbers["C_R"] - e.numbers["C_e"]
    for cell in range(CELLS):
        obeyed = [o for o in rig.orders(cell) if o["reply"] != "Fenced"]
        assert [o["term"] for o in obeyed] == sorted(o["term"] for o in obeyed), "orders of an earlier scheduler"
    return reading


@pytest.mark.timeout(600)
async def test_a_scheduler_killed_twenty_times_is_not_missed(rig):
    for _ in range(20):
        await rig.some(rig.random.randint(5, 30))
        assert not rig.faults
        await rig.kill(rig.scheduler)
        await rig.some(rig.random.randint(0, 5), alone=True)  # the executions go on meanwhile
        await rig.start_scheduler()
    await rig.some(20)
    reading = await end(rig)
    kinds = Counter(e.kind for e in reading.events)
    assert kinds["scheduler_started"] == 21
    assert kinds["transfer"] > 2
    assert kinds["burst_settled"] > 2
    assert not kinds["return_failed"] + kinds["enter_failed"]


@pytest.mark.timeout(600)
async def test_agents_killed_and_cut_off_are_replaced_and_fenced(rig):
    await rig.some(20)
    for cell in (1, 0, 2):
        since = rig.events()[-1].seq
        await rig.kill(rig.agents[cell])
        await rig.start_agent(cell)
        await rig.event("cell_hello", cell, since)
        await rig.some(10)
        assert not rig.faults
    for cell in (2, 0):
        since = rig.events()[-1].seq
        os.kill(rig.agents[cell].pid, signal.SIGSTOP)
        await rig.event("lease_expired", cell, since)
        os.kill(rig.agents[cell].pid, signal.SIGCONT)
        await rig.event("registered", cell, since)
        await rig.some(10)
        assert not rig.faults
    os.kill(rig.scheduler.pid, signal.SIGSTOP)
    await rig.some(10, alone=True)
    await asyncio.sleep(2.5)  # longer than the lease: that the scheduler stands still for so long is what is tested
    since = len(rig.events("slept"))
    os.kill(rig.scheduler.pid, signal.SIGCONT)
    async with asyncio.timeout(WAIT):
        while len(rig.events("slept")) == since:
            await asyncio.sleep(0.05)
    await rig.some(20)
    reading = await end(rig)
    expired = [e.cell for e in reading.events if e.kind == "lease_expired"]
    assert set(expired) <= {0, 1, 2}
