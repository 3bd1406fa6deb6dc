"""KV pages between two real engines: a generation aborted on one goes on at the other without being computed again.

Two engines serve the whole module; every test finds both alive with the weights published last. B reads A's pages over
tcp, A reads B's through shared memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio

from gyre_sched.engine.config import EngineConfig
from gyre_sched.engine.host import EngineHost
from gyre_sched.engine.pages import Pages
from gyre_transport.bus import Client
from gyre_transport.kv import protocol as kv
from gyre_transport.kv.config import LinkerConfig, model_identity
from gyre_transport.run import TransportConfig
from gyre_transport.snapshot import SnapshotSource

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang: uv sync --group engine"),
]

VOCABULARY = 1024
WAIT = 120.0  # seconds until a test gives up
MOST = 0.95  # of a context that must not be computed again


class Engine:
    """One engine and its KV service."""

    def __init__(self, host: EngineHost, address: str) -> None:
        self.host = host
        self.address = address
        self._service = Client(address, kv.Reply)

    async def generate(self, ids: list[int], tokens: int) -> dict[str, Any]:
        answer = await self.host.client.generate(ids, max_new_tokens=tokens, deadline=WAIT)
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == tokens
        return answer

    async def interrupted(self, ids: list[int], after: int) -> list[int]:
        """What a long generation had sampled when it was aborted, at least `after` tokens."""
        rid, got, reason = f"long-{id(ids)}", [], None
        body = {
            "input_ids": ids,
            "rid": rid,
            "stream": True,
            "sampling_params": {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True},
        }
        async with (
            asyncio.timeout(WAIT),
            aiohttp.ClientSession(read_bufsize=1 << 24) as http,
            http.post(f"{self.host.url}/generate", json=body) as response,
        ):
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    got += event["output_ids"]
                    reason = event["meta_info"]["finish_reason"]
                    if reason is None and len(got) >= after:
                        await self.host.client._call("POST", "/abort_request", {"rid": rid})
        assert reason["type"] == "abort"
        return got

    async def pull(self, source: Engine, ids: list[int], deadline: float = 30.0) -> kv.Pulled:
        request = kv.Pull(source=source.address, tokens=np.asarray(ids, "<u4").tobytes(), deadline=deadline)
        pulled = await self._service.call(request, deadline=deadline + 5.0)
        assert isinstance(pulled, kv.Pulled)
        return pulled

    async def counts(self) -> dict[str, int]:
        counted = await self._service.call(kv.GetCounts(), deadline=10.0)
        assert isinstance(counted, kv.Counted)
        return counted.counts

    def program(self) -> psutil.Process:
        """The engine's first process, below its guard."""
        assert self.host.pid is not None
        return psutil.Process(self.host.pid).children()[0]

    async def close(self) -> None:
        await self._service.close()


class Pair:
    def __init__(self, a: Engine, b: Engine, source: SnapshotSource, models: list[Path]) -> None:
        self.a, self.b = a, b
        self._source, self._models = source, models
        self.version, self.manifest = 0, b""
        self._prompts = itertools.count(1)

    def prompt(self, length: int = 400) -> list[int]:
        """Tokens that no test has used before."""
        return np.random.default_rng(next(self._prompts)).integers(10, VOCABULARY, length).tolist()

    def publish(self) -> tuple[int, bytes]:
        """Other weights, as the next version."""
        from safetensors.torch import load_file

        from gyre_transport.torch import describe

        self.version += 1
        tensors = load_file(self._models[self.version % 2] / "model.safetensors")
        manifest = self._source.publish(self.version, {name: describe(t) for name, t in tensors.items()})
        self.manifest = msgspec.msgpack.encode(manifest)
        return self.version, self.manifest


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tiny_model: Path, make_tiny_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("moves")
    config = EngineConfig(dtype="float32", context_length=4096, max_tokens=16_384, max_running=16)
    with tempfile.TemporaryDirectory(prefix="gyre-") as bus, SnapshotSource("tiny") as source:

        def make(name: str, *backends: Any) -> Engine:
            linker = LinkerConfig(
                model=model_identity(tiny_model),
                addresses=(f"ipc://{bus}/{name}",),
                transport=TransportConfig(backends=backends),
            )
            host = EngineHost(name, config, tiny_model, folder / f"{name}.log", pages=Pages(linker, 60.0))
            return Engine(host, linker.addresses[0])

        pair = Pair(make("a", "shm"), make("b", "tcp"), source, [tiny_model, make_tiny_model(folder / "other", seed=1)])
        engines = (pair.a, pair.b)
        watches: list[asyncio.Task[None]] = []
        try:
            await asyncio.gather(*(e.host.start() for e in engines))
            watches = [asyncio.create_task(e.host.watch()) for e in engines]
            yield pair
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await asyncio.gather(*(e.host.stop() for e in engines))
            await asyncio.gather(*(e.close() for e in engines))


