"""Reads on one machine: process_vm_readv from the owner's address space, or preadv from its memfd.

The owner takes no part. `Peer` knows whether it lives and whether the secret in its control record still stands; both
are looked at after every piece. Everything is a copy into the reader's own memory: nothing of the owner stays mapped
here, and an owner that dies cannot fault a reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
from collections import deque
from functools import lru_cache

from gyre_transport.backends.channel import ADDRESS_ERRORS, Adopt, Piece
from gyre_transport.control import start_time
from gyre_transport.descriptor import SECRET_BYTES, Address, Descriptor, Shared, host
from gyre_transport.errors import DataError, StaleDescriptor, Unreachable

_MEMFD = "/memfd:gyre-"  # as the kernel shows the name of what `control.memfd` makes
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class ShmChannel:
    """A way to a region of a process on this machine; see `channel.Channel`."""

    window = 0  # nothing is gained by asking ahead

    def __init__(self, descriptor: Descriptor, *, end: float, adopt: Adopt) -> None:
        self._descriptor = descriptor
        self._waiting: deque[Piece] = deque()
        self._peer = Peer(descriptor)
        self._copy = self._from_process
        if isinstance(descriptor.location, Shared):
            try:
                self._file = self._peer.open(descriptor.location.fd)  # if not the region's, the key is gone by now
            except BaseException:
                self._peer.close()
                raise
            self._copy = self._from_file

    def submit(self, piece: Piece) -> None:
        """Remember the piece."""
        self._waiting.append(piece)

    def complete(self) -> None:
        """Copy the oldest piece."""
        piece = self._waiting.popleft()
        done = 0
        while done < piece.into.nbytes:
            try:
                n = self._copy(piece, done)
            except OSError as e:
                self._peer.check()
                raise self._peer.refusal(e) from e
            if n == 0:
                raise StaleDescriptor(f"the memory of {self._peer.owner} is shorter than its descriptor says")
            done += n
        self._peer.check()

    def _from_file(self, piece: Piece, done: int) -> int:
        return os.preadv(self._file, [piece.into[done:]], piece.offset + done)

    def _from_process(self, piece: Piece, done: int) -> int:
        location = self._descriptor.location
        assert isinstance(location, Address)  # noqa: S101  (the other kind is read from its file)
        local = _Extent(piece.address + done, piece.into.nbytes - done)
        remote = _Extent(location.address + piece.offset + done, piece.into.nbytes - done)
        n = int(_libc().process_vm_readv(self._peer.owner.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
        if n < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return n

    def __enter__(self) -> ShmChannel:
        return self

    def __exit__(self, *exc: object) -> None:
        self._peer.close()


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
            self._alive()
            self._control = self.open(self.owner.control)
            self.check()
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
    here, there = ctypes.c_uint64(1), ctypes.c_uint64(0)
    source, target = (_Extent(ctypes.addressof(c), 8) for c in (here, there))
    return bool(_libc().process_vm_readv(os.getpid(), ctypes.byref(target), 1, ctypes.byref(source), 1, 0) == 8)


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
