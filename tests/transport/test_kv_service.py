"""A linker's service: pages go from one store to another, whole or not at all, and nothing waits for long."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gyre_transport.bus import Client, Server
from gyre_transport.descriptor import Descriptor
from gyre_transport.kv import protocol as p
from gyre_transport.kv import service as services
from gyre_transport.kv.config import LinkerConfig, arguments, linker_config, model_identity
from gyre_transport.kv.counts import Counts
from gyre_transport.kv.service import Service
from gyre_transport.kv.store import Key, Page, PageStore

PAGE = 4  # tokens
SIZE = 4096  # bytes
TOKENS = list(range(100, 141))  # ten pages and a token
WAIT = 30.0

LAYOUT = p.Layout(model="m", dtype="bfloat16", page_size=PAGE, page_nbytes=SIZE, layers=2, rank="tp=0/1 pp=0/1")


class Engine:
    """What a linker tells its service."""

    def __init__(self, layout: p.Layout) -> None:
        self.layout = layout
        self.weights: str | None = "7"
        self.unsettled: Callable[[], None] | None = None
        self.held: list[float] = []

    def version(self) -> str | None:
        return self.weights

    def hashes(self, tokens: bytes) -> list[bytes]:
        found, last = [], b""
        for at in range(0, len(tokens) // (4 * PAGE) * 4 * PAGE, 4 * PAGE):
            last = hashlib.sha256(last + tokens[at : at + 4 * PAGE]).digest()
            found.append(last)
        return found

    def settle(self, seconds: float) -> bool:
        if self.unsettled is not None:
            self.unsettled()
        return True

    def hold(self, seconds: float) -> None:
        self.held.append(seconds)

    def tick(self) -> None:
        pass


class Node:
    """An engine's store and service, and a client of it."""

    def __init__(self, address: str, counts: Path, *, slots: int, layout: p.Layout, lease: float) -> None:
        self.engine = Engine(layout)
        self.store = PageStore(slots, SIZE)
        self.counts = Counts(counts)
        self.address = address
        self.service = Service(self.engine, self.store, self.counts, address, lease=lease)
        self.client = Client(address, p.Reply)

    def keys(self, tokens: list[int], version: str = "7") -> list[Key]:
        return [(version, h) for h in self.engine.hashes(packed(tokens))]

    def reserve(self, tokens: list[int], version: str = "7") -> list[Page]:
        taken = self.store.reserve(self.keys(tokens, version))
        assert taken is not None
        for _, page in taken:
            self.store.memory[page.slot] = content(page.key)
        return [page for _, page in taken]

    def put(self, tokens: list[int], version: str = "7") -> None:
        """Store the pages of `tokens`, each with bytes of its own."""
        self.store.publish(self.reserve(tokens, version))

    def has(self, tokens: list[int], version: str = "7") -> int:
        """Tokens whose pages are here, with the right bytes."""
        keys = self.keys(tokens, version)
        count = self.store.find(keys)
        pages = self.store.pin(keys[:count])
        assert pages is not None
        for page in pages:
            assert np.array_equal(self.store.memory[page.slot], content(page.key))
        self.store.unpin(pages)
        return count * PAGE

    async def pull(self, source: str, tokens: list[int], deadline: float = WAIT) -> p.Pulled:
        pulled = await self.client.call(
            p.Pull(source=source, tokens=packed(tokens), deadline=deadline), deadline=deadline + 10
        )
        assert isinstance(pulled, p.Pulled)
        return pulled


def packed(tokens: list[int]) -> bytes:
    return np.asarray(tokens, "<u4").tobytes()


def content(key: Key) -> np.ndarray:
    return np.random.default_rng(int.from_bytes(key[1][:6], "big")).integers(0, 256, SIZE, np.uint8)


Make = Callable[..., Node]


@pytest.fixture
async def make(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Make]:
    folder = tmp_path_factory.mktemp("n")
    numbers = itertools.count()
    made: list[Node] = []

    def start(*, slots: int = 64, layout: p.Layout = LAYOUT, lease: float = 20.0) -> Node:
        n = next(numbers)
        node = Node(f"ipc://{folder}/{n}", folder / f"{n}.json", slots=slots, layout=layout, lease=lease)
        node.service.start()
        made.append(node)
        return node

    yield start
    for node in made:
        await node.client.close()
        await asyncio.to_thread(node.service.close)
        node.store.close()


