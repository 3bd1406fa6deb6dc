"""Snapshots: published by a real second process, pulled here."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from gyre_transport import reads
from gyre_transport import snapshot as snapshots
from gyre_transport.backends.tcp import TcpChannel
from gyre_transport.buffers import aligned
from gyre_transport.errors import (
    ChecksumMismatch,
    DataError,
    DeadlineExceeded,
    ShapeMismatch,
    StaleDescriptor,
    StaleVersion,
)
from gyre_transport.snapshot import Manifest, SnapshotSource, pull


def decoded(answer: str) -> Manifest:
    return msgspec.msgpack.decode(bytes.fromhex(answer), type=Manifest)


@pytest.fixture
def core(owner):
    """A living publisher; the test's model is its own."""
    yield owner
    owner.ask("forget", model="policy")


@pytest.fixture
def doomed(script):
    """A publisher that the test may kill."""
    return script("owner.py")


def publish(core, version, *, count=3, size=1_000, model="policy") -> Manifest:
    return decoded(core.ask("publish", model=model, version=version, count=count, size=size))


def values(snapshot) -> set[float]:
    return {float(v) for _, _, data in snapshot.values() for v in np.unique(np.frombuffer(data, np.float32))}


def hook_read(monkeypatch, act, *, after: int, chunk: int = 1 << 12) -> None:
    """Call `act` once, when `after` pieces of the first read have come over tcp."""
    monkeypatch.setattr(reads, "_CHUNK", chunk)
    monkeypatch.setattr(TcpChannel, "window", 0)
    plain, seen = TcpChannel.complete, []

    def complete(self):
        plain(self)
        seen.append(1)
        if len(seen) == after:
            act()

    monkeypatch.setattr(TcpChannel, "complete", complete)


def test_a_snapshot_of_another_process(core):
    manifest = publish(core, 7)
    assert (manifest.model, manifest.version, len(manifest.entries)) == ("policy", 7, 3)
    assert all(e.offset % 64 == 0 for e in manifest.entries)
    snapshot = pull(manifest, deadline=10)
    assert snapshot.version == 7
    assert list(snapshot) == ["t0", "t1", "t2"]
    assert len(snapshot) == 3
    dtype, shape, data = snapshot["t1"]
    assert (dtype, shape, data.nbytes) == ("F32", (1_000,), 4_000)
    assert values(snapshot) == {7}
    with pytest.raises(KeyError):
        snapshot["t3"]


def test_bits_survive_in_every_dtype_and_shape():
    rng = np.random.default_rng(0)
    tensors = {
        "empty": ("F32", (0, 3), b""),
        "scalar": ("F64", (), np.float64(np.pi).tobytes()),
        "bytes": ("U8", (3,), b"\x00\xff\x80"),
        "nan": ("F32", (2,), np.array([0x7FC00001, 0xFF800000], np.uint32).tobytes()),
        "bf16": ("BF16", (5, 7), rng.integers(0, 1 << 16, 35, dtype=np.uint16).reshape(5, 7)),
        "f32": ("F32", (3, 4, 5), rng.standard_normal((3, 4, 5), dtype=np.float32)),
        "big": ("F32", (1 << 20,), rng.standard_normal(1 << 20, dtype=np.float32)),
    }
    with SnapshotSource("policy") as source:
        snapshot = pull(source.publish(0, tensors), deadline=10)
    for name, (dtype, shape, data) in tensors.items():
        got = snapshot[name]
        assert got[:2] == (dtype, shape)
        assert got[2].tobytes() == (data if isinstance(data, bytes) else data.tobytes())


