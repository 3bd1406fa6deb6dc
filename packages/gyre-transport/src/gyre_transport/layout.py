"""Which bytes of a tensor a rank of another layout needs: shapes in, stretches out; no I/O.

    box = shard((576, 1536), dim=1, rank=0, size=2)       columns 0 to 767
    stretches((576, 1536), box, itemsize=2)               576 rows of 1536 bytes, 3072 bytes apart: one stretch
    select(shapes, RULES, rank=0, size=2)                 name -> box, for a whole model

Tensor parallel ranks cut weights along one dimension; pipeline stages take some of the names (`stage`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from gyre_transport.errors import ShapeMismatch

# Names of Hugging Face's Llama and Qwen families -> the dimension Megatron's tensor parallel layers cut; others: whole
RULES: tuple[tuple[str, int], ...] = (
    ("*.q_proj.*", 0),
    ("*.k_proj.*", 0),
    ("*.v_proj.*", 0),
    ("*.gate_proj.*", 0),
    ("*.up_proj.*", 0),
    ("*.o_proj.weight", 1),
    ("*.down_proj.weight", 1),
    ("*embed_tokens.weight", 0),
    ("lm_head.weight", 0),
)
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Stretch(NamedTuple):
    """Bytes of a region: `rows` times `length` bytes, the first at `offset`, the next ones `stride` bytes further."""

    offset: int
    length: int
    rows: int = 1
    stride: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.length * self.rows

    def within(self, nbytes: int) -> bool:
        """Whether all of it lies in a region of `nbytes`, and a row exists."""
        return self.rows > 0 and self.offset + (self.rows - 1) * self.stride + self.length <= nbytes


class Box(NamedTuple):
    """A part of a tensor: elements [start[d], stop[d]) of each dimension d."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of `shape` has all of it."""
        return len(self.start) == len(self.stop) == len(shape) and all(
            0 <= a <= b <= n for a, b, n in zip(self.start, self.stop, shape, strict=True)
        )


def shard(shape: tuple[int, ...], dim: int, rank: int, size: int) -> Box:
    """The part of `rank` when dimension `dim` is cut into `size` equal ones. Raises `ShapeMismatch`."""
    if not 0 <= rank < size or not 0 <= dim < len(shape) or shape[dim] % size:
        raise ShapeMismatch(
            f"dimension {dim} of {shape} cannot be cut into {size} equal parts with a rank {rank} among them"
        )
    part = shape[dim] // size
    start, stop = [0] * len(shape), list(shape)
    start[dim], stop[dim] = rank * part, (rank + 1) * part
    return Box(tuple(start), tuple(stop))


def select(
    shapes: Mapping[str, tuple[int, ...]], rules: Iterable[tuple[str, int]], *, rank: int, size: int
) -> dict[str, Box | None]:
    """What a tensor parallel rank takes of each tensor; None: all of it. The first rule that matches a name decides.

    A rule's dimension that a tensor does not have (a bias cut by dimension 1) leaves it whole. Raises `ShapeMismatch`
    where a dimension does not divide.
    """
    rules = tuple(rules)

    def part(name: str, shape: tuple[int, ...]) -> Box | None:
        for pattern, dim in rules:
            if fnmatchcase(name, pattern) and dim < len(shape):
                return shard(shape, dim, rank, size) if size > 1 else None
        return None

    return {name: part(name, shape) for name, shape in shapes.items()}


def stage(names: Iterable[str], layers: range, *, first: bool, last: bool) -> list[str]:
    """Names that a pipeline stage with `layers` takes: theirs, the embedding if first, the rest if last."""

    def mine(name: str) -> bool:
        if (found := _LAYER.search(name)) is not None:
            return int(found[1]) in layers
        return first if "embed_tokens" in name else last

    return [name for name in names if mine(name)]


def stretches(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[Stretch]:
    """The bytes of `box` in a row-major tensor of `shape`, in the order of the box's own elements.

    One stretch for any part that is cut along one dimension. Raises `ShapeMismatch` when the box is not inside.
    """
    if not box.inside(shape):
        raise ShapeMismatch(f"the part {box} is not inside a tensor of {shape}")
    if not math.prod(box.shape):
        return
    strides = [math.prod(shape[d + 1 :]) * itemsize for d in range(len(shape))]
    whole = [n == m for n, m in zip(box.shape, shape, strict=True)]
    inner = len(shape)  # dimensions from here on are one run of bytes
    while inner and (inner == len(shape) or whole[inner]):
        inner -= 1
    length = math.prod(box.shape[inner:]) * itemsize
    outer = inner  # dimensions from here to `inner` are rows of one stride
    while outer and (outer == inner or whole[outer]):
        outer -= 1
    rows, stride = math.prod(box.shape[outer:inner]), strides[inner - 1] if inner else 0
    begin = sum(a * s for a, s in zip(box.start, strides, strict=True))
    for index in itertools.product(*(range(n) for n in box.shape[:outer])):
        offset = begin + sum(i * s for i, s in zip(index, strides, strict=False))
        yield Stretch(offset, length, rows, stride if rows > 1 else 0)
