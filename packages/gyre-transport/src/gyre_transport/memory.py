"""Memory that other processes may read, one-sided: the owner takes no part in a read.

    owner                                            reader (same machine, same user)
    region = allocate(n) | register(array)           read(descriptor, into, deadline=5)
    region.descriptor ── msgpack, over the bus ──▶   for offset, chunk in read_chunks(descriptor, 1 << 20, deadline=5)
    region.close()                                   from then on: StaleDescriptor
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_transport.errors import DataError


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of a process: a restarted process, or another with its pid, is another owner."""

    host: str  # boot id and pid namespace
    pid: int
    start: int  # clock ticks after boot, from /proc/<pid>/stat
    control: int  # file number of its control record


class Shared(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """Memory that was allocated here: file number of its memfd in the owner."""

    fd: int


class Address(msgspec.Struct, frozen=True, kw_only=True, tag="process"):
    """Memory that was there already: its address in the owner."""

    address: int


Location = Shared | Address


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, tag="descriptor"):
    """The right to read a region, and how. Whoever has it can read; keep it on the bus."""

    owner: Owner
    key: bytes  # 16 random bytes; gone from the owner's control record when the region is revoked
    slot: int  # where in the control record
    location: Location
    nbytes: int
    dtype: str | None = None  # safetensors name; None: bytes
    shape: tuple[int, ...] | None = None

    @property
    def backend(self) -> str:
        """How it is read: "shm" or "process"."""
        return "shm" if isinstance(self.location, Shared) else "process"


class Region:
    """Registered memory of this process; a context manager. Made by `allocate` and `register`.

    Revoke or close before the memory changes its meaning: a reader checks the key after it has read.
    """

    @property
    def descriptor(self) -> Descriptor:
        """What a reader needs. Raises `DataError` when the region is revoked or closed."""
        raise DataError("not implemented")

    @property
    def buffer(self) -> memoryview:
        """The memory, [nbytes], format "B"."""
        raise DataError("not implemented")

    def array(self, dtype: Any = np.uint8, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """The memory as an array (default: as many elements as fit). Raises `ShapeMismatch`."""
        raise DataError("not implemented")

    def revoke(self) -> None:
        """Make the descriptor stale; the memory stays. Idempotent."""

    def renew(self) -> Descriptor:
        """Give the same memory a new descriptor; the old one is revoked."""
        raise DataError("not implemented")

    def close(self) -> None:
        """Revoke, and release what `allocate` made (once the arrays over it are gone). Idempotent."""

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def allocate(nbytes: int) -> Region:
    """Shared memory of `nbytes` (0 allowed), zeroed. Raises `DataError` when there is none."""
    raise DataError("not implemented")


def register(memory: Any) -> Region:
    """Make existing contiguous memory readable: numpy array, torch CPU tensor, buffer. Never copies.

    The region keeps `memory` alive. Raises `ShapeMismatch` for what is not contiguous."""
    raise DataError("not implemented")


def read(descriptor: Descriptor, into: Any, *, offset: int | None = None, deadline: float) -> None:
    """Copy a region into local memory `into` (writable array, tensor or buffer).

    offset: None reads the whole region, and size, dtype and shape must match (untyped bytes match any); an int reads
        `into`'s size from that byte on.
    deadline: seconds from now.
    Raises `ShapeMismatch`, `StaleDescriptor`, `Unreachable` or `DeadlineExceeded`; `into` then holds no meaning.
    """
    raise DataError("not implemented")


def read_chunks(descriptor: Descriptor, chunk_bytes: int, deadline: float) -> Iterator[tuple[int, memoryview]]:
    """Read a region piece by piece: (byte offset, up to `chunk_bytes` bytes), in order; each valid until the next.

    Every piece is checked after it is read; a later one may still raise: what was added so far is then void.
    deadline: seconds from the first piece to the last, the consumer's time included. Raises as `read`.
    """
    raise DataError("not implemented")
