"""The store of KV pages: what is found, what may go, and when a slot is used again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from gyre_transport.errors import DataError
from gyre_transport.kv.store import Key, Page, PageStore

SIZE = 64


def keys(*numbers: int, version: str = "1") -> list[Key]:
    return [(version, number.to_bytes(32, "big")) for number in numbers]


@pytest.fixture
def store() -> Iterator[PageStore]:
    store = PageStore(4, SIZE)
    yield store
    store.close()


def put(store: PageStore, wanted: list[Key]) -> list[Page]:
    """Write and publish what is absent of `wanted`; every page holds its key's last byte."""
    taken = store.reserve(wanted)
    assert taken is not None
    for _, page in taken:
        store.memory[page.slot] = page.key[1][-1]
    store.publish(page for _, page in taken)
    return [page for _, page in taken]


def test_a_page_is_found_once_it_is_written(store):
    taken = store.reserve(keys(1, 2))
    assert [i for i, _ in taken] == [0, 1]
    assert store.find(keys(1, 2)) == 0
    assert store.pin(keys(1)) is None
    assert store.reserve(keys(1, 2, 3))[0][0] == 2, "nobody else writes what is being written"
    store.publish([taken[0][1]])
    assert store.find(keys(1, 2)) == 1
    store.abandon([taken[1][1]])
    assert [i for i, _ in store.reserve(keys(1, 2))] == [1], "what was abandoned may be written again"


def test_only_a_prefix_is_of_use(store):
    put(store, keys(1, 3))
    assert store.find(keys(1, 2, 3)) == 1
    assert store.find(keys(2, 3)) == 0


def test_pages_of_other_weights_are_other_pages(store):
    """Fails when the version leaves the key."""
    put(store, keys(1, 2, version="1"))
    assert store.find(keys(1, 2, version="2")) == 0
    assert store.pin(keys(1, version="2")) is None
    assert store.lease(keys(1, version="2"), 10.0) is None
    put(store, keys(1, version="2"))
    assert store.find(keys(1, 2, version="1")) == 2, "both are kept"


def test_the_page_used_longest_ago_goes_and_of_a_sequence_the_last(store):
    put(store, keys(1, 2))
    put(store, keys(5, 6))
    assert store.find(keys(1, 2)) == 2  # used again
    put(store, keys(9))
    assert store.evicted == 1
    assert store.find(keys(6)) == 0
    assert store.find(keys(1, 2)) == 2
    put(store, keys(10))
    assert store.find(keys(5)) == 0
    assert store.find(keys(1, 2, 9)) == 3


def test_a_pinned_page_stays(store):
    put(store, keys(1, 2, 3))
    pinned = store.pin(keys(1, 2))
    assert store.reserve(keys(7, 8, 9)) is None, "one slot is free and one page may go"
    assert store.find(keys(1, 2, 3)) == 3, "nothing went for a reservation that failed"
    put(store, keys(7, 8))
    assert store.find(keys(1, 2, 3)) == 2
    store.unpin(pinned)
    put(store, keys(11, 12, 13, 14))
    assert store.find(keys(1)) == 0


def test_known_pages_are_not_evicted_for_their_successors(store):
    put(store, keys(1, 2, 3))
    put(store, keys(8))
    put(store, keys(1, 2, 3, 4))
    assert store.find(keys(1, 2, 3, 4)) == 4


def test_a_lease_pins_until_it_is_released_or_over(store):
    put(store, keys(1, 2))
    first = store.lease(keys(1, 2, 3), until=10.0)
    second = store.lease(keys(1), until=20.0)
    assert [page.key for page in first.pages] == keys(1, 2)
    assert store.reserve(keys(4, 5, 6)) is None
    assert store.release(first.number)
    assert not store.release(first.number), "said again"
    assert store.expire(19.9) == 0
    assert store.expire(20.0) == 1
    assert not store.release(second.number)
    put(store, keys(4, 5, 6, 7))