@contextlib.asynccontextmanager
async def scripted(folder: Path, answer: Callable[[p.Lookup], p.Pages]) -> AsyncIterator[str]:
    """A source that answers a lookup with anything."""

    async def handle(request: Any) -> Any:
        return answer(request) if isinstance(request, p.Lookup) else p.Done()

    async with Server(f"ipc://{folder}/scripted", p.Request, handle) as server:
        yield server.address


async def test_pages_move_and_the_lease_is_given_back(make: Make) -> None:
    a, b = make(), make()
    a.put(TOKENS)
    pulled = await b.pull(a.address, TOKENS)
    assert (pulled.tokens, pulled.fetched, pulled.nbytes, pulled.failure) == (40, 40, 10 * SIZE, "")
    assert b.has(TOKENS) == 40
    assert a.store.release(1) is False, "acknowledged"
    more = [*TOKENS, *range(20)]
    a.put(more)
    assert (await b.pull(a.address, more)).fetched == 20, "only what is missing"
    assert (await b.pull(a.address, more)).fetched == 0
    assert b.has(more) == 60


async def test_what_is_being_stored_is_waited_for(make: Make) -> None:
    a, b = make(), make()
    pages = a.reserve(TOKENS)

    def finish() -> None:
        a.engine.unsettled = None
        a.store.publish(pages)

    a.engine.unsettled = finish
    assert (await b.pull(a.address, TOKENS)).fetched == 40


async def test_a_page_that_is_never_stored_is_not_seen(make: Make) -> None:
    a, b = make(), make()
    a.put(TOKENS[:20])
    a.reserve(TOKENS)
    assert (await b.pull(a.address, TOKENS)).fetched == 20
    assert b.has(TOKENS) == 20


async def test_other_weights_have_other_pages(make: Make) -> None:
    a, b = make(), make()
    a.put(TOKENS)
    b.engine.weights = "8"
    pulled = await b.pull(a.address, TOKENS)
    assert (pulled.tokens, pulled.failure) == (0, "")
    assert b.has(TOKENS, "8") == 0


async def test_nothing_moves_between_an_update_and_its_flush(make: Make) -> None:
    a, b = make(), make()
    a.put(TOKENS)
    b.engine.weights = None
    assert (await b.pull(a.address, TOKENS)).failure == "unsettled"
    assert b.counts.snapshot()["pulls_unsettled"] == 1


@pytest.mark.parametrize(
    "other",
    [{"model": "n"}, {"dtype": "float16"}, {"page_size": 8}, {"layers": 3}, {"rank": "tp=1/2 pp=0/1"}],
)
async def test_pages_of_another_layout_are_refused(make: Make, other: dict[str, Any]) -> None:
    a, b = make(layout=msgspec.structs.replace(LAYOUT, **other)), make()
    a.put(TOKENS)
    pulled = await b.pull(a.address, TOKENS)
    assert pulled.failure == "refused"
    assert next(iter(other)) in pulled.detail
    assert b.has(TOKENS) == 0


async def test_a_full_store_takes_nothing_and_says_so(make: Make) -> None:
    a, b = make(), make(slots=5)
    a.put(TOKENS)
    assert (await b.pull(a.address, TOKENS)).failure == "full"
    assert (await b.pull(a.address, TOKENS[:20])).fetched == 20
    assert b.has(TOKENS) == 20


async def test_a_source_that_is_not_there_is_waited_for_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_LOOKUP", 0.2)
    b = make()
    assert (await b.pull("ipc:///nowhere/at-all", TOKENS)).failure == "deadline"
    again = await b.pull("ipc:///nowhere/at-all", TOKENS)
    assert again.failure == "unreachable"
    assert "not asked" in again.detail
    assert b.counts.snapshot()["pulls"] == 2


