"""Notices: the owner learns that a reader has everything."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from gyre_transport import endpoint, transfer
from gyre_transport.backends.shm import ShmChannel
from gyre_transport.backends.tcp import TcpChannel
from gyre_transport.errors import DataError, DeadlineExceeded, StaleDescriptor, Unreachable
from gyre_transport.memory import Descriptor, Part, allocate, read, read_many, register
from gyre_transport.notices import MAX_PAYLOAD, Notices
from gyre_transport.run import TransportConfig

LONG = 60.0


@pytest.fixture(params=["shm", "tcp"])
def via(request) -> str:
    return request.param


@pytest.fixture
def pages():
    """Two regions whose readers say so when they are done."""
    notices = Notices(most=3)
    with register(np.arange(1_000), calls=notices) as one, allocate(5_000_000, calls=notices) as two:
        yield SimpleNamespace(notices=notices, one=one, two=two)


def test_the_owner_is_told_when_the_bytes_are_there(pages, via):
    into = np.zeros(1_000, int)
    read(pages.one.descriptor, into, deadline=LONG, via=via, notify=b"page 7")
    assert into[999] == 999
    assert pages.notices.take(0) == b"page 7"
    read(pages.one.descriptor, into, deadline=LONG, via=via)  # says nothing
    assert len(pages.notices) == 0


def test_notices_of_another_process(owner, via):
    answer = owner.ask("allocate", nbytes=100, seed=1, notices=True)
    descriptor = msgspec.msgpack.decode(bytes.fromhex(answer["descriptor"]), type=Descriptor)
    for payload in (b"", b"one", bytes(MAX_PAYLOAD)):
        read(descriptor, bytearray(100), deadline=LONG, via=via, notify=payload)
        assert owner.ask("notice", region=answer["region"]) == payload.hex()
    owner.ask("close", region=answer["region"])
    with pytest.raises(StaleDescriptor):
        read(descriptor, bytearray(100), deadline=LONG, via=via, notify=b"late")


def test_one_notice_a_region_however_many_parts_and_workers(pages, via):
    parts = [Part(pages.two.descriptor, bytearray(1_000_000), n * 1_000_000) for n in range(5)]
    parts.append(Part(pages.one.descriptor, np.zeros(1_000, int)))
    moved = read_many(parts, deadline=LONG, workers=3, via=via, notify=b"all")
    moved.wait()
    assert moved.valid
    assert [pages.notices.take(0) for _ in range(2)] == [b"all", b"all"]
    assert len(pages.notices) == 0


def test_a_read_that_fails_tells_nobody(pages, via, monkeypatch):
    channel = {"shm": ShmChannel, "tcp": TcpChannel}[via]
    plain = channel.complete

    def complete(self) -> None:
        plain(self)
        pages.two.revoke()

    monkeypatch.setattr(channel, "complete", complete)
    parts = [Part(pages.one.descriptor, np.zeros(1_000, int)), Part(pages.two.descriptor, bytearray(5_000_000))]
    with pytest.raises(StaleDescriptor):
        read_many(parts, deadline=LONG, workers=1, via=via, notify=b"all").wait()
    with pytest.raises(DeadlineExceeded):
        pages.notices.take(0)


def test_memory_taken_back_before_the_notice_is_an_error(pages, via, monkeypatch):
    class Late(transfer.Line):
        def __init__(self, descriptor, **options) -> None:
            pages.one.revoke()
            super().__init__(descriptor, **options)

    monkeypatch.setattr(transfer, "Line", Late)
    moved = read_many([Part(pages.one.descriptor, np.zeros(1_000, int))], deadline=LONG, via=via, notify=b"x")
    with pytest.raises(StaleDescriptor):
        moved.wait()
    assert not moved.valid


def test_more_notices_than_are_taken_are_refused(pages, via):
    for n in range(3):
        read(pages.one.descriptor, np.zeros(1_000, int), deadline=LONG, via=via, notify=bytes([n]))
    with pytest.raises(DataError, match="its log says more"):
        read(pages.one.descriptor, np.zeros(1_000, int), deadline=LONG, via=via, notify=b"!")
    assert [pages.notices.take(0) for _ in range(3)] == [b"\x00", b"\x01", b"\x02"]


def test_memory_whose_owner_takes_no_notices(via):
    with allocate(8) as region, pytest.raises(DataError, match="takes no calls"):
        read(region.descriptor, bytearray(8), deadline=LONG, via=via, notify=b"x")


def test_a_notice_that_is_too_long_stops_the_read_before_it_begins(pages, via):
    into = np.zeros(1_000, int)
    with pytest.raises(DataError, match="at most"):
        read(pages.one.descriptor, into, deadline=LONG, via=via, notify=bytes(MAX_PAYLOAD + 1))
    assert not into.any()


def test_an_owner_that_does_not_listen_cannot_be_told():
    before = endpoint.config()
    endpoint.configure(TransportConfig(listen=""))
    try:
        with allocate(8, calls=Notices()) as region, pytest.raises(Unreachable, match="does not listen"):
            read(region.descriptor, bytearray(8), deadline=LONG, notify=b"x")
    finally:
        endpoint.configure(before)
