"""Memory of a GPU: a scripted one for what can go wrong, a real one where there is one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from gyre_transport.backends.verbs.gpu import look
from gyre_transport.buffers import view
from gyre_transport.errors import DataError, DeadlineExceeded, ShapeMismatch, StaleDescriptor, Unreachable
from gyre_transport.gpu import staged
from gyre_transport.gpu.memory import KINDS, wait
from gyre_transport.gpu.ring import Ring
from gyre_transport.gpu.staged import StagedChannel
from gyre_transport.memory import Descriptor, Part, allocate, read, read_many, register

LONG = 60.0  # seconds
MIB = 1 << 20


@pytest.fixture(params=["shm", "tcp"])
def via(request) -> str:
    return request.param


@pytest.fixture
def hold(owner) -> Iterator[Callable[[int], Descriptor]]:
    """Memory of another process: `expected` of as many bytes."""
    held = []

    def make(nbytes: int) -> Descriptor:
        answer = owner.ask("allocate", nbytes=nbytes, seed=1)
        held.append(answer["region"])
        return msgspec.msgpack.decode(bytes.fromhex(answer["descriptor"]), type=Descriptor)

    yield make
    for region in held:
        owner.ask("close", region=region)


def expected(nbytes: int) -> np.ndarray:
    block = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    rows = np.arange(-(-nbytes // block.size), dtype=np.uint32).astype(np.uint8)
    return (block + rows[:, None]).reshape(-1)[:nbytes]


# --- what comes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 4 * MIB + 1, 40 * MIB + 3])
def test_every_size(hold, gpu, via, nbytes):
    gpu.looks = 3
    into = gpu.tensor(np.zeros(nbytes, np.uint8))
    read(hold(nbytes), into, deadline=LONG, via=via)
    assert np.array_equal(into.values, expected(nbytes))
    assert gpu.settled
    assert gpu.under_way == 0


def test_copies_overlap_and_pinned_memory_is_bounded(hold, gpu, via):
    gpu.looks = 3
    into = gpu.tensor(np.zeros(40 * MIB, np.uint8))
    with read_many([Part(hold(40 * MIB), into)], deadline=LONG, workers=1, via=via) as transfer:
        transfer.wait()
        assert transfer.valid
    assert np.array_equal(into.values, expected(40 * MIB))
    assert gpu.most_under_way == 2
    assert gpu.pinned_bytes == 16 * MIB


def test_parts_rows_and_memory_of_the_host_in_one_read(hold, gpu, via):
    gpu.looks = 2
    descriptor, whole = hold(300_000), expected(300_000)
    ends, rows, host = np.zeros(5_000, np.uint8), np.zeros((70, 1_000), np.uint8), np.zeros(50_000, np.uint8)
    parts = [
        Part(descriptor, gpu.tensor(ends[1_000:2_000]), 299_000),
        Part(descriptor, gpu.tensor(rows), 7, rows=70, stride=4_000),
        Part(descriptor, host, 123),
    ]
    read_many(parts, deadline=LONG, via=via).wait()
    assert np.array_equal(ends[1_000:2_000], whole[299_000:])
    assert not ends[:1_000].any()
    assert not ends[2_000:].any()
    assert np.array_equal(rows, np.stack([whole[7 + i * 4_000 :][:1_000] for i in range(70)]))
    assert np.array_equal(host, whole[123:50_123])


# --- what may go wrong -----------------------------------------------------------------------------------------------


def test_what_does_not_match_is_refused_before_anything_moves(hold, gpu):
    with pytest.raises(ShapeMismatch, match="the destination 99"):
        read(hold(100), gpu.tensor(np.zeros(99, np.uint8)), deadline=LONG)
    with pytest.raises(ShapeMismatch, match="strided"):
        read(hold(100), gpu.tensor(np.zeros((10, 20), np.uint8)[:, :10]), deadline=LONG)
    elsewhere = gpu.tensor(np.zeros(100, np.uint8))
    elsewhere.device.type = "meta"
    with pytest.raises(ShapeMismatch, match=r"one of \['cuda', 'scripted'\].*tensor\.cpu\(\)"):
        read(hold(100), elsewhere, deadline=LONG)
    assert gpu.copies == 0


def test_a_copy_that_fails(hold, gpu, via):
    gpu.fails, gpu.looks = 2, 1
    transfer = read_many([Part(hold(20 * MIB), gpu.tensor(np.zeros(20 * MIB, np.uint8)))], deadline=LONG, via=via)
    with pytest.raises(DataError, match="the GPU failed a copy"):
        transfer.wait()
    assert not transfer.valid
    assert gpu.under_way == 0


def test_memory_that_goes_in_the_middle_of_the_read(owner, gpu, via):
    """What comes after that is not copied to the GPU."""
    answer = owner.ask("allocate", nbytes=40 * MIB, seed=1)
    descriptor = msgspec.msgpack.decode(bytes.fromhex(answer["descriptor"]), type=Descriptor)
    into = np.zeros(40 * MIB, np.uint8)
    gone = []

    def close() -> None:
        if not gone:
            gone.append(True)
            owner.ask("close", region=answer["region"])

    gpu.during = close
    with pytest.raises(StaleDescriptor):
        read_many([Part(descriptor, gpu.tensor(into))], workers=1, deadline=LONG, via=via).wait()
    assert gone
    assert gpu.under_way == 0
    come = into != 0
    assert np.array_equal(into[come], expected(40 * MIB)[come])


@pytest.fixture
def no_time(monkeypatch) -> None:
    """The deadline passes while the first copy to the GPU is waited for."""
    monkeypatch.setattr(staged, "wait", lambda copy, end: wait(copy, 0.0))


@pytest.mark.usefixtures("no_time")
def test_a_copy_that_is_late_is_over_before_the_error_is_raised(hold, gpu, via, monkeypatch):
    gpu.looks = 1 << 60
    plain = StagedChannel.__exit__

    def leave(self: StagedChannel, *rest: Any) -> None:
        for copy in self._copying:
            copy.left = 3
        plain(self, *rest)

    monkeypatch.setattr(StagedChannel, "__exit__", leave)
    with pytest.raises(DeadlineExceeded, match="a copy to or from the GPU"):
        read(hold(MIB), gpu.tensor(np.zeros(MIB, np.uint8)), deadline=LONG, via=via)
    assert gpu.copies == 1
    assert gpu.under_way == 0


@pytest.mark.usefixtures("no_time")
def test_a_gpu_that_hangs_is_said_to_still_write(hold, gpu, via, monkeypatch):
    monkeypatch.setattr(staged, "_DRAIN", 0.01)
    gpu.looks = 1 << 60
    with pytest.raises(DataError, match="may still write to the destination"):
        read(hold(MIB), gpu.tensor(np.zeros(MIB, np.uint8)), deadline=LONG, via=via)


# --- what is read of it ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["host", "gpu"])
def room(request, gpu) -> Callable[[np.ndarray], Any]:
    """What is read into."""
    return gpu.tensor if request.param == "gpu" else lambda values: values


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 20 * MIB + 3])
def test_a_registered_tensor_of_every_size(gpu, room, nbytes):
    gpu.looks = 2
    into = np.zeros(nbytes, np.uint8)
    with register(gpu.tensor(expected(nbytes))) as region:
        read(region.descriptor, room(into), deadline=LONG)
    assert np.array_equal(into, expected(nbytes))
    assert gpu.under_way == 0


def test_small_parts_and_rows_of_a_registered_tensor(gpu, room):
    gpu.looks = 1
    whole = expected(3 * MIB)
    small, rows = np.zeros((500, 300), np.uint8), np.zeros((700, 1_000), np.uint8)
    with register(gpu.tensor(whole)) as region:
        parts = [Part(region.descriptor, room(s), i * 5_001) for i, s in enumerate(small)]
        parts.append(Part(region.descriptor, room(rows), 7, rows=700, stride=4_000))
        read_many(parts, deadline=LONG).wait()
    assert np.array_equal(small, np.stack([whole[i * 5_001 :][:300] for i in range(500)]))
    assert np.array_equal(rows, np.stack([whole[7 + i * 4_000 :][:1_000] for i in range(700)]))


def test_a_tensor_is_what_its_descriptor_says(gpu):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with register(gpu.tensor(values)) as region:
        assert (region.descriptor.dtype, region.descriptor.shape, region.nbytes) == ("F32", (3, 4), 48)
        with pytest.raises(ShapeMismatch, match="F32"):
            read(region.descriptor, np.zeros((3, 4), np.int32), deadline=LONG)
        with pytest.raises(Unreachable, match="on a GPU; it is read over verbs or tcp"):
            read(region.descriptor, np.zeros((3, 4), np.float32), deadline=LONG, via="shm")
        with pytest.raises(DataError, match="look at the tensor"):
            region.array()


@pytest.mark.parametrize("end", ["close", "revoke", "renew"])
def test_a_tensor_that_is_taken_back_in_the_middle_of_the_read(gpu, room, end):
    with register(gpu.tensor(expected(20 * MIB))) as region:
        descriptor = region.descriptor

        def act() -> None:
            if gpu.copies == 3:
                gpu.during = lambda: None
                getattr(region, end)()

        gpu.during = act
        with pytest.raises(StaleDescriptor):
            read(descriptor, room(np.zeros(20 * MIB, np.uint8)), deadline=LONG)


def test_a_gpu_that_fails_its_owner_ends_that_read_and_no_other(gpu):
    with register(gpu.tensor(expected(3 * MIB))) as region, allocate(1_000) as other:
        gpu.fails = 1
        with pytest.raises(StaleDescriptor):
            read(region.descriptor, np.zeros(3 * MIB, np.uint8), deadline=LONG, via="tcp")
        read(other.descriptor, np.ones(1_000, np.uint8), deadline=LONG, via="tcp")
        into = np.zeros(3 * MIB, np.uint8)
        read(region.descriptor, into, deadline=LONG, via="tcp")
    assert np.array_equal(into, expected(3 * MIB))


# --- the parts -------------------------------------------------------------------------------------------------------


def test_the_ring_gives_nothing_twice_and_always_goes_on():
    rng = random.Random(0)
    size = 1 << 20
    ring = Ring(view(bytearray(size), writable=True))
    taken: list[tuple[int, int]] = []
    for _ in range(5_000):
        nbytes = rng.choice([0, 1, 4096, rng.randrange(size), size])
        while (got := ring.take(nbytes)) is None:
            assert taken
            ring.give()
            taken.pop(0)
        memory, address = got
        assert memory.nbytes == nbytes
        assert all(address + max(nbytes, 1) <= a or a + max(n, 1) <= address for a, n in taken)
        taken.append((address, nbytes))
    with pytest.raises(DataError, match="at most 1,048,576 bytes"):
        ring.take(size + 1)


class Direct:
    """A channel whose device reaches the GPU."""

    window = MIB

    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def reaches(self, piece: Any) -> bool:
        return True

    def submit(self, piece: Any) -> None:
        self.pieces.append(piece)

    def complete(self) -> None:
        pass

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *rest: object) -> None:
        pass


def test_what_the_network_card_reaches_is_not_staged_and_the_gpu_is_told(hold, gpu, monkeypatch):
    inner, flushed = Direct(), []
    monkeypatch.setattr("gyre_transport.endpoint._open_channel", lambda *a, **k: inner)
    tensor = gpu.tensor(np.zeros(10 * MIB, np.uint8))
    made = gpu.memory(tensor)
    made.flush = lambda: flushed.append(1)
    monkeypatch.setitem(KINDS, "scripted", lambda t: made)
    read(hold(10 * MIB), tensor, deadline=LONG)
    assert [(p.offset, p.into.start, p.into.nbytes) for p in inner.pieces] == [
        (0, 0, 4 * MIB), (4 * MIB, 4 * MIB, 4 * MIB), (8 * MIB, 8 * MIB, 2 * MIB),
    ]  # fmt: skip
    assert [p.address - made.address for p in inner.pieces] == [0, 4 * MIB, 8 * MIB]
    assert gpu.copies == gpu.pinned_bytes == 0
    assert flushed == [1]


# --- a real one ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> Any:
    if not look().gpus:
        pytest.skip("no CUDA device here: reads into the memory of a GPU are not tested")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch is not built for CUDA")
    return torch


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [0, 1, 4097, 40 * MIB + 3])
def test_a_cuda_tensor(hold, cuda, via, nbytes):
    into = cuda.zeros(nbytes, dtype=cuda.uint8, device="cuda")
    read(hold(nbytes), into, deadline=LONG, via=via)
    assert np.array_equal(into.cpu().numpy(), expected(nbytes))


@pytest.mark.gpu
def test_what_is_queued_on_the_gpu_does_not_undo_a_read(hold, cuda, via):
    into = cuda.zeros(8 * MIB, dtype=cuda.uint8, device="cuda")
    busy = cuda.ones((4096, 4096), device="cuda")
    for _ in range(50):
        busy = busy @ busy * 1e-4
    into.fill_(7)
    read(hold(8 * MIB), into, deadline=LONG, via=via)
    assert np.array_equal(into.cpu().numpy(), expected(8 * MIB))


@pytest.mark.gpu
def test_a_registered_cuda_tensor(cuda):
    tensor = cuda.from_numpy(expected(40 * MIB)).cuda()
    into, beside = np.zeros(40 * MIB, np.uint8), cuda.zeros_like(tensor)
    with register(tensor) as region:
        read(region.descriptor, into, deadline=LONG)
        read(region.descriptor, beside, deadline=LONG)
    assert np.array_equal(into, expected(40 * MIB))
    assert cuda.equal(beside, tensor)
