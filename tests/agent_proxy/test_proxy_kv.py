"""KV pages follow a request: who is asked to fetch what, when a drain is over, and that nothing depends on it."""

from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest

from gyre_agent_proxy.config import ModelConfig, ProxyConfig
from gyre_agent_proxy.engines import Pool, Route
from gyre_agent_proxy.link import Link
from gyre_agent_proxy.serve import proxy
from gyre_traj.log import read_log
from gyre_transport.bus import Server
from gyre_transport.kv import protocol as kv
from gyre_transport.run import BusConfig

ASK = [{"role": "user", "content": "hi"}]
LONG = "a rather long answer that takes its engine quite some tokens to write down"


class KvService:
    """A destination's KV service, scripted."""

    def __init__(self, folder) -> None:
        self.address = f"ipc://{folder}/kv"
        self.pulls: list[kv.Pull] = []
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.failure = ""
        self._server = Server(self.address, kv.Request, self._handle)

    async def _handle(self, request):
        assert isinstance(request, kv.Pull)
        self.pulls.append(request)
        self.asked.set()
        await self.go.wait()
        return kv.Pulled(tokens=16, fetched=0 if self.failure else 16, failure=self.failure, detail="scripted")

    def tokens(self, number=-1):
        return np.frombuffer(self.pulls[number].tokens, "<u4").tolist()

    async def __aenter__(self):
        await self._server.start()
        return self

    async def __aexit__(self, *exc):
        await self._server.close()


@pytest.fixture
async def service(tmp_path_factory):
    async with KvService(tmp_path_factory.mktemp("k")) as made:
        yield made


class Two:
    """A proxy over engine "a" and, in the routes later, engine "b", whose KV service is `service`."""

    def __init__(self, bench, a, b, service) -> None:
        self.bench, self.a, self.b, self.service = bench, a, b, service
        self.routes = (Route("a", a.url, 4, kv=("ipc://of-a",)), Route("b", b.url, 4, kv=(service.address,)))

    def drain(self, running) -> None:
        running.pool.update(2, [self.routes[1]], ["a"])
        running.pool.drain("a")

    def serve(self, **config):
        settings = {"backoff": 0.01, "backoff_limit": 0.05, "abort_wait": 5.0, "route_wait": 20.0, **config}
        return proxy(ProxyConfig(**settings), ModelConfig(path=str(self.bench.folder)), calls=self.bench.calls)


@pytest.fixture
async def two(bench, service):
    return Two(bench, await bench.engine(), await bench.engine(), service)


def client(running):
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0, timeout=60)


async def text_of(api, messages=ASK):
    return (await api.chat.completions.create(model="m", messages=messages)).choices[0].message.content


async def moved(two, running, api) -> str:
    """A call that leaves "a" after five tokens."""
    two.a.hold = 5
    two.bench.brain.says(LONG)
    running.pool.update(1, [two.routes[0]])
    asking = asyncio.create_task(text_of(api))
    await two.a.held.wait()
    two.drain(running)
    return await asking


async def test_the_next_engine_fetches_before_it_is_asked(two, service):
    service.go.clear()
    async with two.serve() as running, client(running) as api:
        asking = asyncio.create_task(moved(two, running, api))
        await service.asked.wait()
        state = running.pool.engines["a"]
        assert not two.b.requests
        assert (state.active, len(state.leaving)) == (set(), 1)
        service.go.set()
        assert await asking == LONG
        counts = running.service.metrics.counts
    assert service.pulls[0].source == "ipc://of-a"
    assert service.tokens() == two.b.requests[0]["input_ids"], "prompt and what was sampled so far"
    assert (counts["kv_moves"], counts["kv_moves_failed"], counts["kv_tokens"]) == (1, 0, 16)
    assert not state.leaving


