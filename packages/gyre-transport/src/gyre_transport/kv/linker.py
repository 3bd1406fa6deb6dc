"""What SGLang loads into each scheduler process (`config.arguments`): a cache linker over a `PageStore`.

    insert into the radix cache ──offload──▶ reserve slots ─▶ copied by a thread ─▶ published
    match of a request          ──lookup───▶ what the store has now (nothing is fetched here)
    prefill of a request        ──load─────▶ pin, copied layer by layer by a thread, unpin

Weights. A page is stored and found under the label of the weights that computed it (`weight_version`). After an update
the engine still has pages of the old weights in its pool until its cache is flushed; in between nothing is stored or
restored. Where weights change under running requests (`namespaces`), the cache is never flushed; instead every request
gets a cache namespace of the weights it starts with, and so never meets a page of others.

A flush drops what is stored, too, unless the pages are held (`Hold`).
"""

from __future__ import annotations

import logging
import time
from array import array
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_serving

from gyre_transport import endpoint
from gyre_transport import keys as run_keys
from gyre_transport.descriptor import Content
from gyre_transport.errors import DataError
from gyre_transport.kv.config import linker_config
from gyre_transport.kv.counts import Counts
from gyre_transport.kv.namespaces import namespace_requests
from gyre_transport.kv.pages import PoolPages, UnfitPool
from gyre_transport.kv.protocol import Layout
from gyre_transport.kv.rank import rank_of
from gyre_transport.kv.service import Service
from gyre_transport.kv.store import Key, Page, PageStore
from gyre_transport.kv.worker import Worker

log = logging.getLogger(__name__)

_SHARE = 16  # where room must be made, one part in so many of the store


class _Load:
    """Pages of one request on their way into the pool; `whole` is False when some went before they were pinned."""

    def __init__(self, held: list[Page] | None, pages: torch.Tensor) -> None:
        self.whole = held is not None
        self.held = held or []
        self.slots = [page.slot for page in self.held]
        self.pages = pages


class PageGone(DataError):
    """A page that another rank may have is here no more."""


class PageLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One rank's linker. SGLang calls it from its scheduler's thread only."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None
    ) -> None:
        """Raises `UnfitPool` for an engine whose KV is not kept in one plain pool, `BusError`, `DataError`."""
        config = linker_config(extra_config)
        if len(components) != 1:
            raise UnfitPool(f"expected one kind of KV, got {sorted(map(str, components))}; set kv.moves = false")
        endpoint.configure(config.transport)
        if config.keys:
            run_keys.use(run_keys.load(Path(config.keys)))
        self.forward_stream = forward_stream
        self._allocator = params.token_to_kv_pool_allocator
        self._pool = PoolPages(self._allocator.get_kvcache(), params.page_size)
        self.pools: dict[Any, object] = {PoolName.KV: self._pool}
        self.layer_done_counter = LayerWiseLoadCounter(self._pool.layers)
        self._rank = rank_of(params)
        self.layout = Layout(
            model=config.model,
            dtype=self._pool.dtype,
            page_size=params.page_size,
            page_nbytes=self._pool.page_nbytes,
            layers=self._pool.layers,
            rank=self._rank.words,
        )
        slots = min(self._pool.pages, config.store_bytes // self._pool.page_nbytes)
        self._store = PageStore(
            slots, self._pool.page_nbytes, Content(model=config.model, version=0, layout=self._rank.words)
        )
        self._pool.bind(self._store)
        self._counts = Counts(self._rank.counts_file(config.counts))
        self._flushed = self._label  # the weights all pages in the pool are of
        self._namespaces = config.namespaces
        if config.namespaces:
            namespace_requests(lambda: self._label)
        self._kept: dict[int, Key] = {}  # what each page of the pool was last stored or restored as
        self._held_until = 0.0  # time.monotonic(); 0: no hold
        self._resting = False  # flushed while held
        self._queued: dict[str, _Load] = {}
        self._offloaded: SimpleQueue[bool] = SimpleQueue()
        self._saving, self._restoring = Worker("gyre kv save"), Worker("gyre kv restore")
        self._stream = torch.cuda.Stream(self._pool.device) if self._pool.device.type == "cuda" else None
        address = config.addresses[self._rank.number]
        self._service = Service(self, self._store, self._counts, address, lease=config.lease)
        self._service.start()
        log.info("KV pages: %s, %d slots of %d tokens, at %s", self.layout, slots, params.page_size, address)

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return str(get_serving().weight_version)

    def version(self) -> str | None:
        """The weights whose pages may be stored and restored now; None between an update and the flush after it."""
        label = self._label
        return label if self._namespaces or label == self._flushed else None

    def _keys(self, hashes: list[str]) -> list[Key] | None:
        version = self.version()
        return None if version is None else [(version, bytes.fromhex(h)) for h in hashes]

    def hashes(self, tokens: bytes) -> list[bytes]:
        """Chained hashes of the whole pages of `tokens` (uint32 LE), as a request of the present weights has them."""
        ids = array("I")
        ids.frombytes(tokens)
        size = self.layout.page_size
        whole = array("q", ids[: len(ids) // size * size])
        if not whole:
            return []
        key = RadixKey(whole, extra_key=self._label if self._namespaces else None)
        return [bytes.fromhex(h) for h in get_storage_hash_str(key, None, page_size=size)]

    # --- restoring --------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """See `UnifiedCacheLinker`."""
        wanted = _of_pool(transfers)
        keys = self._keys(wanted.keys) if wanted is not None else None
        return list(range(1, self._store.find(keys) + 1)) if keys else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """See `UnifiedCacheLinker`. Refused, so that the tokens are computed, if a page went since `lookup`.

        Ranks must agree on the answer. Where there are several, such a load is taken and fails: SGLang then ends the
        request, and whoever sent it sends it again.
        """
        wanted = _of_pool(transfers)
        keys = self._keys(wanted.keys) if wanted is not None else None
        if wanted is None or not keys:
            return False
        held = self._store.pin(keys)
        if held is None and self._rank.alone:
            return False
        self._queued[rid] = _Load(held, self._pool.locate(wanted.device_indices))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """See `UnifiedCacheLinker`."""
        load = self._queued.pop(rid, None)
        if load is not None:
            self._store.unpin(load.held)
        return load is not None

    def start_layer_wise_loading(self) -> int:
        """See `UnifiedCacheLinker`."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = int(self.layer_done_counter.update_producer())
        ready = self._events()
        self._restoring.do(lambda: self._restore(index, loads, ready))
        return index

    def _restore(self, index: int, loads: list[_Load], ready: list[Any]) -> None:
        try:
            if not all(load.whole for load in loads):
                raise PageGone("a page went between lookup and load on this rank")
            with self._on_stream():
                self._wait(ready)
                for layer in range(self._pool.layers):
                    for load in loads:
                        self._pool.restore(layer, load.slots, load.pages)
                    self.layer_done_counter.complete(index, layer)
            for load in loads:
                self._kept.update(zip(load.pages.tolist(), (page.key for page in load.held), strict=True))
            self._counts.add("restored", sum(len(load.slots) for load in loads))
        except Exception as e:
            log.exception("restoring KV pages failed")
            self.layer_done_counter.fail(index, e)
        finally:
            for load in loads:
                self._store.unpin(load.held)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """See `UnifiedCacheLinker`."""
        return bool(self.layer_done_counter.finish(counter_index))

    # --- storing ----------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """See `UnifiedCacheLinker`. Refused when weights have just changed; fails when the store is full of pages in
        use (ranks, which must agree on refusals, may differ there)."""
        given = _of_pool(transfers)
        keys = self._keys(given.keys) if given is not None else None
        if given is None or not keys:
            return False
        if self._resting:  # it serves again
            self._resting, self._held_until = False, 0.0
        self._make_room(len(keys))
        taken = self._store.reserve(keys)
        if taken is None:
            self._counts.add("not_stored", len(keys))
            self._saving.do(lambda: self._offloaded.put(False))
            return True
        ready = self._events()
        indices = given.device_indices
        self._saving.do(lambda: self._save(keys, indices, taken, ready))
        return True

    def _make_room(self, count: int) -> None:
        """Where slots are short, pages go that the engine's pool has not any more.

        Those it has are of requests that run now, or of prefixes in use: another engine may ask for them, and SGLang
        offers no page twice. So a store as large as the pool has all of what runs.
        """
        short = self._store.short(count)
        if not short:
            return
        free = set(self._allocator.get_all_free_pages().tolist())
        self._kept = {page: key for page, key in list(self._kept.items()) if page not in free}
        self._store.use(self._kept.values())
        self._store.evict(max(short, self._store.slots // _SHARE))

    def _save(self, keys: list[Key], indices: torch.Tensor, taken: list[tuple[int, Page]], ready: list[Any]) -> None:
        mine = [page for _, page in taken]
        try:
            with self._on_stream():
                self._wait(ready)
                pages = self._pool.locate(indices)
                self._pool.save(pages[[i for i, _ in taken]], [page.slot for page in mine])
            self._kept.update(zip(pages.tolist(), keys, strict=True))
            self._store.publish(mine)
            self._counts.add("stored", len(mine))
            self._offloaded.put(True)
        except Exception:
            log.exception("storing KV pages failed")
            self._store.abandon(mine)
            self._offloaded.put(False)

    def num_completed_offloads(self) -> int:
        """See `UnifiedCacheLinker`."""
        return self._offloaded.qsize()

    def pop_completed_offload(self) -> bool:
        """See `UnifiedCacheLinker`."""
        return self._offloaded.get_nowait()

    def _events(self) -> list[Any]:
        return self.record_offload_ready() if self._stream is not None else []

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _wait(self, ready: list[Any]) -> None:
        if self._stream is not None:
            for event in ready:
                self._stream.wait_event(event)

    def settle(self, seconds: float) -> bool:
        """Wait until what was offloaded so far is stored; False when `seconds` were not enough."""
        return self._saving.settle(seconds)

    # --- flushes and the end ----------------------------------------------------------------------------------------

    def hold(self, seconds: float) -> None:
        """Keep pages over a flush for `seconds`."""
        self._held_until = time.monotonic() + seconds

    def tick(self) -> None:
        """Time has passed: end a hold that is over."""
        if self._held_until and time.monotonic() >= self._held_until:
            self._held_until = 0.0
            self._counts.add("dropped", self._store.drop())

    def reset(self) -> None:
        """The engine's cache was flushed. See `UnifiedCacheLinker`."""
        self._quiesce()
        self._flushed = self._label
        self._resting = time.monotonic() < self._held_until
        self._counts.add("dropped", self._store.drop(keep=self._flushed if self._resting else None))

    def _quiesce(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._saving.settle()
        self._restoring.settle()
        self.layer_done_counter.reset()
        while not self._offloaded.empty():
            self._offloaded.get_nowait()
        self._kept.clear()

    def close(self) -> None:
        """See `UnifiedCacheLinker`."""
        self._quiesce()
        self._service.close()
        self._saving.close()
        self._restoring.close()
        self._store.close()


def _of_pool(transfers: list[PoolTransfer]) -> PoolTransfer | None:
    return next((t for t in transfers if t.name == PoolName.KV and t.keys), None)
