"""Reads on one machine: process_vm_readv from the owner's address space, or from a mapping of its memfd.

The owner takes no part. `Peer` knows whether it lives and whether the secret in its control record still stands; both
are looked at after every batch. Everything is a copy into the reader's own memory: nothing of the owner stays mapped
here, and a memfd that cannot shrink cannot fault a reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import select
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from gyre_transport.backends.channel import ADDRESS_ERRORS, Adopt, Piece
from gyre_transport.control import start_time
from gyre_transport.descriptor import SECRET_BYTES, Address, Descriptor, OnGpu, Shared, host
from gyre_transport.errors import DataError, StaleDescriptor, Unreachable

_MEMFD = "/memfd:gyre-"  # as the kernel shows the name of what `control.memfd` makes
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_VECTOR = 1024  # stretches a system call takes (IOV_MAX)


class ShmChannel:
    """A way to a region of a process on this machine; see `channel.Channel`."""

    window = 4 << 20  # small pieces share a system call and a look at the owner; nothing else is gained by asking ahead
    takes_rows = True

    def __init__(self, descriptor: Descriptor, *, end: float, adopt: Adopt) -> None:
        self._waiting: list[Piece] = []
        self._came = 0  # pieces that have come and were not completed
        self._memory: _Mapped | _Process
        if isinstance(descriptor.location, OnGpu):
            raise Unreachable(f"the memory of {descriptor.owner} is on a GPU; it is read over verbs or tcp")
        self._peer = Peer(descriptor)
        try:
            if isinstance(descriptor.location, Shared):
                self._memory = _Mapped(self._peer.open(descriptor.location.fd))  # if not the region's: the key is gone
            else:
                self._memory = _Process(self._peer, descriptor.location)
        except BaseException:
            self._peer.close()
            raise

    def submit(self, piece: Piece) -> None:
        """Remember the piece."""
        self._waiting.append(piece)

    def complete(self) -> None:
        """Copy all that was submitted, unless the oldest piece has come already."""
        if not self._came:
            try:
                self._memory.copy(self._waiting)
            except OSError as e:
                self._peer.check()
                raise self._peer.refusal(e) from e
            self._peer.check()
            self._came = len(self._waiting)
            self._waiting = []
        self._came -= 1

    def __enter__(self) -> ShmChannel:
        return self

    def __exit__(self, *exc: object) -> None:
        self._memory.close()
        self._peer.close()


class _Process:
    """A region in another process's address space."""

    def __init__(self, peer: Peer, location: Address) -> None:
        self._owner, self._base = peer.owner, location.address

    def copy(self, pieces: list[Piece]) -> None:
        """Copy pieces into their places. Raises `OSError`, `StaleDescriptor`."""
        local = np.array([(p.address, p.into.nbytes) for p in pieces], np.uint64)
        remote = np.array([(self._base + p.offset, p.into.nbytes) for p in pieces], np.uint64)
        rows = [p.rows for p in pieces]
        if max(rows, default=1) > 1:
            remote, local = _by_row(remote, rows, pieces), _by_row(local, rows, None)
        for start in range(0, len(remote), _VECTOR):
            self._call(local[start : start + _VECTOR], remote[start : start + _VECTOR])

    def _call(self, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> None:
        total, count = int(remote[:, 1].sum()), len(remote)
        if not total:
            return
        n = int(_libc().process_vm_readv(self._owner.pid, local.ctypes.data, count, remote.ctypes.data, count, 0))
        if n < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if n < total:  # it stops between two stretches, at the first it cannot read
            whole = int(np.searchsorted(np.cumsum(remote[:, 1]), n, side="right"))
            if not whole and not n:
                raise StaleDescriptor(f"the memory of {self._owner} is shorter than its descriptor says")
            self._call(local[whole:], remote[whole:])

    def close(self) -> None:
        """Nothing is held."""


def _by_row(extents: NDArray[np.uint64], rows: list[int], pieces: list[Piece] | None) -> NDArray[np.uint64]:
    """One extent a row; a piece's stride where `pieces` are given, else its rows are beside each other."""
    counts = np.array(rows, np.uint64)
    lengths = np.repeat(extents[:, 1] // counts, rows)
    strides = np.repeat(np.array([p.stride for p in pieces], np.uint64), rows) if pieces else lengths
    index = np.arange(len(lengths), dtype=np.uint64) - np.repeat(np.cumsum(counts) - counts, rows)
    return np.stack([np.repeat(extents[:, 0], rows) + index * strides, lengths], axis=1)


class _Mapped:
    """A region that is a memfd, mapped."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        safe = bool(size and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        if size and not safe:
            raise DataError("the memory may shrink while it is read; make it with allocate()")
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) if size else None
        self._size = size

    def copy(self, pieces: list[Piece]) -> None:
        """Copy pieces into their places. Raises `OSError`."""
        for piece in pieces:
            length = piece.into.nbytes // piece.rows
            if not length:
                continue
            if self._map is None or piece.offset + (piece.rows - 1) * piece.stride + length > self._size:
                raise OSError(errno.EFAULT, "shorter than the descriptor says")
            source = np.frombuffer(self._map, np.uint8, self._size - piece.offset, piece.offset)
            into = np.frombuffer(piece.into, np.uint8).reshape(piece.rows, length)
            np.copyto(into, as_strided(source, (piece.rows, length), (piece.stride, 1), writeable=False))

    def close(self) -> None:
        """Unmap."""
        if self._map is not None:
            self._map.close()


class Peer:
    """The owner of one descriptor, as it is now. `check` raises `StaleDescriptor` once its key or process is gone."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.owner = descriptor.owner
        if self.owner.host != host():
            raise Unreachable(f"the memory of {self.owner} is on another machine or in another pid namespace")
        self._slot, self._secret = descriptor.slot, descriptor.secret
        self._fds: list[int] = []
        self._ended: select.poll | None = None
        try:
            self._watch()
            self._control = self.open(self.owner.control)
            self.check()  # no other process has the secret: if it stands, this is the owner
        except BaseException:
            self.close()
            raise

    def _watch(self) -> None:
        """Hold the process, so that a look at its life is one system call; where that is refused, /proc is read."""
        with contextlib.suppress(OSError):
            self._fds.append(os.pidfd_open(self.owner.pid))
            self._ended = select.poll()
            self._ended.register(self._fds[-1], select.POLLIN)

    def open(self, number: int) -> int:
        """Open the owner's memfd `number` for reading; closed with this object."""
        path = f"/proc/{self.owner.pid}/fd/{number}"
        try:
            if not os.readlink(path).startswith(_MEMFD):  # another file has the number now: opening it may do harm
                raise self._deregistered()
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise self.refusal(e) from e
        self._fds.append(fd)
        return fd

    def check(self) -> None:
        """Raise `StaleDescriptor` unless the owner lives and the secret stands."""
        if os.pread(self._control, SECRET_BYTES, self._slot * SECRET_BYTES) != self._secret:
            self._alive()
            raise self._deregistered()
        if self._ended is None or self._ended.poll(0):
            self._alive()

    def _alive(self) -> None:
        start = start_time(self.owner.pid)
        if start != self.owner.start:
            became = "ended" if start is None else "ended, and another process has its pid"
            raise StaleDescriptor(f"{self.owner} {became}; its memory is gone: ask its successor for a new descriptor")

    def _deregistered(self) -> StaleDescriptor:
        return StaleDescriptor(f"the memory of {self.owner} was deregistered; ask it for a new descriptor")

    def refusal(self, e: OSError) -> DataError:
        """The error that `e`, from reading the owner's memory, means; raised at once if the owner has ended."""
        if e.errno in (errno.EACCES, errno.EPERM, errno.ENOSYS):
            return Unreachable(
                f"the kernel refuses to read the memory of {self.owner}: {os.strerror(e.errno)}; run both processes as "
                "the same user, allow ptrace between them (kernel.yama.ptrace_scope=0 or 1; in containers "
                "CAP_SYS_PTRACE), or hand over memory made by allocate(); `gyre-transport doctor` shows what works here"
            )
        if e.errno in ADDRESS_ERRORS:
            self._alive()
            return self._deregistered()
        return DataError(f"cannot read the memory of {self.owner}: {os.strerror(e.errno or 0)}")

    def close(self) -> None:
        """Close the files that were opened."""
        while self._fds:
            os.close(self._fds.pop())


def allow_reads() -> bool:
    """Let siblings read this process where Yama restricts that to ancestors; elsewhere that fails and is not needed.

    Returns whether the kernel lets processes of one user read each other, as far as one of them can tell.
    """
    _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    return _readable()


@lru_cache(maxsize=1)
def _readable() -> bool:
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/kernel/yama/ptrace_scope") as f:
        if int(f.read()) > 1:
            return False
    memory = np.zeros(2, np.uint64)
    there, here = (np.array([(memory.ctypes.data + 8 * i, 8)], np.uint64) for i in range(2))  # struct iovec
    return bool(_libc().process_vm_readv(os.getpid(), here.ctypes.data, 1, there.ctypes.data, 1, 0) == 8)


def _libc() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        _loaded = ctypes.CDLL(None, use_errno=True)
        _loaded.process_vm_readv.restype = ctypes.c_ssize_t
        _loaded.process_vm_readv.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
        ]  # fmt: skip
        _loaded.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    return _loaded


_loaded: ctypes.CDLL | None = None