async def test_a_drain_is_over_when_the_pages_are_fetched(two, service):
    service.go.clear()
    async with two.serve() as running, client(running) as api:
        asking = asyncio.create_task(moved(two, running, api))
        await service.asked.wait()
        link = Link(BusConfig(dir=str(two.bench.calls)), running.pool, running.url)
        drained = asyncio.create_task(link._drain("a"))
        for _ in range(50):
            await asyncio.sleep(0)
        state = running.pool.engines["a"]
        assert state.leaving
        assert not drained.done()
        service.go.set()
        await asking
        assert not state.leaving
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)


@pytest.mark.parametrize("how", ["refused", "late", "gone"])
async def test_pages_that_do_not_come_are_computed_again(two, service, how):
    if how == "refused":
        service.failure = "refused"
    elif how == "late":
        service.go.clear()
    else:
        two.routes = (two.routes[0], Route("b", two.b.url, 4, kv=("ipc://nobody-here",)))
    async with two.serve(kv_wait=0.2) as running, client(running) as api:
        assert await moved(two, running, api) == LONG
        counts = running.service.metrics.counts
        assert (counts["kv_moves"], counts["kv_moves_failed"], counts["kv_tokens"]) == (1, 1, 0)
        assert counts["calls_failed"] == 0
        service.go.set()


async def test_the_next_call_of_an_execution_that_lost_its_engine_brings_its_pages(two, service):
    async with two.serve() as running, client(running) as api:
        running.pool.update(1, [two.routes[0]])
        two.bench.brain.says("one")
        first = await text_of(api)
        running.pool.update(2, [], ["a"])
        running.pool.update(3, [two.routes[1]])
        assert "a" not in running.pool.engines
        two.bench.brain.says("two")
        await text_of(api, [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}])
        counts, known = running.service.metrics.counts, len(two.a.requests[0]["input_ids"]) + len("one") + 1
        assert len(two.b.requests[0]["input_ids"]) > known
        assert counts["relocated"] == 1
        assert counts["relocated_tokens"] == counts["relocated_recomputed"] == known, "the rest was never computed"
        assert service.pulls[0].source == "ipc://of-a"
        assert service.tokens() == two.b.requests[0]["input_ids"]
        two.bench.brain.says("three")
        await text_of(api)
        assert len(service.pulls) == 1, "it stays where its pages are"


async def test_nothing_is_fetched_from_an_engine_that_was_lost(two, service):
    async with two.serve() as running, client(running) as api:
        two.a.cut = 4
        two.bench.brain.says(LONG)
        running.pool.update(1, [two.routes[0]])
        asking = asyncio.create_task(text_of(api))
        while not two.a.requests:
            await asyncio.sleep(0.005)
        running.pool.update(2, [two.routes[1]])
        await running.pool.notify()
        assert await asking == LONG
    assert not service.pulls


async def test_kv_wait_0_moves_no_pages(two, service):
    async with two.serve(kv_wait=0) as running, client(running) as api:
        assert await moved(two, running, api) == LONG
        assert running.service.metrics.counts["kv_moves"] == 0
    assert not service.pulls


async def test_what_was_computed_again_is_counted_and_recorded(two, service):
    async with two.serve() as running, client(running) as api:
        two.b.cached = {"device": 3, "host": 8}
        assert await moved(two, running, api) == LONG
        counts = running.service.metrics.counts
    (path,) = two.bench.calls.glob("*.gtraj")
    (call,) = read_log(path).calls
    first, second = call.attempts
    context = len(two.b.requests[0]["input_ids"])
    assert (first.context, first.cached) == (context - 5, 0)
    assert (second.context, second.cached) == (context, 11)
    assert counts["relocated"] == 1
    assert counts["relocated_tokens"] == context - 3, "what the engine had itself would not have been computed either"
    assert counts["relocated_recomputed"] == context - 11


def test_pages_are_asked_for_where_an_engine_was():
    pool = Pool()
    pool.update(1, [Route("a", "http://a", kv=("ipc://a",))])
    pool.update(2, [Route("b", "http://b", kv=("ipc://b",))])
    assert "a" not in pool.engines
    assert pool.pages_at("a") == ("ipc://a",)
    assert pool.pages_at("c") == ()
    pool.failed(pool.engines["b"], 0.0)
    assert pool.pages_at("b") == ()
