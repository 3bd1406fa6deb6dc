"""A bounded store of KV pages in registered memory: which page lies in which slot, and which may not go yet.

    absent ──reserve──▶ written by its one writer ──publish──▶ present ──evicted, dropped──▶ absent
                             └──abandon──▶ absent

Only present pages are found, so whoever reads a page reads it after its last write. A pinned page (it is loaded, leased
to a reader, or being written) keeps its slot; dropped, it is not found any more, and its slot is free once the last pin
is gone. When slots are short, the page that was used longest ago goes; of one sequence the last page goes first, since
a page is of no use without those before it.

Keys are (weight version, chained token hash); everything else a page depends on is the same for the whole store (see
`protocol.Layout`). One lock: the engine's scheduler, its copying threads and its service all come here, briefly.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_transport.descriptor import Content, Descriptor, Shared
from gyre_transport.errors import DataError
from gyre_transport.memory import allocate

Key = tuple[str, bytes]

_DONTNEED, _REMOVE = 4, 9  # madvise: give pages back, of private and of shared memory


@dataclass(slots=True, eq=False)
class Page:
    """A page's place; whoever has pinned it may use `slot`."""

    key: Key
    slot: int
    present: bool = False
    pins: int = 0
    dropped: bool = False


@dataclass(slots=True, frozen=True)
class Lease:
    """Pages pinned for a reader elsewhere."""

    number: int
    pages: list[Page]
    until: float


