"""The destination's side of a move: from what a source leased into the own store, or nothing.

Lookup ─▶ lease ─▶ reserve slots here ─▶ read ─▶ publish ─▶ Acknowledge
                        │ short              │ any error: abandon
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from gyre_transport.errors import DataError, DeadlineExceeded
from gyre_transport.kv.protocol import Pages
from gyre_transport.kv.store import Key, Page, PageStore
from gyre_transport.reads import Part, read_many


class NoRoom(DataError):
    """The store is full of pages that are in use."""


def fetch(store: PageStore, keys: Sequence[Key], pages: Pages, *, end: float) -> int:
    """Read the leased `pages`, which are those of the first keys, into `store`; returns how many are new there.

    end: of the lease as counted here, and of the caller's patience (time.monotonic()).
    Raises `NoRoom`, or what `read_many` raises; no page has been published then.
    """
    if pages.descriptor is None:
        return 0
    taken = store.reserve(keys[: len(pages.slots)])
    if taken is None:
        raise NoRoom(
            f"{len(pages.slots)} pages of {store.page_nbytes:,} bytes have no room in a store of {store.slots}"
        )
    mine = [page for _, page in taken]
    try:
        parts = list(_parts(store, pages, taken))
        if parts:
            read_many(parts, deadline=end - time.monotonic()).wait()
        if time.monotonic() >= end:  # the slots may have been others' while the last bytes were read
            raise DeadlineExceeded(f"{len(mine)} pages were read when the lease or the caller's time was over")
    except BaseException:
        store.abandon(mine)
        raise
    store.publish(mine)
    return len(mine)


def _parts(store: PageStore, pages: Pages, taken: list[tuple[int, Page]]) -> Iterator[Part]:
    """One part for each run of slots that are neighbours on both sides."""
    assert pages.descriptor is not None  # noqa: S101  (callers checked)
    memory, size = store.memory, store.page_nbytes
    runs: list[list[int]] = []  # source slot, own slot, length
    for index, page in taken:
        source = pages.slots[index]
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, page.slot):
            runs[-1][2] += 1
        else:
            runs.append([source, page.slot, 1])
    for source, own, length in runs:
        yield Part(pages.descriptor, memory[own : own + length], source * size)
