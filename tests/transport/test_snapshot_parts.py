"""Parts of a snapshot, for readers of another layout; and weights that are narrowed on their way."""

from __future__ import annotations

import numpy as np
import pytest

from gyre_transport.backends.tcp import TcpChannel
from gyre_transport.errors import ChecksumMismatch, ShapeMismatch, StaleVersion
from gyre_transport.layout import RULES, Box, select, shard
from gyre_transport.snapshot import SnapshotSource, pull

LONG = 60.0
RNG = np.random.default_rng(0)
MODEL = {
    "model.embed_tokens.weight": RNG.random((64, 48), np.float32),
    "model.layers.0.self_attn.q_proj.weight": RNG.random((48, 48), np.float32),
    "model.layers.0.self_attn.o_proj.weight": RNG.random((48, 48), np.float32),
    "model.layers.0.mlp.down_proj.weight": RNG.random((48, 4_000), np.float32),
    "model.norm.weight": RNG.random(48, np.float32),
    "model.experts": RNG.random((4, 6, 10), np.float32),
}


@pytest.fixture(params=["shm", "tcp"])
def via(request) -> str:
    return request.param


@pytest.fixture
def source():
    with SnapshotSource("policy") as source:
        source.publish(1, {name: ("F32", a.shape, a) for name, a in MODEL.items()})
        yield source


def arrays(snapshot) -> dict[str, np.ndarray]:
    return {n: np.frombuffer(data, np.float32).reshape(shape) for n, (_, shape, data) in snapshot.items()}


def part(array: np.ndarray, box: Box | None) -> np.ndarray:
    return array if box is None else array[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_take_exactly_their_parts(source, via, size):
    total = 0
    for rank in range(size):
        wanted = select({n: a.shape for n, a in MODEL.items()}, RULES, rank=rank, size=size)
        snapshot = pull(source.manifest, deadline=LONG, select=wanted, via=via)
        assert list(snapshot) == list(MODEL)
        for name, got in arrays(snapshot).items():
            assert np.array_equal(got, part(MODEL[name], wanted[name]))
        total += snapshot.buffer.nbytes
    replicated = sum(MODEL[n].nbytes for n in ("model.norm.weight", "model.experts"))
    assert total < sum(a.nbytes for a in MODEL.values()) + (size - 1) * replicated + size * len(MODEL) * 64
    assert source.copies == 0  # parts are nothing to serve on


def test_some_names_and_parts_cut_in_two_dimensions(source, via):
    box = Box((1, 2, 3), (3, 5, 9))
    snapshot = pull(source.manifest, deadline=LONG, select={"model.experts": box, "model.norm.weight": None}, via=via)
    got = arrays(snapshot)
    assert np.array_equal(got["model.experts"], part(MODEL["model.experts"], box))
    assert np.array_equal(got["model.norm.weight"], MODEL["model.norm.weight"])
    assert len(pull(source.manifest, deadline=LONG, select={}, via=via)) == 0


def test_into_a_buffer(source, via):
    wanted = {"model.layers.0.mlp.down_proj.weight": shard((48, 4_000), 1, 3, 4)}
    room = np.zeros(48 * 1_000, np.float32)
    snapshot = pull(source.manifest, deadline=LONG, select=wanted, into=room, via=via)
    assert np.array_equal(room.reshape(48, 1_000), MODEL["model.layers.0.mlp.down_proj.weight"][:, 3_000:])
    assert snapshot["model.layers.0.mlp.down_proj.weight"][:2] == ("F32", (48, 1_000))
    with pytest.raises(ShapeMismatch, match="give a larger one"):
        pull(source.manifest, deadline=LONG, select=wanted, into=room[1:].copy(), via=via)


def test_parts_that_are_not_there(source, via):
    with pytest.raises(ShapeMismatch, match=r"'model\.missing'"):
        pull(source.manifest, deadline=LONG, select={"model.missing": None}, via=via)
    with pytest.raises(ShapeMismatch, match=r"'model.norm.weight' .*not inside"):
        pull(source.manifest, deadline=LONG, select={"model.norm.weight": Box((0,), (49,))}, via=via)


def test_one_request_for_all_columns(source, monkeypatch):
    asked = []
    plain = TcpChannel._ask

    def ask(self) -> None:
        asked.append(len(self._batch))
        plain(self)

    monkeypatch.setattr(TcpChannel, "_ask", ask)
    name = "model.layers.0.mlp.down_proj.weight"
    pull(source.manifest, deadline=LONG, select={name: shard((48, 4_000), 1, 0, 2)}, via="tcp")
    assert asked == [1]


def test_what_comes_whole_is_verified(source, monkeypatch):
    room = np.zeros(1_000_000, np.uint8)
    plain = TcpChannel.complete

    def complete(self) -> None:
        plain(self)
        room[0] ^= 1

    monkeypatch.setattr(TcpChannel, "complete", complete)
    with pytest.raises(ChecksumMismatch, match=r"'model\.norm\.weight'"):
        pull(source.manifest, deadline=LONG, select={"model.norm.weight": None}, into=room, via="tcp")
    box = Box((0,), (47,))  # a part has no checksum of its own: the owner's seal is all there is
    pull(source.manifest, deadline=LONG, select={"model.norm.weight": box}, into=room, via="tcp")


def test_parts_of_a_version_that_moved_on(source, via):
    old = source.manifest
    source.publish(2, {})
    with pytest.raises(StaleVersion):
        pull(old, deadline=LONG, select={"model.norm.weight": None}, via=via)


# --- bf16 on the wire from fp32 masters ------------------------------------------------------------------------------


def test_float32_is_published_as_bf16_as_torch_rounds():
    torch = pytest.importorskip("torch")
    from gyre_transport.torch import tensors

    bits = np.concatenate(
        [
            RNG.integers(0, 1 << 32, 300_001, dtype=np.uint32),
            np.array(
                [0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x00000001], np.uint32
            ),
        ]
    )
    masters = torch.from_numpy(bits.view(np.float32))
    with SnapshotSource("policy") as source:
        manifest = source.publish(
            1, {"w": ("BF16", tuple(masters.shape), masters), "one": ("BF16", (), torch.ones(()))}
        )
        got = tensors(pull(manifest, deadline=LONG, via="tcp"))
    expected = masters.to(torch.bfloat16)
    nan = masters.isnan()
    assert torch.equal(got["w"].isnan(), nan)
    assert torch.equal(got["w"][~nan].view(torch.int16), expected[~nan].view(torch.int16))
    assert got["one"] == 1
    assert manifest.entries[0].nbytes == 2 * masters.numel()


def test_nothing_else_is_converted():
    with SnapshotSource("policy") as source:
        for dtype, array in (("F16", np.ones(4, np.float32)), ("BF16", np.ones(4)), ("F32", np.ones(2))):
            with pytest.raises(ShapeMismatch, match="'w'"):
                source.publish(1, {"w": (dtype, (4,), array)})
