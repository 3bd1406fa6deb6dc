"""What every backend promises, each with real processes: the bytes that are registered now, or a typed error.

A backend joins by a line in WAYS.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from gyre_transport import endpoint, reads
from gyre_transport.backends.mooncake import engine as mooncake
from gyre_transport.backends.mooncake.channel import MooncakeChannel
from gyre_transport.backends.shm import ShmChannel
from gyre_transport.backends.tcp import TcpChannel, disconnect
from gyre_transport.backends.verbs import fabric
from gyre_transport.backends.verbs.channel import VerbsChannel
from gyre_transport.errors import (
    Cancelled,
    DeadlineExceeded,
    OtherContent,
    ShapeMismatch,
    StaleDescriptor,
    StaleVersion,
)
from gyre_transport.memory import Content, Descriptor, Part, allocate, read, read_chunks, read_many, register
from gyre_transport.run import TransportConfig
from gyre_transport.snapshot import Manifest, pull

LONG = 60.0  # seconds: an error comes long before
SIZES = (0, 1, 15, 4096, 4097, (4 << 20) - 1, (4 << 20) + 1, 64 << 20)
LARGE = int(os.environ.get("GYRE_TEST_LARGE", 48 << 20))  # bytes: more than is asked for ahead; see `_scaled`
WAYS = {
    "shm, allocated": ("shm", "allocate", ShmChannel),
    "shm, memfd": ("shm", "allocate_shared", ShmChannel),
    "shm, registered": ("shm", "register", ShmChannel),
    "tcp, allocated": ("tcp", "allocate", TcpChannel),
    "tcp, registered": ("tcp", "register", TcpChannel),
}
CHANNELS = {"shm": ShmChannel, "tcp": TcpChannel}
if fabric.ports():  # of this machine, or of the virtual one that `verbs` starts
    CHANNELS["verbs"] = VerbsChannel
    WAYS["verbs"] = "verbs", "allocate", VerbsChannel
if mooncake.installed():
    CHANNELS["mooncake"] = MooncakeChannel
    WAYS |= {f"mooncake, {k}": ("mooncake", k, MooncakeChannel) for k in ("allocate", "allocate_shared", "register")}


@pytest.fixture(scope="module", autouse=True)
def _mooncake() -> Iterator[None]:
    """The engine lasts as long as its process: it is started before anything is counted."""
    if "mooncake" not in CHANNELS:
        yield
        return
    plain = endpoint.config()
    endpoint.configure(msgspec.structs.replace(plain, backends=(*plain.backends, "mooncake")))
    mooncake.engine("127.0.0.1")
    yield
    endpoint.configure(plain)


@pytest.fixture(autouse=True)
def _scaled(monkeypatch, request) -> None:
    """On a slow machine that sets LARGE smaller, requests and windows are smaller alike, and patience is larger."""
    if "every_size" not in request.node.name:
        monkeypatch.setattr(reads, "_CHUNK", reads._CHUNK * LARGE // (48 << 20))
        for channel in CHANNELS.values():
            monkeypatch.setattr(channel, "window", channel.window * LARGE // (48 << 20))
    if LARGE < 48 << 20:
        monkeypatch.setattr(endpoint, "_config", TransportConfig(rdma_patience=10.0))


@pytest.fixture(params=WAYS)
def way(request) -> SimpleNamespace:
    via, kind, channel = WAYS[request.param]
    return SimpleNamespace(via=via, kind=kind, channel=channel)


def decoded(text: str) -> Descriptor:
    return msgspec.msgpack.decode(bytes.fromhex(text), type=Descriptor)


def pattern(nbytes: int, seed: int) -> np.ndarray:
    block = np.random.default_rng(seed).integers(0, 256, 1 << 16, dtype=np.uint8)
    rows = np.arange(-(-nbytes // block.size), dtype=np.uint32).astype(np.uint8)
    return (block + rows[:, None]).reshape(-1)[:nbytes]


@pytest.fixture
def hold(owner, way, eventually) -> Iterator[Callable[..., SimpleNamespace]]:
    """Memory of the living owner; afterwards the owner has no more files, threads or mappings than before."""
    before, held = owner.ask("count"), []

    def make(nbytes: int, seed: int = 1) -> SimpleNamespace:
        answer = owner.ask(way.kind, nbytes=nbytes, seed=seed)
        held.append(answer["region"])
        return SimpleNamespace(region=answer["region"], descriptor=decoded(answer["descriptor"]))

    yield make
    for region in held:
        owner.ask("close", region=region)
    disconnect()
    eventually(lambda: all(owner.ask("count")[k] <= n for k, n in before.items()))


@pytest.fixture
def doomed(script):
    """An owner that the test may kill."""
    return script("owner.py")


def midway(monkeypatch, way, act: Callable[[], object], after: int = 2) -> None:
    """Call `act` once, when `after` pieces have come."""
    plain, seen = way.channel.complete, []

    def complete(self) -> None:
        plain(self)
        seen.append(1)
        if len(seen) == after:
            act()

    monkeypatch.setattr(way.channel, "complete", complete)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size(hold, way, nbytes):
    held = hold(nbytes, seed=nbytes)
    into = np.zeros(nbytes, np.uint8)
    read(held.descriptor, into, deadline=LONG, via=way.via)
    assert np.array_equal(into, pattern(nbytes, nbytes))


def test_a_part_and_nothing_beyond_it(hold, way):
    held = hold(100_000)
    into = np.zeros(3_000, np.uint8)
    read(held.descriptor, into[1_000:2_000], offset=99_000, deadline=LONG, via=way.via)
    assert np.array_equal(into[1_000:2_000], pattern(100_000, 1)[99_000:])
    assert not into[:1_000].any()
    assert not into[2_000:].any()
    with pytest.raises(ShapeMismatch, match="read inside it"):
        read(held.descriptor, into, offset=99_000, deadline=LONG, via=way.via)


def test_many_parts_of_many_regions(hold, way):
    held = [hold(200_000 + n, seed=n) for n in range(3)]
    expected = [pattern(200_000 + n, n) for n in range(3)]
    rng = np.random.default_rng(0)
    parts, checks = [], []
    for _ in range(300):
        which, start, length = int(rng.integers(3)), int(rng.integers(190_000)), int(rng.integers(10_000))
        into = np.zeros(length, np.uint8)
        parts.append(Part(held[which].descriptor, into, start))
        checks.append((into, expected[which][start : start + length]))
    transfer = read_many(parts, deadline=LONG, workers=3, via=way.via)
    transfer.wait(LONG)
    assert transfer.valid
    assert transfer.done_bytes == sum(into.nbytes for into, _ in checks)
    assert all(np.array_equal(into, want) for into, want in checks)


def test_no_parts_are_done_at_once(way):
    transfer = read_many([], deadline=LONG, via=way.via)
    transfer.wait()
    assert transfer.valid


@pytest.mark.parametrize("chunk", [1_000, 1 << 20, 9 << 20, 100 << 20])
def test_chunks_come_in_order(hold, way, chunk):
    nbytes = (20 << 20) + 7 if chunk > 1_000 else 4_321
    got, end = np.zeros(nbytes, np.uint8), 0
    for offset, piece in read_chunks(hold(nbytes).descriptor, chunk, LONG, via=way.via):
        assert offset == end
        got[offset : offset + piece.nbytes] = np.frombuffer(piece, np.uint8)
        end += piece.nbytes
    assert end == nbytes
    assert np.array_equal(got, pattern(nbytes, 1))


def test_two_streams_share_one_large_read(hold, way):
    held = hold(LARGE)
    into = np.zeros(LARGE, np.uint8)
    with read_many([Part(held.descriptor, into)], deadline=LONG, workers=2, via=way.via) as transfer:
        transfer.wait()
    assert transfer.valid  # leaving it when it is done cancels nothing
    assert np.array_equal(into, pattern(LARGE, 1))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_wrong_key(hold, way):
    held = hold(100)
    into = bytearray(100)
    for key in (bytes(16), b"", bytes(100), held.descriptor.key[::-1], held.descriptor.secret):
        with pytest.raises(StaleDescriptor):
            read(msgspec.structs.replace(held.descriptor, key=key), into, deadline=LONG, via=way.via)
    assert into == bytes(100)
    read(held.descriptor, into, deadline=LONG, via=way.via)


def test_a_descriptor_with_another_regions_parts(hold, way):
    one, other = hold(100, seed=1).descriptor, hold(100, seed=2).descriptor
    replace = msgspec.structs.replace
    into = bytearray(100)
    for forged in (
        replace(one, slot=other.slot),
        replace(one, slot=10_000),
        replace(one, nbytes=101),
        replace(one, content=Content(model="policy", version=3)),
        replace(one, owner=replace(one.owner, start=one.owner.start + 1)),
        replace(one, owner=replace(one.owner, control=one.owner.control + 1)),
    ):
        with pytest.raises(StaleDescriptor):
            read(forged, into, offset=0, deadline=LONG, via=way.via)
    assert into == bytes(100)


def test_another_content_than_expected(way):
    seven = Content(model="policy", version=7, layout="tp=0/2")
    with register(bytearray(8), content=seven) if way.kind == "register" else allocate(8, content=seven) as region:
        read(region.descriptor, bytearray(8), deadline=LONG, expect=seven, via=way.via)
        for wrong in (
            Content(model="policy", version=8, layout="tp=0/2"),
            Content(model="policy", version=7, layout="tp=1/2"),
            Content(model="critic", version=7, layout="tp=0/2"),
            Content(model="policy", version=7),
        ):
            with pytest.raises(OtherContent, match="expected"):
                read(region.descriptor, bytearray(8), deadline=LONG, expect=wrong, via=way.via)
            forged = msgspec.structs.replace(region.descriptor, content=wrong)
            with pytest.raises(StaleDescriptor):
                read(forged, bytearray(8), deadline=LONG, expect=wrong, via=way.via)
        region.renew(Content(model="policy", version=8))
        with pytest.raises(OtherContent, match="version 8"):
            read(region.descriptor, bytearray(8), deadline=LONG, expect=seven, via=way.via)


def test_a_destination_that_does_not_match(way):
    floats = np.arange(10, dtype=np.float32).reshape(5, 2)
    with register(floats) as region:
        for wrong in (np.zeros((2, 5), np.float32), np.zeros((5, 2), np.int32), bytearray(39), bytes(40), floats.T):
            with pytest.raises(ShapeMismatch):
                read(region.descriptor, wrong, deadline=LONG, via=way.via)
            with pytest.raises(ShapeMismatch):
                read_many([Part(region.descriptor, wrong)], deadline=LONG, via=way.via)


@pytest.mark.parametrize("end", ["revoke", "close"])
def test_memory_that_was_taken_back(hold, owner, way, end):
    held = hold(100)
    read(held.descriptor, bytearray(100), deadline=LONG, via=way.via)  # a connection is kept
    owner.ask(end, region=held.region)
    into = bytearray(100)
    with pytest.raises(StaleDescriptor):
        read(held.descriptor, into, deadline=LONG, via=way.via)
    assert into == bytes(100)


def test_memory_that_was_registered_again(hold, owner, way):
    hold(100, seed=0)  # keeps the control record alive
    old = hold(100, seed=1)
    owner.ask("close", region=old.region)
    new = hold(100, seed=2)
    assert new.descriptor.slot == old.descriptor.slot
    into = bytearray(100)
    with pytest.raises(StaleDescriptor):
        read(old.descriptor, into, deadline=LONG, via=way.via)
    assert into == bytes(100)
    read(new.descriptor, into, deadline=LONG, via=way.via)
    assert into == pattern(100, 2).tobytes()
    renewed = decoded(owner.ask("renew", region=new.region))
    with pytest.raises(StaleDescriptor):
        read(new.descriptor, into, deadline=LONG, via=way.via)
    read(renewed, into, deadline=LONG, via=way.via)


# --- peers that end --------------------------------------------------------------------------------------------------


def test_a_dead_owner(doomed, way):
    descriptor = decoded(doomed.ask(way.kind, nbytes=100, seed=1)["descriptor"])
    read(descriptor, bytearray(100), deadline=LONG, via=way.via)  # a connection is kept
    doomed.kill()
    for _ in range(2):
        with pytest.raises(StaleDescriptor):
            read(descriptor, bytearray(100), deadline=LONG, via=way.via)


def test_a_restarted_owner(doomed, script, way):
    old = decoded(doomed.ask(way.kind, nbytes=100, seed=1)["descriptor"])
    doomed.kill()
    successor = script("owner.py", str(old.endpoint.port))
    new = decoded(successor.ask(way.kind, nbytes=100, seed=2)["descriptor"])
    assert new.endpoint == old.endpoint
    into = bytearray(100)
    with pytest.raises(StaleDescriptor):
        read(old, into, deadline=LONG, via=way.via)
    assert into == bytes(100)
    read(new, into, deadline=LONG, via=way.via)


@pytest.mark.parametrize("end", ["revoke", "close", "kill"])
def test_memory_that_goes_in_the_middle_of_the_read(doomed, way, end, monkeypatch):
    answer = doomed.ask(way.kind, nbytes=LARGE, seed=1)
    act = doomed.kill if end == "kill" else lambda: doomed.ask(end, region=answer["region"])
    midway(monkeypatch, way, act)
    with pytest.raises(StaleDescriptor):
        read(decoded(answer["descriptor"]), bytearray(LARGE), deadline=LONG, via=way.via)


def test_memory_that_changes_its_meaning_in_the_middle_of_the_read(hold, owner, way, monkeypatch):
    held = hold(LARGE)

    def renew_and_overwrite() -> None:
        owner.ask("renew", region=held.region)
        if way.kind != "register":
            owner.ask("fill", region=held.region, value=7)

    midway(monkeypatch, way, renew_and_overwrite)
    transfer = read_many([Part(held.descriptor, np.zeros(LARGE, np.uint8))], deadline=LONG, via=way.via)
    with pytest.raises(StaleDescriptor):
        transfer.wait()
    assert not transfer.valid


def test_one_bad_part_voids_the_whole_transfer(hold, owner, way):
    good, bad = hold(1 << 20), hold(1 << 20)
    owner.ask("revoke", region=bad.region)
    parts = [Part(h.descriptor, bytearray(1 << 20)) for h in (good, bad, good)]
    transfer = read_many(parts, deadline=LONG, workers=2, via=way.via)
    with pytest.raises(StaleDescriptor):
        transfer.wait()
    assert not transfer.valid
    assert not transfer.running
    with pytest.raises(StaleDescriptor):  # and stays so
        transfer.wait()


def test_a_reader_that_leaves_without_goodbye(hold, script, way):
    held = hold(LARGE)
    leaver = script("owner.py")
    leaver.ask("stall", descriptor=msgspec.msgpack.encode(held.descriptor).hex(), via=way.via)
    into = np.zeros(LARGE, np.uint8)
    read(held.descriptor, into, deadline=LONG, via=way.via)  # while the other one takes nothing
    assert np.array_equal(into, pattern(LARGE, 1))
    leaver.kill()
    read(held.descriptor, into, deadline=LONG, via=way.via)


def test_memory_is_released_although_a_reader_takes_nothing(hold, owner, script, way, eventually):
    before = owner.ask("resident")
    held = hold(LARGE)
    assert owner.ask("resident") > before + LARGE // 2
    stalled = script("owner.py")
    stalled.ask("stall", descriptor=msgspec.msgpack.encode(held.descriptor).hex(), via=way.via)
    owner.ask("close", region=held.region)
    eventually(lambda: owner.ask("resident") < before + LARGE // 2)


# --- deadlines and cancellation --------------------------------------------------------------------------------------


def test_no_time_left(hold, way):
    held = hold(100)
    into = bytearray(100)
    with pytest.raises(DeadlineExceeded):
        read(held.descriptor, into, deadline=0, via=way.via)
    with pytest.raises(DeadlineExceeded):
        read_many([Part(held.descriptor, into)], deadline=-1, via=way.via).wait()
    with pytest.raises(DeadlineExceeded):
        next(read_chunks(held.descriptor, 10, 0, via=way.via))
    assert into == bytes(100)


def blocked(monkeypatch, way) -> tuple[threading.Event, threading.Event]:
    """A read that stops after its first piece: (it has, let it go on)."""
    reached, go = threading.Event(), threading.Event()

    def stop() -> None:
        reached.set()
        go.wait(LONG)

    midway(monkeypatch, way, stop, after=1)
    return reached, go


def test_a_cancelled_read(hold, way, monkeypatch, eventually):
    held = hold(LARGE)
    into = np.zeros(LARGE, np.uint8)
    reached, go = blocked(monkeypatch, way)
    transfer = read_many([Part(held.descriptor, into)], deadline=LONG, workers=1, via=way.via)
    assert reached.wait(LONG)
    assert transfer.running
    cancel = threading.Thread(target=transfer.cancel)
    cancel.start()
    eventually(lambda: transfer._error is not None)
    go.set()
    cancel.join(LONG)
    assert not transfer.running
    after = into.copy()
    with pytest.raises(Cancelled, match="cancelled after"):
        transfer.wait()
    assert not transfer.valid
    assert np.array_equal(into, after)  # nothing came later
    assert not after[LARGE // 2 :].any()
    read(held.descriptor, into, deadline=LONG, via=way.via)  # the next read is not confused by what was under way
    assert np.array_equal(into, pattern(LARGE, 1))


def once_cancelled(transfer, go: threading.Event) -> None:
    """Let a `blocked` read go on when it was cancelled: its worker may be interrupted between pieces only."""

    def watch() -> None:
        end = time.monotonic() + LONG
        while transfer._error is None and time.monotonic() < end:
            time.sleep(0.01)
        go.set()

    threading.Thread(target=watch).start()


def test_a_wait_that_ends_cancels(hold, way, monkeypatch):
    held = hold(LARGE)
    reached, go = blocked(monkeypatch, way)
    transfer = read_many([Part(held.descriptor, bytearray(LARGE))], deadline=LONG, workers=1, via=way.via)
    assert reached.wait(LONG)
    once_cancelled(transfer, go)
    with pytest.raises(DeadlineExceeded, match=f"of {LARGE:,} bytes"):
        transfer.wait(0.05)
    assert not transfer.running
    assert not transfer.valid


def test_leaving_a_transfer_cancels_it(hold, way, monkeypatch):
    held = hold(LARGE)
    reached, go = blocked(monkeypatch, way)
    with read_many([Part(held.descriptor, bytearray(LARGE))], deadline=LONG, workers=1, via=way.via) as transfer:
        assert reached.wait(LONG)
        once_cancelled(transfer, go)
    with pytest.raises(Cancelled):
        transfer.wait()


def test_cancelling_what_is_done_changes_nothing(hold, way):
    held = hold(100)
    transfer = read_many([Part(held.descriptor, bytearray(100))], deadline=LONG, via=way.via)
    transfer.wait()
    transfer.cancel()
    transfer.wait()
    assert transfer.valid


# --- snapshots and sums ----------------------------------------------------------------------------------------------


def published(process, version: int, *, model: str, size: int = 1_000) -> Manifest:
    text = process.ask("publish", model=model, version=version, count=4, size=size)
    return msgspec.msgpack.decode(bytes.fromhex(text), type=Manifest)


def values(snapshot) -> set[float]:
    return {float(v) for _, _, data in snapshot.values() for v in np.unique(np.frombuffer(data, np.float32))}


@pytest.fixture(params=CHANNELS)
def via(request) -> str:
    return request.param


def test_a_snapshot_moves_on(doomed, via):
    old = published(doomed, 1, model="policy")
    assert values(pull(old, deadline=LONG, via=via)) == {1}
    new = published(doomed, 2, model="policy")
    with pytest.raises(StaleVersion, match="replaced by version 2"):
        pull(old, deadline=LONG, via=via)
    assert values(pull(new, deadline=LONG, via=via)) == {2}
    doomed.kill()
    with pytest.raises(StaleDescriptor):
        pull(new, deadline=LONG, via=via)


@pytest.mark.parametrize("end", ["publish", "kill"])
@pytest.mark.parametrize("remote", [c for c in CHANNELS if c != "shm"])
def test_a_snapshot_moves_on_in_the_middle(doomed, monkeypatch, end, remote):
    size = LARGE // 16
    old = published(doomed, 1, model="policy", size=size)
    act = doomed.kill if end == "kill" else lambda: published(doomed, 2, model="policy", size=size)
    midway(monkeypatch, SimpleNamespace(channel=CHANNELS[remote]), act)
    with pytest.raises(StaleVersion if end == "publish" else StaleDescriptor):
        pull(old, deadline=LONG, via=remote, verify=False)


def test_a_manifest_of_another_version_than_its_memory(doomed, via):
    manifest = published(doomed, 1, model="policy")
    with pytest.raises(ShapeMismatch, match="version 2"):
        pull(msgspec.structs.replace(manifest, version=2), deadline=LONG, via=via)


def test_versions_that_move_on_as_fast_as_they_can(doomed, via, monkeypatch):
    monkeypatch.setattr(reads, "_CHUNK", 1 << 16)
    whole = 0
    doomed.send("churn", model="policy", versions=120, count=8, size=40_000)
    buffer = bytearray(2 << 20)
    while (line := doomed.receive()) is not None:
        manifest = msgspec.msgpack.decode(bytes.fromhex(line), type=Manifest)
        try:
            snapshot = pull(manifest, deadline=LONG, verify=False, into=buffer, via=via)
        except StaleVersion:
            continue
        assert values(snapshot) == {manifest.version}
        whole += 1
    assert whole  # the last one at least


def test_sums_of_tensors(via):
    torch = pytest.importorskip("torch")
    sums = [torch.randn(1_000, 30), torch.randn(7).to(torch.bfloat16)]
    regions = [register(t) for t in sums]
    rooms = [torch.empty_like(t) for t in sums]
    parts = [Part(region.descriptor, room) for region, room in zip(regions, rooms, strict=True)]
    read_many(parts, deadline=LONG, via=via).wait()
    assert all(torch.equal(a, b) for a, b in zip(sums, rooms, strict=True))
    regions[1].revoke()
    transfer = read_many(parts, deadline=LONG, via=via)
    with pytest.raises(StaleDescriptor):
        transfer.wait()
    for region in regions:
        region.close()
