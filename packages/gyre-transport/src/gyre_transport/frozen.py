"""Memory that is written once and cannot change any more: a memfd, sealed.

    draft = Draft(nbytes)
    draft.array()[:] = …
    fd = draft.freeze()            from here on the kernel refuses every write, also this process's
    memory = attach(fd)            a private view: what is written to it is this process's alone

Whoever has such a file open may map it instead of copying it: it holds the same bytes as long as it is mapped, whatever
becomes of its owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gyre_transport.control import memfd
from gyre_transport.errors import DataError

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Draft:
    """`nbytes` of memory that can still be written; `freeze` or `close` it. Raises `DataError` when there is none."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = memfd("memory", nbytes)
        self._map: mmap.mmap | None = None
        try:
            if nbytes:
                self._map = mmap.mmap(self._fd, nbytes)
        except OSError as e:
            self.close()
            raise DataError(f"cannot allocate {nbytes:,} bytes of shared memory: {e}; free memory") from e

    def array(self) -> NDArray[np.uint8]:
        """The memory, [nbytes]; let go of it before `freeze`."""
        return np.empty(0, np.uint8) if self._map is None else np.frombuffer(self._map, np.uint8)

    def freeze(self) -> int:
        """Seal the memory; returns its file number, which is the caller's to close.

        Raises `DataError` while an array over it lives.
        """
        try:
            if self._map is not None:
                self._unmap(self._map)
                self._map = None
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except (BufferError, OSError) as e:
            raise DataError(f"the memory cannot be frozen: {e}; let go of the arrays over it first") from e
        fd, self._fd = self._fd, -1
        return fd

    def take(self) -> memoryview:
        """The memory as it is, never to be frozen."""
        memory = (
            self._map if self._map is not None else mmap.mmap(self._fd, self.nbytes) if self.nbytes else bytearray()
        )
        self._map = None
        return memoryview(memory)

    @staticmethod
    def _unmap(memory: mmap.mmap) -> None:
        try:
            memory.close()
        except BufferError:  # a read that failed, with its frames, may not have been collected yet
            gc.collect()
            memory.close()

    def close(self) -> None:
        """Give the memory up, unless it was frozen. Idempotent."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # an array over it still lives: the last one unmaps it
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_frozen(fd: int) -> bool:
    """Whether the file can never change."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no memfd
        return False


def attach(fd: int, *, writable: bool = True) -> mmap.mmap | bytearray:
    """Map a frozen file. writable: writes are this mapping's alone. Raises `DataError`."""
    size = os.fstat(fd).st_size
    if not size:
        return bytearray()
    try:
        if writable:
            return mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return mmap.mmap(fd, size, mmap.MAP_SHARED if _pins_as_it_is() else mmap.MAP_PRIVATE, mmap.PROT_READ)
    except OSError as e:
        raise DataError(f"cannot map {size:,} bytes of shared memory: {e}") from e


@lru_cache(maxsize=1)
def _pins_as_it_is() -> bool:
    """Whether an RDMA device can pin shared memory that is mapped read-only.

    Before Linux 6.2 the kernel asks for the right to write, even to pin memory for reads: it grants that for a private
    mapping only, whose pages it then copies.
    """
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (6, 2)