def test_torch_round_trip_shares_memory_and_keeps_bits():
    torch = pytest.importorskip("torch")
    from gyre_transport.torch import describe, tensors

    bits = torch.randint(-(1 << 15), 1 << 15, (64, 33), dtype=torch.int16)
    weights = {
        "bf16": bits.view(torch.bfloat16),
        "f32": torch.randn(17, 3),
        "f16": torch.randn(5).to(torch.float16),
        "i64": torch.arange(4),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "f8": torch.randn(8).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
    }
    with SnapshotSource("policy") as source:
        described = {name: describe(t) for name, t in weights.items()}
        described["direct"] = ("F32", (2, 2), torch.eye(2))
        snapshot = pull(source.publish(1, described), deadline=10)
        got = tensors(snapshot)
        assert torch.equal(got["bf16"].view(torch.int16), bits)
        assert torch.equal(got["direct"], torch.eye(2))
        for name, tensor in weights.items():
            assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got[name].float().nan_to_num(), tensor.float().nan_to_num())
        got["f32"].zero_()  # a view of the snapshot's buffer
        assert snapshot["f32"][2].tobytes() == bytes(17 * 3 * 4)
        with pytest.raises(ShapeMismatch, match="C-contiguous"):
            describe(torch.zeros(2, 3).t())
        with pytest.raises(ShapeMismatch, match="no name"):
            describe(torch.zeros(2, dtype=torch.complex128))


def test_described_bytes_keep_their_tensor_alive():
    torch = pytest.importorskip("torch")
    from gyre_transport.torch import describe

    described = {f"t{i}": describe(torch.full((1 << 16,), float(i))) for i in range(8)}
    with SnapshotSource("policy") as source:
        snapshot = pull(source.publish(1, described), deadline=10)
    for i in range(8):
        assert set(np.frombuffer(snapshot[f"t{i}"][2], np.float32)) == {float(i)}


def test_a_version_that_moved_on_before_the_read(core):
    old = publish(core, 1)
    publish(core, 2)
    with pytest.raises(StaleVersion, match="version 1 of 'policy' was replaced by version 2"):
        pull(old, deadline=10)


@pytest.mark.parametrize("after", [1, 2, 3])  # the last: every byte has come
def test_a_version_that_moves_on_during_the_read(core, monkeypatch, after):
    old = publish(core, 1)
    assert 2 * 4096 < old.nbytes <= 3 * 4096
    hook_read(monkeypatch, lambda: publish(core, 2), after=after)
    if after == 3:  # the seal came after the last byte, before `act`: the read is whole
        assert values(pull(old, deadline=10, via="tcp")) == {1}
        return
    with pytest.raises(StaleVersion):
        pull(old, deadline=10, via="tcp")


def test_a_source_that_is_too_busy_to_say_what_it_has_is_waited_for(core, monkeypatch):
    old = publish(core, 1)
    publish(core, 2)
    plain = snapshots._current

    def standing_still(*arguments):
        os.kill(core.pid, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (core.pid, signal.SIGCONT)).start()  # longer than an answer usually takes
        return plain(*arguments)

    monkeypatch.setattr(snapshots, "_current", standing_still)
    with pytest.raises(StaleVersion, match="was replaced by version 2"):
        pull(old, deadline=60, via="tcp")


def test_a_version_that_was_mapped_stays_what_it_was(core):
    snapshot = pull(publish(core, 1), deadline=10)
    publish(core, 2)
    assert values(snapshot) == {1}
    core.ask("close_source", model="policy")
    assert values(snapshot) == {1}


def test_no_mixture_while_versions_move_on_as_fast_as_they_can(core):
    whole = stale = 0
    core.send("churn", model="policy", versions=150, count=8, size=40_000)
    buffer = bytearray(2 << 20)
    while (line := core.receive()) is not None:
        manifest = decoded(line)
        try:
            snapshot = pull(manifest, deadline=30, verify=False, into=buffer)
        except StaleVersion:
            stale += 1
            continue
        assert values(snapshot) == {manifest.version}
        whole += 1
    assert whole + stale == 150
    assert whole  # the last one at least


def test_a_pull_while_the_next_version_is_being_written_says_so():
    with SnapshotSource("policy") as source:
        manifest = source.publish(3, {"w": ("U8", (4,), b"abcd")})
        source._region.revoke()
        with pytest.raises(StaleVersion, match="is being replaced"):
            pull(manifest, deadline=10)


def test_a_closed_source_is_stale_for_good(core):
    manifest = publish(core, 1)
    core.ask("close_source", model="policy")
    with pytest.raises(StaleDescriptor):
        pull(manifest, deadline=10)


