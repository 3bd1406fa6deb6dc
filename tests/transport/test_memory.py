"""Registered memory and one-sided reads, mostly from a real second process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from gyre_transport import memory, reads, transfer
from gyre_transport.backends.shm import ShmChannel
from gyre_transport.errors import DataError, DeadlineExceeded, ShapeMismatch, StaleDescriptor, Unreachable
from gyre_transport.memory import Address, Descriptor, Shared, allocate, read, read_chunks, register

KINDS = ("allocate", "allocate_shared", "register")
SIZES = (0, 1, 15, 4096, 4097, (8 << 20) - 1, (8 << 20) + 1, 64 << 20)


def decoded(answer) -> Descriptor:
    return msgspec.msgpack.decode(bytes.fromhex(answer["descriptor"]), type=Descriptor)


def pattern(nbytes: int, seed: int) -> np.ndarray:
    block = np.random.default_rng(seed).integers(0, 256, 1 << 16, dtype=np.uint8)  # as scripts/owner.py has it
    rows = np.arange(-(-nbytes // block.size), dtype=np.uint32).astype(np.uint8)
    return (block + rows[:, None]).reshape(-1)[:nbytes]


@pytest.fixture
def doomed(script):
    """An owner that the test may kill."""
    return script("owner.py")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_reads_what_another_process_holds(owner, kind, nbytes):
    answer = owner.ask(kind, nbytes=nbytes, seed=nbytes)
    descriptor = decoded(answer)
    assert isinstance(descriptor.location, Shared if kind == "allocate_shared" else Address)
    into = np.zeros(nbytes, np.uint8)
    read(descriptor, into, deadline=30)
    assert np.array_equal(into, pattern(nbytes, nbytes))
    owner.ask("close", region=answer["region"])


@pytest.mark.parametrize("kind", KINDS)
def test_reads_a_part(owner, kind):
    descriptor = decoded(owner.ask(kind, nbytes=10_000, seed=1))
    into = bytearray(100)
    read(descriptor, into, offset=9_900, deadline=10)
    assert bytes(into) == pattern(10_000, 1)[9_900:].tobytes()
    for offset in (9_901, -1, 10_001):
        with pytest.raises(ShapeMismatch, match="read inside it"):
            read(descriptor, into, offset=offset, deadline=10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1_000, 1 << 20, 9 << 20, 100 << 20])
def test_chunks_cover_the_region_in_order(owner, kind, chunk):
    nbytes = (20 << 20) + 7 if chunk > 1_000 else 4_321
    descriptor = decoded(owner.ask(kind, nbytes=nbytes, seed=3))
    got, end = np.zeros(nbytes, np.uint8), 0
    for offset, piece in read_chunks(descriptor, chunk, 30):
        assert offset == end
        got[offset : offset + piece.nbytes] += np.frombuffer(piece, np.uint8)
        end += piece.nbytes
    assert end == nbytes
    assert np.array_equal(got, pattern(nbytes, 3))


def test_an_iteration_that_is_left_early_closes_its_files(owner):
    descriptor = decoded(owner.ask("allocate", nbytes=1 << 20, seed=3))
    before = len(os.listdir("/proc/self/fd"))
    pieces = read_chunks(descriptor, 1_000, 30)
    next(pieces)
    pieces.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_region_is_stale(owner, kind):
    answer = owner.ask(kind, nbytes=100, seed=1)
    owner.ask("close", region=answer["region"])
    with pytest.raises(StaleDescriptor, match="deregistered"):
        read(decoded(answer), bytearray(100), deadline=10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_region_in_the_same_place_is_not_served_for_the_old_one(doomed, kind):
    keeps = doomed.ask(kind, nbytes=100, seed=0)  # keeps the control record alive
    old = doomed.ask(kind, nbytes=100, seed=1)
    doomed.ask("close", region=old["region"])
    new = doomed.ask(kind, nbytes=100, seed=2)
    assert decoded(new).slot == decoded(old).slot
    assert decoded(new).key != decoded(old).key
    into = bytearray(100)
    with pytest.raises(StaleDescriptor):
        read(decoded(old), into, deadline=10)
    assert bytes(into) == bytes(100)
    read(decoded(new), into, deadline=10)
    assert bytes(into) == pattern(100, 2).tobytes()
    read(decoded(keeps), into, deadline=10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_owner_is_stale_at_once_and_so_is_its_successor_for_the_old_descriptor(doomed, kind, script):
    old = decoded(doomed.ask(kind, nbytes=100, seed=1))
    doomed.kill()
    with pytest.raises(StaleDescriptor, match="ended"):
        read(old, bytearray(100), deadline=10)
    successor = script("owner.py")
    new = decoded(successor.ask(kind, nbytes=100, seed=1))
    with pytest.raises(StaleDescriptor):
        read(old, bytearray(100), deadline=10)
    # the successor has the pid of the dead one: told apart by its start, and by its keys
    reused = msgspec.structs.replace(old.owner, pid=new.owner.pid)
    with pytest.raises(StaleDescriptor, match="another process has its pid"):
        read(msgspec.structs.replace(old, owner=reused), bytearray(100), deadline=10)
    same_tick = msgspec.structs.replace(reused, start=new.owner.start)
    with pytest.raises(StaleDescriptor, match="deregistered"):
        read(msgspec.structs.replace(old, owner=same_tick), bytearray(100), deadline=10)


@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_that_is_dead_but_not_reaped_is_stale(doomed, kind, eventually, alive):
    descriptor = decoded(doomed.ask(kind, nbytes=100, seed=1))
    doomed.process.kill()
    eventually(lambda: not alive(doomed.pid))
    with pytest.raises(StaleDescriptor, match="ended"):
        read(descriptor, bytearray(100), deadline=10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_region_that_goes_during_the_read_is_stale(doomed, kind, end, monkeypatch):
    answer = doomed.ask(kind, nbytes=1 << 20, seed=1)
    monkeypatch.setattr(reads, "_CHUNK", 1 << 18)
    monkeypatch.setattr(ShmChannel, "window", 0)
    pieces = []
    plain = ShmChannel.complete

    def complete(self):
        plain(self)
        pieces.append(1)
        if len(pieces) == 2:
            doomed.ask("close", region=answer["region"]) if end == "close" else doomed.kill()

    monkeypatch.setattr(ShmChannel, "complete", complete)
    with pytest.raises(StaleDescriptor):
        read(decoded(answer), bytearray(1 << 20), deadline=10, via="shm")
    assert len(pieces) == 2


def test_a_descriptor_whose_parts_were_forged_is_refused(owner):
    descriptor = decoded(owner.ask("allocate_shared", nbytes=100, seed=1))
    here = msgspec.structs.replace(descriptor, endpoint=None)
    other = decoded(owner.ask("allocate", nbytes=100, seed=2))
    replace = msgspec.structs.replace
    for forged in (
        replace(descriptor, key=bytes(16)),
        replace(descriptor, key=b""),
        replace(descriptor, key=os.urandom(16)),
        replace(descriptor, slot=other.slot),
        replace(descriptor, slot=10_000),
        replace(descriptor, location=Shared(fd=0)),  # the owner's stdin, a pipe: must not be opened
        replace(descriptor, location=Shared(fd=99_999)),
        replace(descriptor, owner=replace(descriptor.owner, control=0)),
        replace(descriptor, owner=replace(descriptor.owner, control=99_999)),
        replace(descriptor, nbytes=200),
        replace(descriptor, location=Address(address=4096)),
    ):
        with pytest.raises(StaleDescriptor):
            read(forged, bytearray(forged.nbytes), deadline=10)
    with pytest.raises(Unreachable, match="another machine"):
        read(replace(here, owner=replace(descriptor.owner, host="elsewhere")), bytearray(100), deadline=10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_refuses_leaves_tcp_or_an_error_that_names_the_remedy(doomed, script, kind):
    answer = doomed.ask(kind, nbytes=100, seed=1)
    reader = script("owner.py")
    if os.geteuid() == 0:
        reader.ask("drop_privileges")
    else:
        doomed.ask("undumpable")
    assert reader.ask("read", descriptor=answer["descriptor"]) is None  # over tcp instead
    only_here = msgspec.structs.replace(decoded(answer), endpoint=None)
    error, message = reader.ask("read", descriptor=msgspec.msgpack.encode(only_here).hex())
    assert error == "Unreachable"
    assert "CAP_SYS_PTRACE" in message
    assert "tcp: " in message


@pytest.mark.parametrize("kind", KINDS)
def test_no_time_left_is_an_error(owner, kind):
    descriptor = decoded(owner.ask(kind, nbytes=100, seed=1))
    with pytest.raises(DeadlineExceeded, match="0 of 100 bytes"):
        read(descriptor, bytearray(100), deadline=0)
    with pytest.raises(DataError):  # caught with the other errors of the data plane
        next(read_chunks(descriptor, 10, -1))


def test_a_deadline_that_passes_during_the_read(owner, monkeypatch):
    descriptor = decoded(owner.ask("allocate", nbytes=1 << 20, seed=1))
    monkeypatch.setattr(reads, "_CHUNK", 1 << 18)
    monkeypatch.setattr(ShmChannel, "window", 0)
    now, plain = [0.0], ShmChannel.complete

    def complete(self):
        plain(self)
        now[0] += 5.5

    monkeypatch.setattr(ShmChannel, "complete", complete)
    monkeypatch.setattr(transfer.time, "monotonic", lambda: now[0])
    with pytest.raises(DeadlineExceeded, match=f"{1 << 19:,} of {1 << 20:,} bytes"):
        read(descriptor, bytearray(1 << 20), deadline=10)


def test_destination_must_match(owner):
    floats = decoded(owner.ask("register_floats", count=10))
    assert (floats.dtype, floats.shape) == ("F32", (5, 2))
    into = np.zeros((5, 2), np.float32)
    read(floats, into, deadline=10)
    assert into.ravel().tolist() == list(range(10))
    read(floats, bytearray(40), deadline=10)
    read(floats, np.zeros(40, np.uint8), deadline=10)
    read(floats, np.zeros(3, np.float32), offset=8, deadline=10)
    for wrong in (
        np.zeros((2, 5), np.float32),
        np.zeros(10, np.float32),
        np.zeros((5, 2), np.int32),
        np.zeros((5, 1), np.float64),
        np.zeros(11, np.float32),
        bytearray(39),
        bytearray(41),
        bytes(40),
        [0.0] * 10,
        np.zeros((2, 5), np.float32).T,
        np.zeros((5, 4), np.float32)[:, ::2],
        np.zeros((5, 2), ">f4"),
    ):
        with pytest.raises(ShapeMismatch):
            read(floats, wrong, deadline=10)
    with pytest.raises(ShapeMismatch, match="F32"):
        read(floats, np.zeros(3, np.int32), offset=8, deadline=10)
    with pytest.raises(ShapeMismatch):
        next(read_chunks(floats, 0, 10))
    into.flags.writeable = False
    with pytest.raises(ShapeMismatch, match="read-only ndarray; pass an array of your own"):
        read(floats, into, deadline=10)
    with pytest.raises(ShapeMismatch, match=r"got an array of '>f4'; convert it first"):
        read(floats, np.zeros((5, 2), ">f4"), deadline=10)


def test_a_way_that_is_none():
    with register(bytearray(8)) as region, pytest.raises(DataError, match="shm, verbs, tcp, mooncake, got 'rdma'"):
        read(region.descriptor, bytearray(8), deadline=10, via="rdma")


def test_what_is_not_contiguous_cannot_be_registered():
    square = np.arange(16.0).reshape(4, 4)
    for wrong in (square.T, square[:, 1:], square[::2], memoryview(bytearray(8))[::2], 5, "text", [1, 2]):
        with pytest.raises(ShapeMismatch):
            register(wrong)
    with pytest.raises(ShapeMismatch):
        register(np.array([object()]))


def test_registered_memory_is_the_memory_itself_and_lives_as_long_as_the_region():
    array = np.zeros(1_000, np.int64)
    with register(array) as region:
        array[7] = 42
        into = np.empty(1_000, np.int64)
        read(region.descriptor, into, deadline=10)
        assert into[7] == 42
        assert region.buffer.nbytes == region.nbytes == 8_000
    with register(bytearray(b"kept")) as region:
        into = bytearray(4)
        read(region.descriptor, into, deadline=10)
        assert into == b"kept"


def test_torch_tensors_are_registered_and_read_into_without_a_copy():
    torch = pytest.importorskip("torch")
    source = torch.arange(10, dtype=torch.bfloat16).reshape(5, 2)
    into = torch.zeros(5, 2, dtype=torch.bfloat16)
    with register(source) as region:
        assert (region.descriptor.dtype, region.descriptor.shape) == ("BF16", (5, 2))
        assert region.descriptor.location == Address(address=source.data_ptr())
        source += 1
        read(region.descriptor, into, deadline=10)
        assert torch.equal(into, source)
        with pytest.raises(ShapeMismatch):
            read(region.descriptor, torch.zeros(5, 2, dtype=torch.float16), deadline=10)
        with pytest.raises(ShapeMismatch):
            read(region.descriptor, into.reshape(2, 5), deadline=10)
    with pytest.raises(ShapeMismatch, match="C-contiguous"):
        register(source.t())
    with pytest.raises(ShapeMismatch, match="host memory"):
        register(torch.zeros(2, device="meta"))
    scalar = torch.tensor(2.5)
    with register(scalar) as region, register(torch.zeros(0)) as empty:
        assert region.descriptor.shape == ()
        read(region.descriptor, into_scalar := torch.tensor(0.0), deadline=10)
        assert into_scalar == scalar
        read(empty.descriptor, torch.zeros(0), deadline=10)


def test_a_region_keeps_its_memory_alive():
    torch = pytest.importorskip("torch")
    with register(torch.full((1 << 16,), 7.0)) as region:
        into = torch.zeros(1 << 16)
        read(region.descriptor, into, deadline=10)
        assert (into == 7).all()


def test_region_arrays():
    with allocate(64) as region:
        region.array(np.int32, (4, 4))[:] = 5
        assert region.array().nbytes == 64
        assert region.array(np.float64).shape == (8,)
        assert region.array(np.int32, (2, 2)).tolist() == [[5, 5], [5, 5]]
        with pytest.raises(ShapeMismatch):
            region.array(np.int32, (17,))
        kept = region.array(np.int32)
    assert kept[0] == 5  # an array outlives the region's registration, as memory of its own
    with pytest.raises(DataError, match="closed"):
        region.array()
    with pytest.raises(DataError, match="closed"):
        _ = region.descriptor
    region.close()


def test_revoke_and_renew():
    with allocate(8) as region:
        first = region.descriptor
        region.revoke()
        with pytest.raises(StaleDescriptor):
            read(first, bytearray(8), deadline=10)
        with pytest.raises(DataError, match="renew"):
            _ = region.descriptor
        second = region.renew()
        read(second, bytearray(8), deadline=10)
        third = region.renew()
        with pytest.raises(StaleDescriptor):
            read(second, bytearray(8), deadline=10)
        read(third, bytearray(8), deadline=10)
    with pytest.raises(DataError, match="closed"):
        region.renew()


def test_a_region_that_is_dropped_is_revoked():
    region = allocate(8)
    descriptor = region.descriptor
    del region
    with pytest.raises(StaleDescriptor):
        read(descriptor, bytearray(8), deadline=10)


@pytest.mark.parametrize("nbytes", [-1, 1 << 62])
def test_impossible_sizes(nbytes):
    with pytest.raises(DataError):
        allocate(nbytes)


def test_many_regions_and_threads():
    def use(seed: int) -> None:
        for i in range(50):
            with allocate(1_000) as region:
                region.array()[:] = pattern(1_000, seed + i)
                read(region.descriptor, into := np.empty(1_000, np.uint8), deadline=10)
                assert np.array_equal(into, pattern(1_000, seed + i))

    failed: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            use(seed)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(1_000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_forked_child_cannot_take_its_parents_keys_away():
    code = """
import os
from gyre_transport.memory import allocate, read
from gyre_transport.errors import DataError
region = allocate(8)
child = os.fork()
if child == 0:
    region.revoke()
    try:
        region.renew()
        os._exit(1)
    except DataError:
        pass
    region.close()
    with allocate(8) as own:
        read(own.descriptor, bytearray(8), deadline=10)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
read(region.descriptor, bytearray(8), deadline=10)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_memory_is_private_where_readers_may_reach_it_and_shared_where_not(monkeypatch):
    monkeypatch.setattr(memory, "allow_reads", lambda: False)
    with allocate(8) as region:
        assert isinstance(region.descriptor.location, Shared)
        read(region.descriptor, bytearray(8), deadline=10)
    monkeypatch.setattr(memory, "allow_reads", lambda: True)
    with allocate(8) as region:
        assert isinstance(region.descriptor.location, Address)
        read(region.descriptor, bytearray(8), deadline=10)
