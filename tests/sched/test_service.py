"""The service on the real bus: agents, a proxy, a feed and a runner are scripted and speak the wire format."""

import asyncio
import contextlib
import itertools
import sys
from typing import Any

import aiohttp
import msgspec
import pytest

from gyre_sched import protocol as p
from gyre_sched.config import SchedConfig
from gyre_sched.journal import durations, read_journal
from gyre_sched.protocol import Role
from gyre_sched.service import Service
from gyre_transport.bus import Client, Server
from gyre_transport.errors import RemoteError
from gyre_transport.process import Child

ANY = "tcp://127.0.0.1:0"
DEADLINE = 60.0
PATIENT = SchedConfig(  # nothing ends because a machine is slow
    cells=2,
    heartbeat=0.05,
    lease=300.0,
    drain_timeout=300.0,
    enter_timeout=300.0,
    return_timeout=300.0,
    retry_delay=0.02,
)
SHORT_DRAINS = msgspec.structs.replace(PATIENT, drain_timeout=0.5)
SHORT_LEASES = msgspec.structs.replace(PATIENT, lease=3.0)


class Agent:
    """A cell agent that does what it is told, or what `answers` says instead."""

    def __init__(self, bench: Any, cell: int) -> None:
        self.bench, self.cell = bench, cell
        self.told: list[p.AgentRequest] = []
        self.answers: list[p.AgentReply | None] = []  # None: never
        self.state = p.CellState(cell=cell, engine_alive=True, trainer_alive=True)
        self.server = Server(ANY, p.AgentRequest, self.handle)
        self.beating: asyncio.Task[None] | None = None

    async def start(self):
        await self.server.start()
        await self.hello()
        self.beating = asyncio.create_task(self.beat())

    async def hello(self):
        await self.bench.send(
            p.CellHello(
                cell=self.cell,
                agent=self.server.address,
                engine=f"cell-{self.cell}",
                engine_url=f"http://127.0.0.1/{self.cell}",
                capacity=4,
                version=self.state.version,
            )
        )

    async def beat(self):
        while True:
            await self.bench.send(self.state)
            await asyncio.sleep(PATIENT.heartbeat)

    async def die(self):
        self.beating.cancel()
        await self.server.close()

    async def say(self, **changes):
        self.state = msgspec.structs.replace(self.state, **changes)
        await self.bench.send(self.state)

    async def handle(self, request):
        self.told.append(request)
        if self.answers and (answer := self.answers.pop(0)) != "as told":
            if answer is None:
                await asyncio.get_running_loop().create_future()
            return answer
        if isinstance(request, p.EnterTraining):
            self.state = msgspec.structs.replace(self.state, trainer="training", routable=False)
            return p.Done(seconds=0.1)
        self.state = msgspec.structs.replace(self.state, trainer="idle", version=request.version, routable=True)
        return p.Done(seconds=0.1, version=request.version)


async def proxy(bench: Any, name: str = "proxy") -> None:
    """Ack every drain."""
    await bench.send(p.ProxyHello(proxy=name, url="http://127.0.0.1"))
    acked, looked_at = set(), 0
    while True:
        async with bench.changed:
            while len(bench.seen) == looked_at:
                await bench.changed.wait()
        while looked_at < len(bench.seen):
            m = bench.seen[looked_at]
            looked_at += 1
            if isinstance(m, p.Routes):
                for engine in m.draining:
                    assert engine not in {e.engine for e in m.engines}
                    if (engine, m.epoch) not in acked:
                        acked.add((engine, m.epoch))
                        await bench.send(p.Drained(proxy=name, engine=engine, epoch=m.epoch, moved=2))