def test_a_dropped_page_keeps_its_slot_as_long_as_it_is_read(store):
    put(store, keys(1, 2))
    lease = store.lease(keys(1), until=10.0)
    assert store.drop() == 2
    assert store.find(keys(1)) == 0
    put(store, keys(4, 5, 6))
    assert store.memory[lease.pages[0].slot][0] == 1, "its bytes are still there"
    assert store.reserve(keys(7, 8, 9, 10)) is None
    store.release(lease.number)
    put(store, keys(7, 8, 9, 10))


def test_a_drop_in_the_middle_of_a_write_is_no_page_later(store):
    ((_, page),) = store.reserve(keys(1))
    store.drop()
    store.publish([page])
    assert store.find(keys(1)) == 0
    assert store.taken == 0


def test_new_weights_drop_the_pages_of_old_ones(store):
    put(store, keys(1, version="1"))
    put(store, keys(1, version="2"))
    assert store.drop(keep="2") == 1
    assert store.find(keys(1, version="1")) == 0
    assert store.find(keys(1, version="2")) == 1


def test_room_is_made_of_what_is_not_in_use(store):
    put(store, keys(1, 2))
    put(store, keys(5, 6))
    assert store.short(0) == 0
    assert store.short(3) == 3
    store.use([*keys(2, 1), *keys(99)])
    assert store.evict(2) == 2
    assert store.find(keys(1, 2)) == 2
    assert store.find(keys(5)) == 0
    assert store.short(2) == 0
    pinned = store.pin(keys(1, 2))
    assert store.evict(5) == 0, "not what is pinned"
    store.unpin(pinned)
    assert store.evict(5) == 2


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.parametrize("how", ["drop", "last pin"])
def test_an_empty_store_gives_its_memory_back(how):
    page = 1 << 20
    store = PageStore(64, page)
    begin = _resident()
    taken = store.reserve(keys(*range(64)))
    store.memory[:] = 1
    store.publish(p for _, p in taken)
    assert _resident() - begin > 60 * page
    lease = store.lease(keys(0), until=1.0) if how == "last pin" else None
    store.drop()
    if lease is not None:
        assert _resident() - begin > 60 * page
        store.release(lease.number)
    assert _resident() - begin < 8 * page
    store.close()


def test_a_store_without_room_for_a_page_says_what_to_raise():
    with pytest.raises(DataError, match="store_bytes"):
        PageStore(0, SIZE)


def test_random_use_never_shows_a_page_with_other_bytes():
    dice = random.Random(5)
    store = PageStore(12, SIZE)
    held: list[list[Page]] = []
    writing: list[Page] = []
    for step in range(4000):
        length, base = dice.randint(1, 5), dice.randint(0, 30)
        wanted = keys(*range(base, base + length), version=str(dice.randint(1, 2)))
        match dice.randint(0, 7):
            case 0 | 1:
                for _, page in store.reserve(wanted) or ():
                    store.memory[page.slot] = (hash(page.key)) % 251
                    writing.append(page)
            case 2 if writing:
                store.publish([writing.pop(dice.randrange(len(writing)))])
            case 3 if writing:
                store.abandon([writing.pop(dice.randrange(len(writing)))])
            case 4 if (pages := store.pin(wanted)) is not None:
                held.append(pages)
            case 5 if held:
                store.unpin(held.pop(dice.randrange(len(held))))
            case 6 if dice.random() < 0.05:
                store.drop(keep=dice.choice([None, "1"]))
            case 7 if (lease := store.lease(wanted, until=step + 20.0)) is not None:
                for page in lease.pages:
                    assert (store.memory[page.slot] == hash(page.key) % 251).all()
        store.expire(float(step))
        for pages in held:
            for page in pages:
                assert (store.memory[page.slot] == hash(page.key) % 251).all()
    for pages in held:
        store.unpin(pages)
    store.abandon(writing)
    store.expire(1e9)
    store.drop()
    assert store.taken == 0, "no slot is lost"
    assert np.all(store.memory == 0)
    store.close()