class PageStore:
    """`slots` pages of `page_nbytes` in one region. Times are of one clock, the caller's."""

    def __init__(self, slots: int, page_nbytes: int, content: Content | None = None) -> None:
        if slots < 1 or page_nbytes < 1:
            raise DataError(
                f"a store needs room for at least one page of at least one byte, got {slots!r} of {page_nbytes!r} "
                "bytes; raise kv.store_bytes"
            )
        self.slots = slots
        self.page_nbytes = page_nbytes
        self.evicted = 0
        self._region = allocate(slots * page_nbytes, content=content)
        self._lock = threading.Lock()
        self._pages: OrderedDict[Key, Page] = OrderedDict()  # used longest ago first
        self._free: list[int] = []
        self._fresh = 0  # slots from here on were not used yet: their memory is not taken
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count(1)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All slots, [slots, page_nbytes]."""
        return self._region.array(np.uint8, (self.slots, self.page_nbytes))

    @property
    def descriptor(self) -> Descriptor:
        """What a reader of leased slots needs."""
        return self._region.descriptor

    @property
    def taken(self) -> int:
        """Slots that hold a page, or wait for a pin to go."""
        with self._lock:
            return self._fresh - len(self._free)

    def close(self) -> None:
        """Take the memory away: whoever still reads gets an error."""
        self._region.close()

    # --- reading ----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[Key]) -> int:
        """How many of `keys`, from the first on, are present; they count as used."""
        with self._lock:
            return len(self._present(keys))

    def pin(self, keys: Sequence[Key]) -> list[Page] | None:
        """Keep the pages where they are until `unpin`; None when one is absent."""
        with self._lock:
            pages = self._present(keys)
            if len(pages) < len(keys):
                return None
            for page in pages:
                page.pins += 1
            return pages

    def unpin(self, pages: Iterable[Page]) -> None:
        """End a `pin`."""
        with self._lock:
            self._unpin(pages)

    def _present(self, keys: Sequence[Key]) -> list[Page]:
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None or not page.present:
                break
            found.append(page)
        for page in reversed(found):
            self._pages.move_to_end(page.key)
        return found

    def _unpin(self, pages: Iterable[Page]) -> None:
        for page in pages:
            page.pins -= 1
            if page.dropped and not page.pins:
                self._free.append(page.slot)
        self._shrink()

    # --- writing ----------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[Key]) -> list[tuple[int, Page]] | None:
        """Pages for those of `keys` that are absent and nobody writes: (index into `keys`, pinned page) for each.

        None when slots are short. The caller writes the slots, then publishes or abandons the pages.
        """
        with self._lock:
            known = [page for key in keys if (page := self._pages.get(key)) is not None]
            for page in reversed(known):
                self._pages.move_to_end(page.key)
            wanted = [i for i, key in enumerate(keys) if key not in self._pages]
            slots = self._take(len(wanted), len(known))
            if slots is None:
                return None
            taken = [(i, Page(keys[i], slot, pins=1)) for i, slot in zip(wanted, slots, strict=True)]
            for _, page in reversed(taken):
                self._pages[page.key] = page
            return taken

    def publish(self, pages: Iterable[Page]) -> None:
        """The slots are written, for good."""
        with self._lock:
            pages = list(pages)
            for page in pages:
                page.present = True
            self._unpin(pages)

    def abandon(self, pages: Iterable[Page]) -> None:
        """They will not be written."""
        with self._lock:
            pages = list(pages)
            self._drop(page for page in pages if not page.dropped)
            self._unpin(pages)

    def _take(self, count: int, spared: int) -> list[int] | None:
        """`count` slots, evicting what was used longest ago; the `spared` pages used last stay."""
        short = count - len(self._free) - (self.slots - self._fresh)
        if short > 0:
            old = itertools.islice(self._pages.values(), len(self._pages) - spared)
            going = list(itertools.islice((p for p in old if not p.pins), short))
            if len(going) < short:
                return None
            self._drop(going)
            self.evicted += len(going)
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = range(self._fresh, self._fresh + count - len(slots))
        self._fresh += len(fresh)
        return [*slots, *fresh]

    # --- room -------------------------------------------------------------------------------------------------------

    def short(self, count: int) -> int:
        """Pages that would have to go for `count` new ones."""
        with self._lock:
            return max(0, count - len(self._free) - (self.slots - self._fresh))

    def use(self, keys: Iterable[Key]) -> None:
        """Count pages as used, as `find` does; those that are absent are passed over."""
        with self._lock:
            for key in keys:
                if key in self._pages:
                    self._pages.move_to_end(key)

    def evict(self, count: int) -> int:
        """Let up to `count` pages go, those used longest ago; returns how many went."""
        with self._lock:
            going = list(itertools.islice((p for p in self._pages.values() if not p.pins), count))
            self._drop(going)
            self.evicted += len(going)
            return len(going)

    # --- leases -----------------------------------------------------------------------------------------------------

    def lease(self, keys: Sequence[Key], until: float) -> Lease | None:
        """Pin those of `keys` that are present, from the first on, until `release` or `until`; None if none is."""
        with self._lock:
            pages = self._present(keys)
            if not pages:
                return None
            for page in pages:
                page.pins += 1
            lease = Lease(next(self._numbers), pages, until)
            self._leases[lease.number] = lease
            return lease

    def release(self, number: int) -> bool:
        """End a lease; False when it was over."""
        with self._lock:
            return self._release(number)

    def expire(self, now: float) -> int:
        """End the leases whose time is over; returns how many."""
        with self._lock:
            over = [lease.number for lease in self._leases.values() if lease.until <= now]
            return sum(self._release(number) for number in over)

    def _release(self, number: int) -> bool:
        lease = self._leases.pop(number, None)
        if lease is not None:
            self._unpin(lease.pages)
        return lease is not None

    # --- dropping ---------------------------------------------------------------------------------------------------

    def drop(self, *, keep: str | None = None) -> int:
        """Forget every page, or all but those of version `keep`; returns how many."""
        with self._lock:
            going = [page for page in self._pages.values() if keep is None or page.key[0] != keep]
            self._drop(going)
            self._shrink()
            return len(going)

    def _drop(self, pages: Iterable[Page]) -> None:
        for page in pages:
            del self._pages[page.key]
            page.dropped = True
            if not page.pins:
                self._free.append(page.slot)

    def _shrink(self) -> None:
        """Once no slot is taken, give the memory back to the system."""
        if self._fresh and self._fresh == len(self._free):
            shared = isinstance(self._region.descriptor.location, Shared)
            address = ctypes.c_void_p(self.memory.ctypes.data)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise(address, ctypes.c_size_t(self._region.nbytes), _REMOVE if shared else _DONTNEED)
            self._free.clear()
            self._fresh = 0