@pytest_asyncio.fixture(loop_scope="module")
async def pair(running: Pair) -> Pair:
    """Both engines alive, with the newest version."""
    async with asyncio.timeout(400):
        while not (running.a.host.alive and running.b.host.alive):
            await asyncio.sleep(0.2)
    for engine in (running.a, running.b):
        await engine.host.refresh(running.version, running.manifest, deadline=WAIT)
    return running


async def test_a_refresh_retracts_what_is_in_flight_and_it_goes_on(pair: Pair) -> None:
    old, host = pair.version, pair.a.host
    begun = await pair.a.generate(pair.prompt(40), 1)
    long = asyncio.create_task(host.client.generate(pair.prompt(40), max_new_tokens=1000, deadline=WAIT))
    async with asyncio.timeout(WAIT):
        while not any(load["num_running_reqs"] for load in (await host.client._call("GET", "/v1/loads"))["loads"]):
            await asyncio.sleep(0.05)
    version, manifest = pair.publish()
    await host.refresh(version, manifest, deadline=WAIT)
    meta = (await long)["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 1000}
    spans = [(int(s["version"].partition("-")[0]), s["start"], s["end"]) for s in meta["weight_versions"]]
    middle = spans[0][2]
    assert 0 < middle < 1000
    assert spans == [(old, 0, middle), (version, middle, 1000)]
    assert meta["num_retractions"] == 1
    assert begun["meta_info"]["weight_version"] != meta["weight_version"]


@pytest.mark.parametrize("way", ["tcp", "shm"])
async def test_an_aborted_generation_goes_on_elsewhere_without_being_computed_again(pair: Pair, way: str) -> None:
    source, target = (pair.a, pair.b) if way == "tcp" else (pair.b, pair.a)
    prompt, expired = pair.prompt(), (await source.counts())["leases_expired"]
    got = await source.interrupted(prompt, after=50)
    context = prompt + got
    pulled = await target.pull(source, context)
    assert pulled.failure == ""
    assert pulled.fetched >= MOST * len(context), "what was sampled moves, too"
    answer = await target.generate(context, 40)
    assert answer["meta_info"]["cached_tokens"] >= MOST * len(context)
    whole = await source.generate(prompt, len(got) + 40)
    assert got + answer["output_ids"] == whole["output_ids"], "as uninterrupted"
    assert (await source.counts())["leases_expired"] == expired, "the lease was acknowledged"


async def test_without_a_pull_everything_is_computed(pair: Pair) -> None:
    prompt = pair.prompt()
    first = await pair.a.generate(prompt, 20)
    answer = await pair.b.generate(prompt, 20)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == first["output_ids"]


async def test_pages_of_old_weights_are_never_restored(pair: Pair) -> None:
    """Fails when the version leaves the key of a page."""
    prompt, old = pair.prompt(), pair.version
    first = await pair.a.generate(prompt, 20)
    await pair.b.pull(pair.a, prompt)
    assert (await pair.b.generate(prompt, 20))["meta_info"]["cached_tokens"] >= MOST * len(prompt)

    version, manifest = pair.publish()
    await pair.b.host.refresh(version, manifest, deadline=WAIT)
    assert (await pair.b.pull(pair.a, prompt)).tokens == 0, "A has pages of these tokens, of old weights"
    answer = await pair.b.generate(prompt, 20)
    assert answer["meta_info"]["cached_tokens"] == 0, "nor do its own come back"
    assert answer["output_ids"] != first["output_ids"]

    assert (await pair.a.pull(pair.b, prompt)).fetched == 0, "and new pages are nothing to old weights"
    assert (await pair.a.generate(prompt, 20))["output_ids"] == first["output_ids"]
    await pair.a.host.refresh(version, manifest, deadline=WAIT)
    assert (await pair.a.pull(pair.b, prompt)).fetched >= MOST * len(prompt), "equal weights share pages again"
    again = await pair.a.generate(prompt, 20)
    assert again["meta_info"]["cached_tokens"] >= MOST * len(prompt)
    assert again["output_ids"] == answer["output_ids"]
    assert pair.version == old + 1


async def test_a_version_made_again_with_other_bytes_shares_no_page(pair: Pair) -> None:
    """A core that was restored from a checkpoint makes its versions again."""
    prompt = pair.prompt()
    await pair.a.generate(prompt, 4)
    with SnapshotSource("tiny") as restored:
        from safetensors.torch import load_file

        from gyre_transport.torch import describe

        tensors = load_file(pair._models[(pair.version + 1) % 2] / "model.safetensors")
        again = restored.publish(pair.version, {name: describe(t) for name, t in tensors.items()})
        await pair.b.host.refresh(pair.version, msgspec.msgpack.encode(again), deadline=WAIT)
    assert (await pair.b.pull(pair.a, prompt)).tokens == 0


async def test_pages_outlive_a_role_switch_for_others(pair: Pair) -> None:
    prompt = pair.prompt()
    first = await pair.a.generate(prompt, 4)
    await pair.a.host.release()
    try:
        assert (await pair.b.pull(pair.a, prompt)).fetched >= MOST * len(prompt)
    finally:
        await pair.a.host.come_back(pair.version, pair.manifest, deadline=WAIT)
    answer = await pair.b.generate(prompt, 4)
    assert answer["meta_info"]["cached_tokens"] >= MOST * len(prompt)
    assert answer["output_ids"] == first["output_ids"]


async def test_an_engine_waits_for_no_source_that_hangs(pair: Pair) -> None:
    prompt = pair.prompt()
    first = await pair.a.generate(prompt, 10)
    stopped = [pair.a.program(), *pair.a.program().children(recursive=True)]
    for process in stopped:
        process.suspend()
    try:
        pull = asyncio.create_task(pair.b.pull(pair.a, prompt, deadline=20.0))
        await pair.b.generate(pair.prompt(8), 1)  # short: it has the seconds until the source is given up
        assert not pull.done(), "the engine answered others meanwhile"
        answer = await pair.b.generate(prompt, 10)
        pulled = await pull
    finally:
        for process in stopped:
            process.resume()
    assert pulled.failure == "deadline"
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == first["output_ids"]


async def test_a_source_killed_in_the_middle_costs_a_computation_only(pair: Pair) -> None:
    prompt = pair.prompt(3000)
    first = await pair.a.generate(prompt, 10)
    pull = asyncio.create_task(pair.b.pull(pair.a, prompt, deadline=10.0))
    await asyncio.sleep(0)
    os.kill(pair.a.program().pid, signal.SIGKILL)
    pulled = await pull
    answer = await pair.b.generate(prompt, 10)
    assert answer["output_ids"] == first["output_ids"]
    assert answer["meta_info"]["cached_tokens"] <= pulled.tokens, "all of a pull or nothing"
    assert pulled.failure or pulled.fetched >= MOST * len(prompt)