async def test_a_source_that_ended_after_its_answer(make: Make, script: Any, tmp_path: Path) -> None:
    b, doomed = make(), script("owner.py")
    raw = doomed.ask("allocate", nbytes=10 * SIZE, seed=1)["descriptor"]
    descriptor = msgspec.msgpack.decode(bytes.fromhex(raw), type=Descriptor)
    doomed.kill()
    pages = p.Pages(lease=1, slots=tuple(range(10)), descriptor=descriptor, seconds=20.0)
    async with scripted(tmp_path, lambda m: pages) as source:
        pulled = await b.pull(source, TOKENS)
    assert (pulled.failure, pulled.tokens) == ("unreachable", 0)
    assert b.store.taken == 0, "slots that were reserved are free again"


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_no_page_is_read_beyond_its_lease(make: Make, tmp_path: Path, seconds: float) -> None:
    a, b = make(), make()
    a.put(TOKENS)
    pages = p.Pages(lease=1, slots=tuple(range(10)), descriptor=a.store.descriptor, seconds=seconds)
    async with scripted(tmp_path, lambda m: pages) as source:
        assert (await b.pull(source, TOKENS)).failure == "deadline"
    assert b.store.taken == 0


async def test_slots_outside_the_source_are_refused(make: Make, tmp_path: Path) -> None:
    a, b = make(), make()
    pages = p.Pages(lease=1, slots=(63, 64), descriptor=a.store.descriptor, seconds=20.0)
    async with scripted(tmp_path, lambda m: pages) as source:
        assert (await b.pull(source, TOKENS)).failure == "refused"
    assert b.store.taken == 0


async def test_more_pages_than_were_asked_for_are_not_taken(make: Make, tmp_path: Path) -> None:
    a, b = make(), make()
    a.put(list(range(200)))
    pages = p.Pages(lease=1, slots=tuple(range(40)), descriptor=a.store.descriptor, seconds=20.0)
    async with scripted(tmp_path, lambda m: pages) as source:
        assert (await b.pull(source, TOKENS)).fetched == 40


async def test_a_lease_that_nobody_gives_back_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_TICK", 0.02)
    a = make(lease=0.05)
    a.put(TOKENS)
    lookup = p.Lookup(layout=LAYOUT, version="7", hashes=b"".join(h for _, h in a.keys(TOKENS)))
    pages = await a.client.call(lookup, deadline=WAIT)
    assert (len(pages.slots), pages.seconds) == (10, 0.05)
    async with asyncio.timeout(WAIT):
        while not a.counts.snapshot()["leases_expired"]:
            await asyncio.sleep(0.01)
    assert await a.client.call(p.Acknowledge(lease=pages.lease), deadline=WAIT) == p.Done(), "too late is no error"


async def test_hashes_that_are_none(make: Make) -> None:
    a = make()
    with pytest.raises(Exception, match="32 bytes each"):
        await a.client.call(p.Lookup(layout=LAYOUT, version="7", hashes=b"short"), deadline=WAIT)


async def test_a_hold_reaches_the_engine_and_counters_reach_their_file(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_TICK", 0.02)
    a, b = make(), make()
    a.put(TOKENS)
    assert await a.client.call(p.Hold(seconds=9.0), deadline=WAIT) == p.Done()
    assert a.engine.held == [9.0]
    await b.pull(a.address, TOKENS)
    counted = await b.client.call(p.GetCounts(), deadline=WAIT)
    assert counted.counts["fetched"] == 10
    assert counted.counts["fetched_bytes"] == 10 * SIZE
    path = b.counts._path
    assert path is not None
    async with asyncio.timeout(WAIT):
        while not path.is_file() or json.loads(path.read_text())["fetched"] != 10:
            await asyncio.sleep(0.01)


# --- configuration --------------------------------------------------------------------------------------------------


def test_what_an_engine_is_started_with_is_what_its_linker_reads() -> None:
    config = LinkerConfig(model="m", addresses=("ipc://x/kv-0-0",), page_size=32, store_bytes=1 << 20, namespaces=True)
    argv = arguments(config)
    assert argv[:2] == ["--page-size", "32"]
    given = json.loads(argv[argv.index("--unified-cache-external-linker-config") + 1])
    assert (given["linker"], given["linker_module_path"]) == ("PageLinker", "gyre_transport.kv.linker")
    assert linker_config(given["linker_extra_config"]) == config


def test_equal_folders_are_one_model(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)

    def folder(name: str, weights: np.ndarray, config: str = "{}") -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(config)
        (made / "model.safetensors").write_bytes(weights.tobytes())
        return made

    first = model_identity(folder("a", weights))
    assert model_identity(folder("b", weights)) == first
    assert model_identity(folder("c", weights, '{"layers": 3}')) != first
    assert model_identity(folder("d", weights + np.uint8(1))) != first
    assert model_identity(folder("e", weights[:-1])) != first