def test_a_killed_publisher(doomed):
    manifest = publish(doomed, 1)
    doomed.kill()
    with pytest.raises(StaleDescriptor, match="ended"):
        pull(manifest, deadline=10)


def test_a_publisher_killed_during_the_read(doomed, monkeypatch):
    manifest = publish(doomed, 1)
    hook_read(monkeypatch, doomed.kill, after=1)
    with pytest.raises(StaleDescriptor, match="ended"):
        pull(manifest, deadline=10, via="tcp")


def test_a_changed_byte_is_found(core, monkeypatch):
    manifest = publish(core, 1)
    plain = TcpChannel.complete

    def complete(self):
        plain(self)
        view[-1] ^= 1  # the last byte of t1, on its way

    view = aligned(manifest.nbytes)
    view = view[: manifest.entries[1].offset + manifest.entries[1].nbytes]
    monkeypatch.setattr(TcpChannel, "complete", complete)
    with pytest.raises(ChecksumMismatch, match="'t1' of 'policy' version 1"):
        pull(manifest, deadline=10, via="tcp", into=view.base)
    assert pull(manifest, deadline=10, via="tcp", verify=False).version == 1


def test_no_time_left(core):
    manifest = publish(core, 1)
    with pytest.raises(DeadlineExceeded):
        pull(manifest, deadline=0)


def test_time_that_runs_out_while_verifying(core, monkeypatch):
    from gyre_transport import snapshot

    manifest = publish(core, 1)
    read, now = snapshot.read, [0.0]
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: now[0])

    def slow_read(*arguments, **options):
        read(*arguments, **options)
        now[0] += 11.0

    monkeypatch.setattr(snapshot, "read", slow_read)
    with pytest.raises(DeadlineExceeded, match="not verified"):
        pull(manifest, deadline=10, via="tcp")


def test_a_buffer_is_used_again(core):
    first = publish(core, 1)
    buffer = np.empty(first.nbytes + 100, np.uint8)
    snapshot = pull(first, deadline=10, into=buffer)
    assert np.shares_memory(np.frombuffer(snapshot.buffer, np.uint8), buffer)
    again = pull(publish(core, 2), deadline=10, into=snapshot.buffer)
    assert values(again) == {2}
    other = publish(core, 1, model="other")
    for wrong in (bytearray(other.nbytes - 1), bytes(other.nbytes), buffer[::2]):
        with pytest.raises(ShapeMismatch):
            pull(other, deadline=10, into=wrong)
    core.ask("forget", model="other")


def test_nobody_writes_to_what_is_published():
    with SnapshotSource("policy") as source:
        manifest = source.publish(1, {"w": ("U8", (3,), b"abc")})
        one, other = (pull(manifest, deadline=10) for _ in range(2))
        one["w"][2][:] = b"xyz"  # its own
        assert bytes(other["w"][2]) == b"abc"
        with pytest.raises(ValueError, match="read-only"):
            source._region.array()[0] = 7
        with pytest.raises(PermissionError):  # nor does the kernel let anybody
            os.pwrite(manifest.descriptor.location.fd, b"x", 0)


def test_old_versions_take_no_memory(core):
    for version in range(20):
        publish(core, version)
    assert core.ask("count")["mapped"] == 1


def test_what_cannot_be_published_leaves_the_previous_version_standing():
    with SnapshotSource("policy") as source:
        manifest = source.publish(5, {"w": ("F32", (2,), b"12345678")})
        for wrong in (
            {"w": ("F32", (3,), b"12345678")},
            {"w": ("F32", (-2,), b"12345678")},
            {"w": ("float32", (2,), b"12345678")},
            {"w": ("BF16", (4,), np.zeros(4, np.float16))},
            {"w": ("I32", (2,), np.zeros(2, np.float32))},
            {"w": ("F32", (2, 2), np.eye(4, dtype=np.float32)[::2, ::2])},
            {"w": ("F32", (1,), "text")},
        ):
            with pytest.raises(ShapeMismatch, match="'w'"):
                source.publish(6, wrong)
        for version in (5, 4):
            with pytest.raises(DataError, match="only increase"):
                source.publish(version, {"w": ("F32", (2,), b"12345678")})
        assert pull(manifest, deadline=10)["w"][2] == b"12345678"
        assert source.manifest == manifest
    with pytest.raises(DataError, match="closed"):
        source.publish(7, {})


