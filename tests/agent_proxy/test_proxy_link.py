"""The link to the scheduler: routes in, drains acknowledged when nothing is left, outages survived."""

from __future__ import annotations

import asyncio

import openai
import pytest

from gyre_agent_proxy.config import ModelConfig, ProxyConfig
from gyre_agent_proxy.errors import LinkFailed
from gyre_agent_proxy.link import Link
from gyre_agent_proxy.serve import proxy, until_stopped
from gyre_sched import protocol as p
from gyre_traj.log import read_log
from gyre_transport.bus import Publisher, Server
from gyre_transport.run import BusConfig

ASK = [{"role": "user", "content": "hi"}]
LONG = "a rather long answer that takes its engine quite some tokens to write down"


class Scheduler:
    """A scheduler's two sockets, scripted: `routes` is what it says."""

    def __init__(self, bus: BusConfig) -> None:
        self.routes = p.Routes(epoch=1, engines=())
        self.got: asyncio.Queue = asyncio.Queue()
        self._server = Server(bus.address("scheduler"), p.Request, self._handle)
        self._events = Publisher(bus.address("scheduler.events"), p.Publication, heartbeat=0.1)

    async def _handle(self, message):
        if isinstance(message, p.ProxyHello):
            return self.routes
        self.got.put_nowait(message)
        return p.Ack()

    async def publish(self, routes):
        self.routes = routes
        await self._events.publish(routes)

    async def start(self):
        await self._server.start()
        await self._events.start()

    async def stop(self):
        await self._server.close()
        await self._events.close()


def engine(name, scripted, lasting=0, version=0):
    return p.Engine(engine=name, url=scripted.url, capacity=4, version=version, lasting=lasting)


@pytest.fixture
async def bus(tmp_path_factory):
    return BusConfig(dir=str(tmp_path_factory.mktemp("b")))


@pytest.fixture
async def scheduler(bus):
    made = Scheduler(bus)
    await made.start()
    yield made
    await made.stop()


def serve(bench, bus):
    config = ProxyConfig(backoff=0.01, backoff_limit=0.05, abort_wait=5.0)
    return proxy(config, ModelConfig(path=str(bench.folder)), calls=bench.calls, bus=bus)


def client(running):
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0, timeout=60)


async def text_of(api, messages=ASK):
    return (await api.chat.completions.create(model="m", messages=messages)).choices[0].message.content


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_drain_moves_the_calls_and_is_acknowledged_when_none_is_left(bench, bus, scheduler):
    core, later = await bench.engine(), await bench.engine()
    core.hold = 6
    scheduler.routes = p.Routes(epoch=3, engines=(engine("cell-0", core),))
    bench.brain.says(LONG)
    async with serve(bench, bus) as running, client(running) as api:
        asking = asyncio.create_task(text_of(api))
        await core.held.wait()
        await until(lambda: running.pool.epoch == 3)
        draining = p.Routes(epoch=4, engines=(engine("cell-1", later, 1, 2),), draining=("cell-0",))
        await scheduler.publish(draining)
        drained = await asyncio.wait_for(scheduler.got.get(), 30)
        assert isinstance(drained, p.Drained)
        assert (drained.engine, drained.epoch, drained.moved) == ("cell-0", 4, 1)
        assert not core.running
        assert await asking == LONG
        # An ack that had no effect is said again.
        await asyncio.sleep(0)
        running.pool.engines["cell-0"]
        async with asyncio.timeout(30):
            while True:
                await scheduler.publish(draining)
                try:
                    again = scheduler.got.get_nowait()
                    break
                except asyncio.QueueEmpty:
                    await asyncio.sleep(0.05)
        assert (again.engine, again.moved) == ("cell-0", 1)
    (path,) = bench.calls.glob("*.gtraj")
    (call,) = read_log(path).calls
    assert [a.engine for a in call.attempts] == ["cell-0", "cell-1"]


async def test_an_engine_with_nothing_on_it_is_acknowledged_too(bench, bus, scheduler):
    async with serve(bench, bus) as running:
        await until(lambda: running.pool.epoch == 1)
        await scheduler.publish(p.Routes(epoch=2, engines=(), draining=("cell-7",)))
        drained = await asyncio.wait_for(scheduler.got.get(), 30)
    assert (drained.engine, drained.moved) == ("cell-7", 0)


async def test_a_lost_engine_is_reported(bench, bus, scheduler):
    core, later = await bench.engine(), await bench.engine()
    core.hold = 2
    scheduler.routes = p.Routes(epoch=1, engines=(engine("cell-0", core, 9), engine("cell-1", later)))
    async with serve(bench, bus) as running, client(running) as api:
        asking = asyncio.create_task(text_of(api))
        await core.held.wait()
        await core.die()
        failed = await asyncio.wait_for(scheduler.got.get(), 30)
        assert isinstance(failed, p.EngineFailed)
        assert failed.engine == "cell-0"
        assert failed.detail
        await asking


async def test_the_proxy_serves_while_the_scheduler_is_away_and_follows_the_next_one(bench, bus):
    first, second = await bench.engine(), await bench.engine()
    async with serve(bench, bus) as running, client(running) as api:
        asking = asyncio.create_task(text_of(api))  # waits: nobody is there yet
        one = Scheduler(bus)
        one.routes = p.Routes(epoch=9, engines=(engine("cell-0", first),))
        await one.start()
        await asking
        await one.stop()
        await text_of(api, [{"role": "user", "content": "alone"}])
        two = Scheduler(bus)
        two.routes = p.Routes(epoch=2, engines=(engine("cell-1", second),))  # it lost its count
        await two.start()
        try:
            await until(lambda: running.pool.epoch == 2)
            await text_of(api, [{"role": "user", "content": "again"}])
        finally:
            await two.stop()
    assert len(first.requests) == 2
    assert len(second.requests) == 1


@pytest.mark.parametrize("broken", ["_greet", "_follow"])
async def test_a_proxy_that_cannot_follow_the_scheduler_any_more_stops(bench, bus, scheduler, monkeypatch, broken):
    async def fail(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(Link, broken, fail)
    async with serve(bench, bus) as running:
        with pytest.raises(LinkFailed, match="the proxy stops: ValueError: a bug"):
            await asyncio.wait_for(until_stopped(running), 30)
