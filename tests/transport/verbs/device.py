"""What only a device can show. A module of tests for the virtual machine, or for a machine with an RDMA port."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import numpy as np
import pytest

from gyre_transport import endpoint, reads
from gyre_transport.backends.tcp import disconnect
from gyre_transport.backends.verbs.channel import kept
from gyre_transport.backends.verbs.connection import VerbsConnection
from gyre_transport.errors import StaleDescriptor, Unreachable
from gyre_transport.memory import Descriptor, read, register
from gyre_transport.run import TransportConfig

LONG = 60.0  # seconds
PATIENT = TransportConfig(rdma_patience=10.0)


@pytest.fixture(autouse=True)
def _patient(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "_config", PATIENT)


@pytest.fixture
def hold(owner) -> Iterator[Callable[[int], Descriptor]]:
    """Memory of another process."""
    held = []

    def make(nbytes: int) -> Descriptor:
        answer = owner.ask("allocate", nbytes=nbytes, seed=1)
        held.append(answer["region"])
        return msgspec.msgpack.decode(bytes.fromhex(answer["descriptor"]), type=Descriptor)

    yield make
    for region in held:
        owner.ask("close", region=region)


def connection(descriptor: Descriptor) -> closing[VerbsConnection]:
    end = time.monotonic() + LONG
    return closing(VerbsConnection(descriptor, PATIENT, end=end, adopt=lambda interrupt: None))


def test_queue_pairs_to_one_region_open_no_other_although_they_know_its_key(hold):
    with connection(hold(100)) as one, connection(hold(100)) as other:
        one.address, one.rkey = other.address, other.rkey
        one.touch(0)
        with pytest.raises(StaleDescriptor, match="ibv_wc_status 10"):
            one.ended(time.monotonic() + LONG)
        other.touch(0)
        assert other.ended(time.monotonic() + LONG) == [0]


def test_a_forked_child_leaves_the_connections_of_its_parent_alone(hold):
    descriptor, into = hold(100_000), np.zeros(100_000, np.uint8)
    read(descriptor, into, deadline=LONG, via="verbs")
    ((before,),) = kept.idle.values()
    child = os.fork()
    if child == 0:
        disconnect()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    again = np.zeros(100_000, np.uint8)
    read(descriptor, again, deadline=LONG, via="verbs")
    ((after,),) = kept.idle.values()
    assert after is before
    assert np.array_equal(into, again)


def test_a_request_of_more_than_a_message(hold, monkeypatch):
    monkeypatch.setattr(reads, "_CHUNK", 20 << 20)
    nbytes = (20 << 20) + 1
    descriptor, whole, parts = hold(nbytes), np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    read(descriptor, whole, deadline=LONG, via="verbs")
    monkeypatch.undo()
    read(descriptor, parts, deadline=LONG, via="tcp")
    assert np.array_equal(whole, parts)


def test_what_the_device_cannot_put_on_a_gpu_is_staged(hold, gpu):
    gpu.looks, nbytes = 2, (9 << 20) + 1
    descriptor, into, host = hold(nbytes), np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    read(descriptor, gpu.tensor(into), deadline=LONG, via="verbs")
    read(descriptor, host, deadline=LONG, via="tcp")
    assert np.array_equal(into, host)
    assert (gpu.copies, gpu.under_way) == (3, 0)


def test_memory_of_a_gpu_that_the_device_cannot_read_comes_over_tcp(gpu):
    values, into = np.arange(1 << 20).astype(np.uint8), np.zeros(1 << 20, np.uint8)
    with register(gpu.tensor(values)) as region:
        with pytest.raises(Unreachable, match="declines: the network card does not reach the memory of the GPU"):
            read(region.descriptor, into, deadline=LONG, via="verbs")
        read(region.descriptor, into, deadline=LONG)
    assert np.array_equal(into, values)
