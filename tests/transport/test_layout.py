"""Parts of tensors: the stretches are what numpy's slicing takes, and what is read through them too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_transport.errors import ShapeMismatch
from gyre_transport.layout import RULES, Box, Stretch, select, shard, stage, stretches
from gyre_transport.memory import Part, register
from gyre_transport.reads import read_many


@st.composite
def boxes(draw) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    stop = tuple(draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True))
    return shape, Box(start, stop)


def sliced(array: np.ndarray, box: Box) -> np.ndarray:
    return np.array(array[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))], order="C")


@settings(max_examples=400, deadline=None)
@given(boxes(), st.sampled_from([np.uint8, np.uint16, np.float64]))
def test_stretches_are_what_slicing_takes(case, dtype):
    shape, box = case
    array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    data, got = array.tobytes(), b""
    for s in stretches(shape, box, array.itemsize):
        assert s.within(len(data))
        got += b"".join(data[s.offset + row * s.stride :][: s.length] for row in range(s.rows))
    assert got == sliced(array, box).tobytes()


@settings(max_examples=40, deadline=None)
@given(boxes(), st.sampled_from(["shm", "tcp"]))
def test_reading_the_stretches_is_slicing_the_owners_array(case, via):
    shape, box = case
    array = np.random.default_rng(0).random(shape)
    into = np.zeros(box.shape)
    flat, at, parts = into.reshape(-1).view(np.uint8), 0, []
    with register(np.array(array)) as region:
        for s in stretches(shape, box, 8):
            parts.append(Part(region.descriptor, flat[at : at + s.nbytes], s.offset, s.rows, s.stride))
            at += s.nbytes
        read_many(parts, deadline=60, via=via).wait()
    assert np.array_equal(into, sliced(np.array(array), box))


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_the_shards_of_all_ranks_are_the_tensor(size, shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= size
    array = np.arange(int(np.prod(shape))).reshape(shape)
    parts = [sliced(array, shard(tuple(shape), dim, rank, size)) for rank in range(size)]
    assert np.array_equal(np.concatenate(parts, axis=dim), array)


@pytest.mark.parametrize(
    ("shape", "box", "expected"),
    [
        ((), Box((), ()), [Stretch(0, 2)]),
        ((4, 6), Box((1, 0), (3, 6)), [Stretch(12, 24)]),  # rows: one run
        ((4, 6), Box((0, 3), (4, 6)), [Stretch(6, 6, 4, 12)]),  # columns: one stretch of rows
        ((2, 4, 6), Box((0, 0, 3), (2, 4, 6)), [Stretch(6, 6, 8, 12)]),  # of all experts, still one
        ((2, 4, 6), Box((0, 1, 0), (2, 3, 6)), [Stretch(12, 24, 2, 48)]),
        ((2, 4, 6), Box((0, 1, 3), (2, 3, 6)), [Stretch(18, 6, 2, 12), Stretch(66, 6, 2, 12)]),
        ((4, 6), Box((1, 3), (1, 6)), []),
    ],
)
def test_one_stretch_where_one_dimension_is_cut(shape, box, expected):
    assert list(stretches(shape, box, 2)) == expected


def test_what_is_not_inside_is_refused():
    for box in (Box((0,), (4,)), Box((0, 0), (4, 7)), Box((-1, 0), (4, 6)), Box((3, 0), (2, 6))):
        with pytest.raises(ShapeMismatch, match="not inside"):
            list(stretches((4, 6), box, 2))


@pytest.mark.parametrize(("dim", "rank", "size"), [(0, 0, 3), (2, 0, 2), (-1, 0, 2), (0, 2, 2), (0, -1, 2), (0, 0, 0)])
def test_what_cannot_be_cut(dim, rank, size):
    with pytest.raises(ShapeMismatch, match="cannot be cut"):
        shard((4, 6), dim, rank, size)


SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.self_attn.q_proj.weight": (6, 4),
    "model.layers.0.self_attn.q_proj.bias": (6,),
    "model.layers.0.self_attn.o_proj.weight": (4, 6),
    "model.layers.1.mlp.down_proj.weight": (4, 10),
    "model.layers.1.mlp.down_proj.bias": (4,),
    "model.norm.weight": (4,),
    "lm_head.weight": (8, 4),
}


def test_a_rank_of_a_model():
    got = select(SHAPES, RULES, rank=1, size=2)
    assert {name: box and (box.start, box.stop) for name, box in got.items()} == {
        "model.embed_tokens.weight": ((4, 0), (8, 4)),
        "model.layers.0.input_layernorm.weight": None,
        "model.layers.0.self_attn.q_proj.weight": ((3, 0), (6, 4)),
        "model.layers.0.self_attn.q_proj.bias": ((3,), (6,)),
        "model.layers.0.self_attn.o_proj.weight": ((0, 3), (4, 6)),
        "model.layers.1.mlp.down_proj.weight": ((0, 5), (4, 10)),
        "model.layers.1.mlp.down_proj.bias": None,
        "model.norm.weight": None,
        "lm_head.weight": ((4, 0), (8, 4)),
    }
    assert set(select(SHAPES, RULES, rank=0, size=1).values()) == {None}
    with pytest.raises(ShapeMismatch, match="cannot be cut"):
        select(SHAPES, RULES, rank=0, size=4)


def test_the_stages_of_a_model():
    first = stage(SHAPES, range(1), first=True, last=False)
    last = stage(SHAPES, range(1, 2), first=False, last=True)
    assert first == [n for n in SHAPES if "layers.0" in n or "embed" in n]
    assert last == [n for n in SHAPES if "layers.1" in n or n in ("model.norm.weight", "lm_head.weight")]
