"""What is in a snapshot and where it lies in its region."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gyre_transport.buffers import nbytes
from gyre_transport.descriptor import Content, Descriptor
from gyre_transport.errors import ShapeMismatch

_ALIGN = 64  # bytes: a tensor of any dtype is aligned in a pulled buffer


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a snapshot: `nbytes` at `offset` of the region, row-major."""

    name: str
    dtype: str  # safetensors name: "BF16", "F32", …
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int  # crc32 of its bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    """What is in a snapshot and where; `msgspec.msgpack.encode` / `decode(..., type=Manifest)`."""

    model: str
    version: int
    entries: tuple[Entry, ...]
    descriptor: Descriptor  # the region with all tensors
    head: Descriptor  # 8 bytes, int64: the version the source published last
    nbytes: int  # of the region, from its beginning

    @property
    def content(self) -> Content:
        """What its region holds."""
        return Content(model=self.model, version=self.version)

    def check(self) -> None:
        """Raise `ShapeMismatch` when it contradicts itself."""
        if self.descriptor.content != self.content:
            raise ShapeMismatch(f"the manifest of {self.content} describes memory of {self.descriptor.content}")
        for e in self.entries:
            if e.nbytes != nbytes(e.dtype, e.shape) or e.offset < 0 or e.offset + e.nbytes > self.nbytes:
                raise ShapeMismatch(f"the manifest of {self.model!r} contradicts itself at {e.name!r}: {e!r}")
        if not 0 <= self.nbytes <= self.descriptor.nbytes:
            raise ShapeMismatch(
                f"the manifest of {self.model!r} announces {self.nbytes:,} bytes in a region of "
                f"{self.descriptor.nbytes:,}"
            )


def arrange(sizes: Iterable[int]) -> tuple[Sequence[int], int]:
    """Aligned offsets of tensors of `sizes` bytes, and the bytes they take together."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end
