"""What a reader wants of a snapshot: all tensors where they are, or some parts of some, beside each other."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from gyre_transport.buffers import DTYPES
from gyre_transport.errors import ShapeMismatch
from gyre_transport.layout import Box, Stretch, stretches
from gyre_transport.manifest import Manifest, arrange


class Wanted:
    """Which bytes of a version go where in a reader's buffer. Raises `ShapeMismatch`: no such tensor, or part of it."""

    def __init__(self, manifest: Manifest, select: Mapping[str, Box | None] | None) -> None:
        self.entries, self.nbytes = manifest.entries, manifest.nbytes
        self.stretches: list[tuple[int, Stretch]] | None = None  # place in the buffer, bytes of the region; None: all
        self.whole = manifest.entries  # of `entries`, those with a checksum
        if select is None:
            return
        known = {e.name: e for e in manifest.entries}
        if missing := [name for name in select if name not in known]:
            raise ShapeMismatch(f"{manifest.content} holds no {missing[0]!r} ({len(missing)} unknown names in all)")
        shapes = {name: known[name].shape if box is None else box.shape for name, box in select.items()}
        sizes = {name: int(np.prod(shape)) * DTYPES[known[name].dtype][0] for name, shape in shapes.items()}
        offsets, self.nbytes = arrange(sizes.values())
        self.entries = tuple(
            msgspec.structs.replace(known[name], offset=offset, nbytes=sizes[name], shape=shapes[name])
            for name, offset in zip(select, offsets, strict=True)
        )
        self.whole = tuple(e for e in self.entries if e.nbytes == known[e.name].nbytes)
        self.stretches = []
        for entry in self.entries:
            there, at = known[entry.name], entry.offset
            box = select[entry.name] or Box((0,) * len(there.shape), there.shape)
            try:
                for s in stretches(there.shape, box, DTYPES[there.dtype][0]):
                    self.stretches.append((at, s._replace(offset=there.offset + s.offset)))
                    at += s.nbytes
            except ShapeMismatch as e:
                raise ShapeMismatch(f"{entry.name!r} of {manifest.content}: {e}") from None
