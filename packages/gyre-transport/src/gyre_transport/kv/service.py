"""The thread that answers for a linker: other engines look pages up and lease them, proxies have them fetched.

It runs in the engine's scheduler process, on an event loop of its own; reads and waits happen in further threads, which
leave the interpreter to the scheduler while they copy. The scheduler itself waits for none of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from gyre_transport.bus import Client, Server
from gyre_transport.errors import (
    BusError,
    DataError,
    DeadlineExceeded,
    OtherContent,
    RemoteError,
    ShapeMismatch,
    TransportError,
    Unreachable,
)
from gyre_transport.kv import protocol as p
from gyre_transport.kv.counts import Counts
from gyre_transport.kv.pull import NoRoom, fetch
from gyre_transport.kv.store import Key, PageStore

log = logging.getLogger(__name__)

_TICK = 0.5  # seconds between looks at leases and holds
_START, _END = 60.0, 10.0  # seconds to begin and to stop listening
_PULLS = 4  # moves carried out at once; more wait
_ANSWER = 2.0  # seconds for an acknowledgement, which nothing depends on
_SETTLE = 3.0  # seconds that a lookup waits for offloads under way: what is not stored then is computed again
_LOOKUP = 5.0  # seconds until a source that says nothing is given up,
_SILENT = 5.0  # and then not asked again


class Engine(Protocol):
    """What the service asks of the linker."""

    layout: p.Layout

    def version(self) -> str | None:
        """The weights whose pages may be stored and restored now; None between an update and the flush after it."""

    def hashes(self, tokens: bytes) -> list[bytes]:
        """Chained hashes of the whole pages of `tokens` (uint32 LE), as a request of the present weights has them."""

    def settle(self, seconds: float) -> bool:
        """Wait until what was offloaded so far is stored; False when `seconds` were not enough."""

    def hold(self, seconds: float) -> None:
        """Keep pages over a flush for `seconds`."""

    def tick(self) -> None:
        """Time has passed."""


class Service:
    """Serves `engine`'s `store` at `address`, from `start` until `close`."""

    def __init__(self, engine: Engine, store: PageStore, counts: Counts, address: str, *, lease: float) -> None:
        self.address = address
        self._engine, self._store, self._counts, self._lease = engine, store, counts, lease
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gyre kv service", daemon=True)
        self._pulls: asyncio.Semaphore
        self._sources: dict[str, Client] = {}
        self._silent: dict[str, float] = {}  # sources that said nothing: not asked before

    def start(self) -> None:
        """Return once it listens. Raises `BusError`."""
        self._thread.start()
        self._started.wait(_START)
        if self._failure is not None:
            raise self._failure
        if not self._started.is_set():
            raise BusError(f"the KV service at {self.address!r} did not start in {_START:g} s; see the engine's log")

    def close(self) -> None:
        """Stop listening; idempotent."""
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_END)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:  # `start` raises it, or it is too late for that
            self._failure = e
            if self._started.is_set():
                log.exception("the KV service at %s ended", self.address)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._pulls = asyncio.Semaphore(_PULLS)
        async with Server(self.address, p.Request, self._handle) as server:
            self.address = server.address
            self._started.set()
            while not self._stop.is_set():
                self._tick()
                try:
                    async with asyncio.timeout(_TICK):
                        await self._stop.wait()
                except TimeoutError:
                    continue
        for source in self._sources.values():
            await source.close()
        self._counts.write()

    def _tick(self) -> None:
        self._counts.add("leases_expired", self._store.expire(time.monotonic()))
        self._counts.set("evicted", self._store.evicted)
        self._engine.tick()
        self._counts.write()

    async def _handle(self, request: p.Request) -> p.Reply:
        match request:
            case p.Lookup():
                return await self._lookup(request)
            case p.Acknowledge(lease=lease):
                self._store.release(lease)
                return p.Done()
            case p.Pull():
                return await self._pull(request)
            case p.Hold(seconds=seconds):
                self._engine.hold(seconds)
                return p.Done()
            case p.GetCounts():
                return p.Counted(counts=self._counts.snapshot())

    # --- the source -------------------------------------------------------------------------------------------------

    async def _lookup(self, m: p.Lookup) -> p.Pages:
        if m.layout != self._engine.layout:
            raise OtherContent(f"pages here are {self._engine.layout}, those asked for are {m.layout}")
        await asyncio.to_thread(self._engine.settle, _SETTLE)
        lease = self._store.lease(_keys(m.version, _split(m.hashes)), time.monotonic() + self._lease)
        if lease is None:
            return p.Pages(lease=0)
        self._counts.add("served", len(lease.pages))
        return p.Pages(
            lease=lease.number,
            slots=tuple(page.slot for page in lease.pages),
            descriptor=self._store.descriptor,
            seconds=self._lease,
        )

    # --- the destination --------------------------------------------------------------------------------------------

    async def _pull(self, m: p.Pull) -> p.Pulled:
        began = time.monotonic()
        end = began + m.deadline
        self._counts.add("pulls")
        size = self._engine.layout.page_size
        version = self._engine.version()
        here, fetched, failure, detail = 0, 0, "", ""
        if version is None:
            failure, detail = "unsettled", "the engine's cache was not flushed since its weights changed"
        else:
            keys = _keys(version, await asyncio.to_thread(self._engine.hashes, m.tokens))
            try:
                async with asyncio.timeout_at(end):
                    await self._pulls.acquire()
                try:
                    fetched = await self._fetch(m.source, version, keys, end)
                finally:
                    self._pulls.release()
            except Exception as e:
                failure, detail = _failure(e), f"{type(e).__name__}: {e}"
            here = self._store.find(keys)
        nbytes = fetched * self._store.page_nbytes
        self._counts.add("fetched", fetched)
        self._counts.add("fetched_bytes", nbytes)
        if failure:
            self._counts.add(f"pulls_{failure}")
            log.warning("KV pages of %s were not moved: %s", m.source, detail)
        return p.Pulled(
            tokens=here * size,
            fetched=fetched * size,
            nbytes=nbytes,
            seconds=time.monotonic() - began,
            failure=failure,
            detail=detail,
        )

    async def _fetch(self, address: str, version: str, keys: list[Key], end: float) -> int:
        """Fetch what is missing from the service at `address`; returns the number of pages."""
        missing = keys[self._store.find(keys) :]
        if not missing:
            return 0
        source = self._sources.setdefault(address, Client(address, p.Reply))
        lookup = p.Lookup(layout=self._engine.layout, version=version, hashes=b"".join(h for _, h in missing))
        asked = time.monotonic()
        if asked < self._silent.get(address, 0.0):
            raise Unreachable(f"{address!r} said nothing a moment ago; it is not asked")
        try:
            pages = await source.call(lookup, deadline=min(end - asked, _LOOKUP))
        except DeadlineExceeded:
            if end - asked >= _LOOKUP:
                self._silent[address] = time.monotonic() + _SILENT
            raise
        if not isinstance(pages, p.Pages):
            raise OtherContent(f"expected Pages of {address!r}, got {pages!r:.100}")
        lease_end = min(end, asked + pages.seconds)
        try:
            count = await asyncio.to_thread(fetch, self._store, missing, pages, end=lease_end)
        except Exception:
            await self._acknowledge(source, pages.lease)
            raise
        # Not when cancelled: the thread may still read, so the lease runs to its end.
        await self._acknowledge(source, pages.lease)
        return count

    async def _acknowledge(self, source: Client, lease: int) -> None:
        if not lease:
            return
        try:
            await source.call(p.Acknowledge(lease=lease), deadline=_ANSWER)
        except BusError as e:  # its deadline frees the pages
            log.warning("a KV lease of %s ends at its deadline: %s", source.address, e)


def _keys(version: str, hashes: Sequence[bytes]) -> list[Key]:
    return [(version, h) for h in hashes]


def _split(hashes: bytes) -> list[bytes]:
    if len(hashes) % p.HASH_BYTES:
        raise DataError(f"expected hashes of {p.HASH_BYTES} bytes each, got {len(hashes)} bytes")
    return [hashes[at : at + p.HASH_BYTES] for at in range(0, len(hashes), p.HASH_BYTES)]


def _failure(e: Exception) -> str:
    match e:
        case NoRoom():
            return "full"
        case DeadlineExceeded() | TimeoutError():
            return "deadline"
        case OtherContent() | ShapeMismatch() | RemoteError():
            return "refused"
        case TransportError():
            return "unreachable"
        case _:
            raise e