def test_a_manifest_that_contradicts_itself_is_refused(core):
    manifest = publish(core, 1)
    replace = msgspec.structs.replace
    first, *rest = manifest.entries
    for entry in (
        replace(first, nbytes=first.nbytes + 4),
        replace(first, shape=(1_001,)),
        replace(first, offset=manifest.nbytes - 1),
        replace(first, offset=-64),
        replace(first, dtype="F31"),
    ):
        with pytest.raises(ShapeMismatch):
            pull(replace(manifest, entries=(entry, *rest)), deadline=10)
    with pytest.raises(ShapeMismatch):
        pull(replace(manifest, nbytes=1 << 40), deadline=10)
    with pytest.raises(StaleVersion):
        pull(replace(manifest, descriptor=replace(manifest.descriptor, key=bytes(16))), deadline=10)


def test_an_empty_snapshot():
    with SnapshotSource("policy") as source:
        snapshot = pull(source.publish(0, {}), deadline=10)
        assert (len(snapshot), snapshot.buffer.nbytes) == (0, 0)


# --- safetensors ---------------------------------------------------------------------------------------------------


def test_the_safetensors_library_reads_what_was_written(tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    from gyre_transport.torch import describe

    weights = {
        "one byte": torch.tensor([3], dtype=torch.uint8),
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "f32.größe": torch.randn(7),
        "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(2.0),
    }
    with SnapshotSource("policy") as source:
        snapshot = pull(source.publish(3, {n: describe(t) for n, t in weights.items()}), deadline=10)
    path = tmp_path / "model.safetensors"
    snapshot.write_safetensors(str(path), fsync=True, metadata={"version": "3"})
    loaded = load_file(path)
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with library.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "3"}
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_file_is_as_the_format_says(tmp_path):
    with SnapshotSource("policy") as source:
        tensors = {"narrow": ("U8", (3,), b"abc"), "wide": ("F32", (1,), b"1234")}
        pull(source.publish(0, tensors), deadline=10).write_safetensors(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header["wide"] == {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    assert header["narrow"] == {"dtype": "U8", "shape": [3], "data_offsets": [4, 7]}
    assert raw[8 + length :] == b"1234abc"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    with SnapshotSource("policy") as source:
        snapshot = pull(source.publish(0, {"w": ("U8", (1 << 20,), bytes(1 << 20))}), deadline=10)
    with pytest.raises(DataError, match=r"model\.safetensors"):
        snapshot.write_safetensors(tmp_path / "missing" / "model.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # a disk that is full after 64 KiB
    try:
        with pytest.raises(DataError, match="has room"):
            snapshot.write_safetensors(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_pulling_does_not_import_torch(tmp_path):
    code = """
import sys
from pathlib import Path
from gyre_transport.snapshot import SnapshotSource, pull
with SnapshotSource("m") as source:
    pull(source.publish(1, {"w": ("BF16", (1,), b"ab")}), deadline=10).write_safetensors(Path(sys.argv[1]))
assert "torch" not in sys.modules and "safetensors" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=True, timeout=60)
    assert (tmp_path / "x").stat().st_size


def test_a_connection_that_was_lost_is_tried_again_while_the_version_stands(core, monkeypatch, caplog):
    manifest = publish(core, 1)
    hook_read(monkeypatch, lambda: None, after=1)
    plain, lost = TcpChannel.complete, []

    def complete(self):
        plain(self)
        if not lost:
            lost.append(1)
            self._connection.interrupt()

    monkeypatch.setattr(TcpChannel, "complete", complete)
    assert values(pull(manifest, deadline=10, via="tcp")) == {1}
    assert "reading again" in caplog.text
