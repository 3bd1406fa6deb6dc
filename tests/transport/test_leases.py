"""Who reads from whom: as a table, and over random events."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_transport.descriptor import Descriptor, Owner, Shared
from gyre_transport.leases import (
    LONGEST,
    PATIENCE,
    Ask,
    Done,
    Leases,
    Map,
    Moved,
    Offer,
    Ok,
    Read,
    Reply,
    Request,
    Wait,
)


def copy_of(name: str) -> Descriptor:
    owner = Owner(host=name, pid=1, start=1, control=1)
    return Descriptor(owner=owner, key=name.encode(), slot=0, location=Shared(fd=1), nbytes=1)


class Source:
    """Leases whose clock is told."""

    def __init__(self, fan_out: int = 2, most: int = 64) -> None:
        self.leases = Leases(fan_out=fan_out, most=most)
        self.now = 0.0

    def ask(
        self, reader: str, host: str = "", *, seconds: float = 100.0, shares: bool = True, failed: str = ""
    ) -> Reply:
        ask = Ask(host=host or reader, seconds=seconds, shares=shares, failed=failed.encode())
        return self.leases.handle(reader, ask, self.now)

    def offer(self, reader: str, host: str = "") -> None:
        offer = Offer(host=host or reader, descriptor=copy_of(reader))
        assert self.leases.handle(reader, offer, self.now) == Ok()

    def done(self, reader: str) -> None:
        assert self.leases.handle(reader, Done(), self.now) == Ok()

    @property
    def held(self) -> int:
        return self.leases.on_source(self.now)


SOURCE = Read(descriptor=None)
WAIT = Wait(seconds=0.02)


def test_readers_of_one_machine_share_one_copy():
    source = Source()
    assert source.ask("a", "h") == SOURCE
    assert source.ask("b", "h") == WAIT  # a is fetching it
    source.offer("a", "h")
    assert source.ask("b", "h") == Map(descriptor=copy_of("a"))
    assert source.held == 0


def test_when_the_reader_that_fetches_dies_the_next_one_does():
    source = Source()
    source.ask("a", "h")
    assert source.ask("b", "h") == WAIT
    source.leases.gone("a")
    assert source.ask("b", "h") == SOURCE


def test_copies_multiply():
    source = Source(fan_out=1)
    assert source.ask("a") == SOURCE
    assert source.ask("b") == WAIT
    source.offer("a")
    assert [source.ask(r) for r in "bcd"] == [Read(descriptor=copy_of("a")), SOURCE, WAIT]
    source.offer("b")
    assert [source.ask(r) for r in "def"] == [Read(descriptor=copy_of("a")), Read(descriptor=copy_of("b")), WAIT]
    source.leases.gone("a")  # its process ended: nobody is sent there any more
    source.done("c")
    source.done("e")
    assert [source.ask(r) for r in "fgh"] == [Read(descriptor=copy_of("b")), SOURCE, WAIT]


def test_a_copy_that_fails_is_not_named_again_and_the_source_serves():
    source = Source(fan_out=1)
    source.ask("a")
    source.offer("a")
    assert source.ask("b") == Read(descriptor=copy_of("a"))
    assert source.ask("c") == SOURCE
    assert source.ask("b", failed="a") == SOURCE  # although it is busy
    assert source.leases.copies == 0
    assert source.held == 2


def test_who_shares_nothing_makes_nobody_wait():
    source = Source()
    assert source.ask("a", "h", shares=False) == SOURCE
    assert source.ask("b", "h") == SOURCE
    source.offer("b", "h")
    assert source.ask("c", "h", shares=False) == Read(descriptor=copy_of("b"))


def test_a_lease_ends_with_done_with_its_time_and_with_its_reader():
    source = Source(fan_out=3)
    for reader in "abc":
        assert source.ask(reader, seconds=10) == SOURCE
    source.done("a")
    source.leases.gone("b")
    assert source.held == 1
    source.now = 9.9
    assert source.held == 1
    source.now = 10
    assert source.held == 0


def test_no_lease_is_for_longer_than_allowed_or_for_less_than_no_time():
    source = Source()
    source.ask("a", seconds=1e9)
    source.ask("b", seconds=-5)
    assert source.held == 1
    source.now = LONGEST
    assert source.held == 0


def test_a_reader_that_stopped_makes_nobody_wait_for_long():
    source = Source(fan_out=1)
    source.ask("a", "h", seconds=1000)
    assert source.ask("b", "h") == source.ask("c") == WAIT
    source.now = PATIENCE
    assert source.ask("b", "h") == SOURCE
    assert source.held == 2  # but both still keep the next version back


def test_bounded_in_number():
    source = Source(fan_out=100, most=3)
    assert [source.ask(r) for r in "abcd"] == [SOURCE] * 3 + [WAIT]
    for reader in "abcd":
        source.offer(reader)
    assert source.leases.copies == 3


def test_no_lease_on_what_is_being_replaced():
    source = Source()
    source.ask("a")
    source.leases.drain()
    assert source.ask("b") == source.ask("a", failed="x") == Moved()
    assert source.held == 0  # a asked anew, so it does not read
    source.leases.drain(draining=False)
    assert source.ask("b") == SOURCE


def test_what_travels():
    for message in (Ask(host="h", seconds=1.0), Done(), Offer(host="h", descriptor=copy_of("a"))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Request) == message
    for reply in (SOURCE, Read(descriptor=copy_of("a")), Map(descriptor=copy_of("a")), WAIT, Moved(), Ok()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=Reply) == reply


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "offer", "done", "gone", "fail", "later"]), st.integers(0, 7)), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 3))
def test_over_any_events(events, fan_out):
    source, reading, copies = Source(fan_out), {}, set()
    for event, number in events:
        reader, machine = f"r{number}", f"h{number % 3}"
        if event == "later":
            source.now += 40.0  # longer than anybody waits, shorter than a lease
        elif event == "gone":
            source.leases.gone(reader)
            reading.pop(reader, None)
            copies.discard(reader)
        elif event == "done":
            source.done(reader)
            reading.pop(reader, None)
            copies.discard(reader)
        elif event == "offer" and reader in reading:
            source.offer(reader, machine)
            del reading[reader]
            copies.add(reader)
        elif event in ("ask", "fail"):
            failed = min(copies, default="") if event == "fail" else ""
            reply = source.ask(reader, machine, seconds=1e6, failed=failed)
            reading.pop(reader, None)
            copies -= {reader, failed}
            match reply:
                case Read(descriptor=None):
                    reading[reader] = None
                case Read(descriptor=holder) | Map(descriptor=holder):
                    assert holder.owner.host in copies  # a copy that is there
                    if isinstance(reply, Read):
                        reading[reader] = holder.owner.host
                case Wait():
                    assert reading or not failed  # never for nobody
                    assert reading
        assert source.held == sum(holder is None for holder in reading.values())
        assert source.leases.copies == len(copies)
