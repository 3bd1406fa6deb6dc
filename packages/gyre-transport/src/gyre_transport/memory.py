"""Memory that other processes may read, one-sided: the owner takes no part in a read.

    owner                                            reader (same machine, same user)
    region = allocate(n) | register(array)           read(descriptor, into, deadline=5)
    region.descriptor ── msgpack, over the bus ──▶   for offset, piece in read_chunks(descriptor, 1 << 20, deadline=5)
    region.close()                                   from then on: StaleDescriptor

Two ways to the bytes, chosen by how the memory came to be: `allocate` makes a memfd, read with preadv; `register` takes
what is there, read with process_vm_readv, which the kernel may refuse (`Unreachable`). Either is a copy into the
reader's own memory: nothing of the owner stays mapped in a reader, and an owner that dies cannot fault one.
`gyre_transport.control` says how a read is known to be of the right memory. Keys keep honest readers from stale memory;
between processes of one user the kernel knows no stronger wall.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_transport.buffers import view
from gyre_transport.control import Owner, Peer, Record, memfd
from gyre_transport.errors import DataError, DeadlineExceeded, ShapeMismatch, StaleDescriptor

_CHUNK = 8 << 20  # bytes between two looks at the clock and the key
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


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

    Revoke or close before the memory changes its meaning: a reader checks the key after it has read. A region that is
    dropped without `close` is closed.
    """

    def __init__(
        self,
        memory: Any,
        buffer: memoryview,
        location: Location,
        *,
        fd: int | None = None,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self._closed = True  # until the slot is taken
        self._memory, self._buffer, self._location, self._fd = memory, buffer, location, fd
        self._dtype, self._shape = dtype, shape
        self._descriptor: Descriptor | None = None
        self._nbytes = buffer.nbytes
        self._record, self._slot = Record.take()
        self._closed = False
        self.renew()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @property
    def descriptor(self) -> Descriptor:
        """What a reader needs. Raises `DataError` when the region is revoked or closed."""
        if self._descriptor is None:
            raise DataError(f"the region of {self._nbytes:,} bytes is revoked or closed; renew it, or register again")
        return self._descriptor

    @property
    def buffer(self) -> memoryview:
        """The memory, [nbytes], format "B". Raises `DataError` when the region is closed."""
        self._open()
        return self._buffer

    def array(self, dtype: Any = np.uint8, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """The memory's beginning as an array (default shape: as many elements as fit). Raises `ShapeMismatch`."""
        self._open()
        kind = np.dtype(dtype)
        shape = (self._nbytes // kind.itemsize,) if shape is None else shape
        count = int(np.prod(shape, dtype=np.int64))
        if count * kind.itemsize > self._nbytes or count < 0:
            raise ShapeMismatch(
                f"{shape} of {kind} takes {count * kind.itemsize:,} bytes, not {self._nbytes:,} or less"
            )
        flat = np.frombuffer(self._buffer, kind, count) if count else np.empty(0, kind)
        return flat.reshape(shape)

    def revoke(self) -> None:
        """Make the descriptor stale; the memory stays. Idempotent."""
        if not self._closed:
            self._record.revoke(self._slot)
            self._descriptor = None

    def renew(self) -> Descriptor:
        """Give the same memory a new descriptor; the old one is revoked. Raises `DataError` when closed."""
        self._open()
        self._descriptor = Descriptor(
            owner=self._record.owner,
            key=self._record.grant(self._slot),
            slot=self._slot,
            location=self._location,
            nbytes=self._nbytes,
            dtype=self._dtype,
            shape=self._shape,
        )
        return self._descriptor

    def close(self) -> None:
        """Revoke, and release what `allocate` made (once the arrays over it are gone). Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._descriptor = None
        self._record.release(self._slot)  # the key first, then the memory
        if self._fd is not None:
            os.close(self._fd)
        self._buffer = memoryview(b"")
        memory, self._memory = self._memory, None
        if isinstance(memory, mmap.mmap) and self._fd is not None:
            with contextlib.suppress(BufferError):  # arrays over it still live: the last one unmaps it
                memory.close()

    def _open(self) -> None:
        if self._closed:
            raise DataError("the region is closed; allocate or register again")

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


def allocate(nbytes: int) -> Region:
    """Shared memory of `nbytes` (0 allowed), zeroed. Raises `DataError` when there is none."""
    if nbytes < 0:
        raise DataError(f"expected a size in bytes, got {nbytes!r}")
    fd = memfd("memory", nbytes)
    try:
        memory = mmap.mmap(fd, nbytes) if nbytes else bytearray()
        return Region(memory, memoryview(memory), Shared(fd=fd), fd=fd)
    except BaseException as e:
        os.close(fd)
        if isinstance(e, OSError):
            raise DataError(f"cannot map {nbytes:,} bytes of shared memory: {e}; free memory or ask for less") from e
        raise


def register(memory: Any) -> Region:
    """Make existing contiguous memory readable: numpy array, torch CPU tensor, buffer. Never copies.

    The region keeps `memory` alive; do not resize it. Raises `ShapeMismatch` for what is not contiguous.
    """
    local = view(memory)
    # Where Yama restricts ptrace to descendants this lets siblings read; elsewhere it fails and is not needed.
    _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    return Region(memory, local.bytes, Address(address=local.address), dtype=local.dtype, shape=local.shape)


def read(descriptor: Descriptor, into: Any, *, offset: int | None = None, deadline: float) -> None:
    """Copy a region into local memory `into` (writable array, tensor or buffer).

    offset: None reads the whole region, and size, dtype and shape must match (untyped bytes and U8 match any); an int
        reads `into`'s size from that byte on.
    deadline: seconds from now.
    Raises `ShapeMismatch`, `StaleDescriptor`, `Unreachable` or `DeadlineExceeded`; `into` then holds no meaning.
    """
    end = time.monotonic() + deadline
    local = view(into, writable=True)
    _match(descriptor, local.nbytes, local.dtype, local.shape, offset)
    with _Reader(descriptor, end) as reader:
        for start in range(0, local.nbytes, _CHUNK):
            reader.copy((offset or 0) + start, local.bytes[start : start + _CHUNK], local.address + start)


def read_chunks(descriptor: Descriptor, chunk_bytes: int, deadline: float) -> Iterator[tuple[int, memoryview]]:
    """Read a region piece by piece: (byte offset, up to `chunk_bytes` bytes), in order; each valid until the next.

    Every piece is checked after it is read; a later one may still raise: what was added so far is then void.
    deadline: seconds from the first piece to the last, the consumer's time included. Raises as `read`.
    """
    end = time.monotonic() + deadline
    if chunk_bytes < 1:
        raise ShapeMismatch(f"expected chunks of at least 1 byte, got {chunk_bytes!r}")
    local = view(bytearray(min(chunk_bytes, descriptor.nbytes)), writable=True)
    with _Reader(descriptor, end) as reader:
        for start in range(0, descriptor.nbytes, chunk_bytes):
            piece = local.bytes[: min(chunk_bytes, descriptor.nbytes - start)]
            for at in range(0, piece.nbytes, _CHUNK):
                reader.copy(start + at, piece[at : at + _CHUNK], local.address + at)
            yield start, piece


def _match(
    descriptor: Descriptor, nbytes: int, dtype: str | None, shape: tuple[int, ...] | None, offset: int | None
) -> None:
    """Refuse a destination that is not what was registered, before anything moves."""
    if offset is not None:
        if offset < 0 or offset + nbytes > descriptor.nbytes:
            raise ShapeMismatch(
                f"bytes [{offset:,}, {offset + nbytes:,}) are not in a region of {descriptor.nbytes:,}; read inside it"
            )
    elif nbytes != descriptor.nbytes:
        raise ShapeMismatch(
            f"the region has {descriptor.nbytes:,} bytes, the destination {nbytes:,}; give an offset to read a part"
        )
    if dtype is None or descriptor.dtype is None:
        return
    if dtype != descriptor.dtype and "U8" not in (dtype, descriptor.dtype):
        raise ShapeMismatch(f"the region holds {descriptor.dtype}, the destination {dtype}; read into the same dtype")
    if offset is None and dtype == descriptor.dtype and shape != descriptor.shape:
        raise ShapeMismatch(f"the region has shape {descriptor.shape}, the destination {shape}; reshape it first")


class _Reader:
    """One read: pieces are copied, and the key and the clock looked at after each."""

    def __init__(self, descriptor: Descriptor, end: float) -> None:
        self._descriptor, self._end = descriptor, end
        self._clock(0)
        self._peer = Peer(descriptor.owner, descriptor.slot, descriptor.key)
        self._copy: Callable[[int, memoryview, int], int] = self._from_process
        if isinstance(descriptor.location, Shared):
            try:
                self._file = self._peer.open(descriptor.location.fd)  # if not the region's, the key is gone by now
            except BaseException:
                self._peer.close()
                raise
            self._copy = self._from_file

    def copy(self, offset: int, into: memoryview, address: int) -> None:
        """Copy the region's bytes from `offset` on into all of `into`, which lies at `address`."""
        done = 0
        while done < into.nbytes:
            try:
                n = self._copy(offset + done, into[done:], address + done)
            except OSError as e:
                self._peer.check()
                raise self._peer.refusal(e) from e
            if n == 0:
                raise StaleDescriptor(f"the memory of {self._peer.owner} is shorter than its descriptor says")
            done += n
        self._peer.check()
        self._clock(offset + done)

    def _from_file(self, offset: int, into: memoryview, _: int) -> int:
        return os.preadv(self._file, [into], offset)

    def _from_process(self, offset: int, into: memoryview, address: int) -> int:
        location = self._descriptor.location
        assert isinstance(location, Address)  # noqa: S101  (the other kind is read from its file)
        local = _Extent(address, into.nbytes)
        remote = _Extent(location.address + offset, into.nbytes)
        n = int(_libc().process_vm_readv(self._peer.owner.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
        if n < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return n

    def _clock(self, done: int) -> None:
        if time.monotonic() >= self._end:
            raise DeadlineExceeded(
                f"{done:,} of {self._descriptor.nbytes:,} bytes of {self._descriptor.owner} were read before the "
                "deadline; allow more time"
            )

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._peer.close()


class _Extent(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _libc() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        _loaded = ctypes.CDLL(None, use_errno=True)
        pointer = ctypes.POINTER(_Extent)
        _loaded.process_vm_readv.restype = ctypes.c_ssize_t
        _loaded.process_vm_readv.argtypes = [
            ctypes.c_int, pointer, ctypes.c_ulong, pointer, ctypes.c_ulong, ctypes.c_ulong,
        ]  # fmt: skip
        _loaded.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    return _loaded


_loaded: ctypes.CDLL | None = None