@pytest.fixture
async def bench(new_bench, tmp_path, request):
    tasks = []
    config = getattr(request, "param", PATIENT)
    service = Service(
        config, address=ANY, events_address=ANY, journal=tmp_path / "sched" / "journal", per_burst=2, steps=4
    )
    async with service:
        b = new_bench(service)
        await b.subscriber.connected(DEADLINE)
        tasks.append(asyncio.create_task(b.listen()))
        b.spawn = lambda coro: tasks.append(asyncio.create_task(coro))
        yield b
        ended = [t for t in tasks if t.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await b.client.close()
        await b.subscriber.close()
    assert not ended, [t.exception() for t in ended]
    if not service.failed.done():
        service.failed.cancel()


@pytest.fixture
async def agents(bench):
    pair = [Agent(bench, 0), Agent(bench, 1)]
    for agent in pair:
        await agent.start()
    yield pair
    for agent in pair:
        await agent.die()


async def test_a_burst_moves_both_cells_and_the_next_one_has_the_new_weights(bench, agents, tmp_path):
    bench.spawn(proxy(bench))
    await bench.event("proxy_hello")
    await bench.tell()
    await bench.send(p.Published(version=0, manifest=b"zero"))
    assert await bench.granted(0, 8) == p.Granted(burst=0, capacity=8)
    await bench.terminate(*range(4))
    assert not agents[0].told, "nothing to train on yet"
    await bench.tell(waiting=2)

    transfer = await bench.event("transfer", 0)
    assert {k: transfer.numbers[k] for k in ("w", "C_R", "C_e", "d", "p", "f")} == {
        "w": 4, "C_R": 8, "C_e": 4, "d": 8, "p": 4, "f": 4,
    }  # fmt: skip
    drained = await bench.event("drained", 0)
    assert drained.numbers["moved"] == 2
    await bench.role(0, "training")
    await bench.tell(open_batch=0, micro_steps_left=2, waiting=0)
    assert agents[1].told == [], "w = 4 > C_R - C_e = 0"
    status = await bench.send(p.GetStatus())
    assert [c.role for c in status.cells] == [Role.TRAINING, Role.ROLLOUT]
    assert (status.water, status.capacity, status.burst) == (4, 4, 0)

    await bench.terminate(*range(4, 8))
    await bench.role(1, "training")
    assert [type(r) for a in agents for r in a.told] == [p.EnterTraining, p.EnterTraining]
    refusal = await bench.send(p.OpenBurst(burst=1, executions=8))
    assert isinstance(refusal, p.NotYet)

    trained = {"open_batch": None, "micro_steps_left": 0, "batches_closed": 2, "executions_trained": 8, "version": 2}
    await bench.tell(**trained)
    await bench.tell(**trained)
    assert all(len(a.told) == 1 for a in agents), "version 2 is not published yet"
    await bench.send(p.Published(version=2, manifest=b"two"))
    await bench.routed(("cell-0", 2), ("cell-1", 2))
    assert [a.told[1] for a in agents] == [p.EnterRollout(version=2, manifest=b"two", term=1, registration=1)] * 2
    assert await bench.granted(1, 8) == p.Granted(burst=1, capacity=8)

    epochs = [m.epoch for m in bench.seen if isinstance(m, p.Routes)]
    assert epochs == sorted(epochs)
    events = [m for m in bench.seen if isinstance(m, p.Event)]
    await bench.service.close()
    journal = read_journal(tmp_path / "sched" / "journal")
    assert (journal.torn, journal.events[-1].kind) == (0, "scheduler_stopped")
    assert [e for e in journal.events if e.seq in {m.seq for m in events}] == events
    assert set(durations(journal.events)[0]) == set(Role) - {Role.FAILED, Role.FENCED}


@pytest.mark.parametrize("bench", [SHORT_DRAINS], indirect=True)
async def test_a_proxy_that_never_acks_is_not_waited_for_beyond_the_deadline(bench, agents):
    bench.spawn(proxy(bench, "good"))
    await bench.event("proxy_hello", proxy="good")
    await bench.send(p.ProxyHello(proxy="deaf", url="http://127.0.0.1:1"))
    await bench.tell()
    await bench.granted(0, 8)
    await bench.terminate(*range(4))
    await bench.tell(waiting=2)
    gone = await bench.event("proxy_gone", 0, proxy="deaf")
    assert gone.numbers["seconds"] >= SHORT_DRAINS.drain_timeout
    await bench.role(0, "training")


@pytest.mark.parametrize("bench", [SHORT_LEASES], indirect=True)
async def test_an_agent_that_dies_is_out_of_the_routes_until_a_new_one_is_fresh(bench, agents):
    await bench.send(p.Published(version=3, manifest=b"three"))
    await bench.tell(version=3)
    await bench.routed(("cell-0", 3), ("cell-1", 3))
    await bench.granted(0, 8)
    await agents[1].die()
    expired = await bench.event("lease_expired", 1)
    assert expired.numbers["silent"] > SHORT_LEASES.lease
    await bench.routed(("cell-0", 3))
    since = len(bench.seen)
    agents[1] = Agent(bench, 1)
    await agents[1].start()  # its engine serves version 0
    await bench.event("cell_hello", 1, version=0)
    await bench.routed(("cell-0", 3), ("cell-1", 3), since=since)
    assert agents[1].told == [p.Refresh(version=3, manifest=b"three", term=1, registration=2)]
    assert all(e.version == 3 for m in bench.seen[since:] if isinstance(m, p.Routes) for e in m.engines)


async def test_a_dead_engine_leaves_the_routes_on_its_agents_word_alone(bench, agents):
    await bench.routed(("cell-0", 0), ("cell-1", 0))
    await bench.send(p.EngineFailed(proxy="proxy", engine="cell-1", detail="connection refused"))
    hint = await bench.event("engine_hint", 1)
    assert hint.numbers["detail"] == "connection refused"
    assert [c.role for c in (await bench.send(p.GetStatus())).cells] == [Role.ROLLOUT, Role.ROLLOUT]
    await agents[1].say(engine_alive=False, detail="exit code -9")
    failed = await bench.event("engine_failed", 1)
    assert failed.numbers["detail"] == "exit code -9"
    await agents[1].say(engine_alive=True)
    assert [c.role for c in (await bench.send(p.GetStatus())).cells] == [Role.ROLLOUT, Role.FAILED]
    await agents[1].say(routable=True)
    assert [c.role for c in (await bench.send(p.GetStatus())).cells] == [Role.ROLLOUT, Role.ROLLOUT]
    await bench.event("role", 1, **{"from": "failed", "to": "rollout"})


@pytest.mark.parametrize("answer", [p.Failed(detail="engine busy"), p.Done(seconds=0.1, version=7), p.Ack()])
async def test_a_cell_that_does_not_return_as_told_is_told_again(bench, agents, answer):
    await bench.tell()
    agents[1].answers = [answer, "as told"]
    await bench.send(p.Published(version=1, manifest=b"one"))  # both engines are behind: refreshed between bursts
    failed = await bench.event("return_failed", 1)
    assert failed.numbers["failures"] == 1
    await bench.routed(("cell-0", 1), ("cell-1", 1))
    assert [type(r) for r in agents[1].told] == [p.Refresh, p.EnterRollout]


async def test_wrong_requests_are_refused_and_change_nothing(bench, agents):
    await bench.tell()
    await bench.granted(0, 2)
    before = await bench.send(p.GetStatus())
    wrong = [
        (p.CellHello(cell=2, agent="a", engine="cell-2", engine_url="u", capacity=1), "expected a cell in 0..1"),
        (p.CellHello(cell=0, agent="a", engine="cell-1", engine_url="u", capacity=1), "belongs to another cell"),
        (p.CellHello(cell=0, agent="a", engine="cell-0", engine_url="u", capacity=0), "capacity"),
        (p.CellState(cell=-1, engine_alive=True, trainer_alive=True), "expected a cell in 0..1"),
        (p.OpenBurst(burst=1, executions=0), "at least 1 execution"),
        (p.OpenBurst(burst=-1, executions=2), "expected a burst after 0"),
    ]
    for request, message in wrong:
        with pytest.raises(RemoteError, match=message) as refused:
            await bench.send(request)
        assert refused.value.kind == "Refused"
        await bench.event("refused", request=type(request).__name__)
    after = await bench.send(p.GetStatus())
    assert msgspec.structs.replace(after, cells=()) == msgspec.structs.replace(before, cells=())
    assert [c.role for c in after.cells] == [Role.ROLLOUT, Role.ROLLOUT]


async def test_executions_count_once_and_never_beyond_what_was_dispatched(bench, agents):
    await bench.tell()
    await bench.granted(0, 2)
    await bench.send(p.Terminated(execution="a"))  # without Started: legal
    await bench.send(p.Terminated(execution="a"))
    await bench.send(p.Started(execution="b"))
    await bench.send(p.Started(execution="b"))
    status = await bench.send(p.GetStatus())
    assert (status.dispatched, status.started, status.terminated, status.water) == (2, 1, 1, 1)
    await bench.send(p.Terminated(execution="b"))
    with pytest.raises(RemoteError, match="none of the 2 dispatched"):
        await bench.send(p.Terminated(execution="c"))


async def test_shutdown_grants_and_moves_nothing_more(bench, agents):
    await bench.tell()
    await bench.granted(0, 8)
    await bench.send(p.Shutdown(reason="an operator"))
    await bench.terminate(*range(8))
    await bench.tell(waiting=8, batches_ready=2)
    reply = await bench.send(p.OpenBurst(burst=1, executions=8))
    assert isinstance(reply, p.NotYet)
    assert "an operator" in reply.reason
    assert not agents[0].told


async def test_a_journal_that_cannot_be_written_stops_the_scheduler(tmp_path, monkeypatch):
    service = Service(PATIENT, address=ANY, events_address=ANY, journal=tmp_path / "journal", per_burst=1, steps=1)
    await service.start()
    try:
        monkeypatch.setattr(service._journal, "_file", open("/dev/full", "ab", buffering=0))  # noqa: SIM115
        monkeypatch.setattr(service._journal, "_size", 0)
        async with Client(service.address, p.Reply) as client:
            with pytest.raises(RemoteError, match="cannot write the journal"):
                await client.call(p.ProxyHello(proxy="p", url="u"), deadline=DEADLINE)
        async with asyncio.timeout(DEADLINE):
            with pytest.raises(Exception, match="is the disk full"):
                await service.failed
    finally:
        with contextlib.suppress(Exception):
            await service.close()


@pytest.fixture
def config(tmp_path_factory):
    short = tmp_path_factory.mktemp("s")
    path = short / "config.toml"
    path.write_text(f'[run]\ndir = "{short}/run"\nsteps = 2\n\n[bus]\ndir = "{short}"\n\n[sched]\nheartbeat = 0.1\n')
    return path


async def test_the_process_serves_answers_status_and_stops_on_sigterm(config, tmp_path):
    argv = [sys.executable, "-m", "gyre_sched.cli"]
    child = await Child.start("scheduler", [*argv, "serve", "--config", str(config)], log=tmp_path / "log")
    try:
        async with aiohttp.ClientSession() as http, http.get(child.info["web"]) as page:
            assert page.status == 200
            assert "scheduler_started" in await page.text()
        asked = await asyncio.create_subprocess_exec(
            *argv, "status", "--config", str(config), "--json", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asked.communicate()
        assert asked.returncode == 0
        status = msgspec.json.decode(out, type=p.Status)
        assert [c.role for c in status.cells] == [Role.STARTING, Role.STARTING]
        second = await asyncio.create_subprocess_exec(
            *argv, "serve", "--config", str(config), stderr=asyncio.subprocess.PIPE
        )
        _, err = await second.communicate()
        assert second.returncode == 1
        assert b"another scheduler writes" in err
    finally:
        code = await child.stop()
    assert code == 0
    page, _, token = child.info["web"].partition("token=")
    log = (tmp_path / "log").read_text()
    assert f"page is at {page}" in log, "who started it by hand has no other way to know"
    assert token not in log
    kinds = [e.kind for e in read_journal(config.parent / "run" / "sched" / "journal").events]
    assert (kinds[0], kinds[-1]) == ("scheduler_started", "scheduler_stopped")
    assert child.info["scheduler"].startswith("ipc://")


async def test_a_scheduler_started_again_goes_on_with_epochs_and_numbers(tmp_path):
    epochs = []
    for _ in range(2):
        service = Service(PATIENT, address=ANY, events_address=ANY, journal=tmp_path / "j", per_burst=1, steps=1)
        async with service, Client(service.address, p.Reply) as client:
            hello = p.CellHello(cell=0, agent=ANY, engine="cell-0", engine_url="u", capacity=1)
            await client.call(hello, deadline=DEADLINE)
            routes = await client.call(p.ProxyHello(proxy="p", url="u"), deadline=DEADLINE)
            epochs.append(routes.epoch)
    assert epochs[1] > epochs[0]
    events = read_journal(tmp_path / "j").events
    assert [e.seq for e in events] == list(range(len(events)))
    assert all(a.at <= b.at for a, b in itertools.pairwise(events))
