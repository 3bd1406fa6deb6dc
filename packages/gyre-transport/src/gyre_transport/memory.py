"""Memory that other processes may read, one-sided: the owner's program takes no part in a read.

    owner                                            reader
    region = allocate(n) | register(array)           read(descriptor, into, deadline=5)
    region.descriptor ── msgpack, over the bus ──▶   transfer = read_many([Part(descriptor, into), …], deadline=5)
    region.close()                                   from then on: StaleDescriptor

On one machine the reader copies by itself, with process_vm_readv; where the kernel does not allow that, `allocate`
makes a memfd, read with preadv. From elsewhere, or when neither works, a thread of the owner serves the bytes over tcp
(`gyre_transport.backends`). `gyre_transport.control` says how a read is known to be of the right
memory. Between processes of one user on one machine the kernel knows no stronger wall than honesty; over tcp the key is
proven before a byte is served.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gyre_transport.backends.shm import allow_reads
from gyre_transport.buffers import aligned, anywhere, on_gpu, view
from gyre_transport.control import Calls, Record, memfd
from gyre_transport.descriptor import Address, Content, Descriptor, Location, OnGpu, Shared
from gyre_transport.endpoint import serve
from gyre_transport.errors import DataError, ShapeMismatch
from gyre_transport.frozen import attach
from gyre_transport.gpu.memory import GpuBytes, settle
from gyre_transport.reads import Part, read, read_chunks, read_many
from gyre_transport.transfer import Transfer

__all__ = [
    "Address",
    "Content",
    "Descriptor",
    "Part",
    "Region",
    "Shared",
    "Transfer",
    "allocate",
    "read",
    "read_chunks",
    "read_many",
    "register",
]


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
        content: Content | None = None,
        calls: Calls | None = None,
    ) -> None:
        self._closed = True  # until the slot is taken
        self._memory, self._buffer, self._location, self._fd = memory, buffer, location, fd
        self._calls = calls
        self._dtype, self._shape, self._content = dtype, shape, content
        self._descriptor: Descriptor | None = None
        self._nbytes = buffer.nbytes
        self._record, self._slot = Record.take()
        self._closed = False
        self._endpoint = serve(self._record)
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
        """The memory, [nbytes], format "B". Raises `DataError` when the region is closed, or on a GPU."""
        self._open()
        if on_gpu(self._buffer):
            raise DataError("the region is on a GPU; look at the tensor that was registered")
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
        flat = np.frombuffer(self.buffer, kind, count) if count else np.empty(0, kind)
        return flat.reshape(shape)

    def revoke(self) -> None:
        """Make the descriptor stale; the memory stays. Idempotent."""
        if not self._closed:
            self._record.revoke(self._slot)
            self._descriptor = None

    def renew(self, content: Content | None = None) -> Descriptor:
        """Give the same memory a new descriptor, of `content` if given; the old one is revoked.

        Of GPU memory: what this thread has queued on the GPU is over when this returns. Raises `DataError` when closed.
        """
        self._open()
        if on_gpu(self._buffer):
            settle(cast(GpuBytes, self._buffer).obj)
        self._descriptor = None
        self._content = content or self._content
        self._descriptor = Descriptor(
            owner=self._record.owner,
            key=self._record.grant(self._slot, self._buffer, self._content, self._calls),
            slot=self._slot,
            location=self._location,
            nbytes=self._nbytes,
            dtype=self._dtype,
            shape=self._shape,
            content=self._content,
            endpoint=self._endpoint,
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


def allocate(
    nbytes: int, *, content: Content | None = None, shared: bool | None = None, calls: Calls | None = None
) -> Region:
    """Make memory of `nbytes` (0 allowed), zeroed, to be read by others. Raises `DataError` when there is none.

    shared: a memfd, which readers open; else private memory in huge pages, which they reach into, twice as fast. None:
    private where the kernel allows that. calls: handles what readers say (`notices.Notices`).
    """
    if nbytes < 0:
        raise DataError(f"expected a size in bytes, got {nbytes!r}")
    if not (allow_reads() if shared is None else not shared):
        return _allocate_shared(nbytes, content, calls)
    memory = aligned(nbytes)
    local = view(memory)
    return Region(memory, local.bytes, Address(address=local.address), content=content, calls=calls)


def _allocate_shared(nbytes: int, content: Content | None, calls: Calls | None) -> Region:
    fd = memfd("memory", nbytes)
    try:
        memory = mmap.mmap(fd, nbytes) if nbytes else bytearray()
        return Region(memory, memoryview(memory), Shared(fd=fd), fd=fd, content=content, calls=calls)
    except BaseException as e:
        os.close(fd)
        if isinstance(e, OSError):
            raise DataError(f"cannot map {nbytes:,} bytes of shared memory: {e}; free memory or ask for less") from e
        raise


def register(memory: Any, *, content: Content | None = None, calls: Calls | None = None) -> Region:
    """Make existing contiguous memory readable: numpy array, torch tensor, buffer. Never copies.

    A tensor may be on a GPU. Where the driver allows, the network card reads it there over RDMA; everyone else is
    served over tcp, through a little pinned memory.

    The region keeps `memory` alive; do not resize it. calls: handles what readers say (`notices.Notices`). Raises
    `ShapeMismatch` for what is not contiguous.
    """
    local = anywhere(memory)
    allow_reads()
    location = OnGpu() if on_gpu(local.bytes) else Address(address=local.address)
    return Region(memory, local.bytes, location, dtype=local.dtype, shape=local.shape, content=content, calls=calls)


def publish(fd: int, *, content: Content | None = None, calls: Calls | None = None) -> Region:
    """Make frozen memory (`frozen.Draft.freeze`) readable; readers on this machine may map it. Takes `fd` over."""
    try:
        memory = attach(fd, writable=False)
        return Region(memory, memoryview(memory), Shared(fd=fd), fd=fd, content=content, calls=calls)
    except BaseException:
        os.close(fd)
        raise
