"""Who owns registered memory, and whether a key still opens it.

Each process that registers memory holds one control record: a memfd of 16-byte slots, one a region, a slot's bytes
being the key of the region's only valid descriptor (zeros: none). A reader opens it through /proc/<pid>/fd and compares
the key before it reads, after every piece and at the end. The owner takes the key away before the memory is freed,
changed or given another meaning; so bytes that were read while the key still stood are the registered ones.

Nothing here has a name in a file system: a memfd lives as long as its owner, whatever ended it (`kill -9` included),
and there is nothing to sweep. Keys are written and compared by system calls, which also order them against the bytes.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from functools import lru_cache

import msgspec

from gyre_transport.errors import DataError, StaleDescriptor, Unreachable

KEY_BYTES = 16
_PREFIX = "/memfd:gyre-"  # as the kernel shows the name of what `memfd` makes
_NO_KEY = bytes(KEY_BYTES)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of a process: a restarted process, or another with its pid, is another owner."""

    host: str  # boot id and pid namespace
    pid: int
    start: int  # clock ticks after boot, from /proc/<pid>/stat
    control: int  # file number of its control record

    def __str__(self) -> str:
        return f"process {self.pid}"


@lru_cache(maxsize=1)
def host() -> str:
    """Identity of this machine since its boot, and of this process's pid namespace."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{f.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started; None when there is no such process, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZXx" else int(fields[19])


def memfd(name: str, nbytes: int) -> int:
    """A new anonymous file of `nbytes`, closed on exec. Raises `DataError`."""
    fd = os.memfd_create(f"gyre-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except (OSError, OverflowError) as e:
        os.close(fd)
        raise DataError(f"cannot allocate {nbytes:,} bytes of shared memory: {e}; free memory or ask for less") from e
    return fd


class Record:
    """Owner side: this process's control record. Use `Record.current()`."""

    _lock = threading.Lock()
    _current: Record | None = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        start = start_time(self._pid)
        if start is None:
            raise DataError("cannot read /proc/self/stat; registered memory needs a mounted /proc")
        self._fd = memfd("control", 0)
        self.owner = Owner(host=host(), pid=self._pid, start=start, control=self._fd)
        self._used: set[int] = set()

    @classmethod
    def take(cls) -> tuple[Record, int]:
        """A free slot in this process's record; give it back with `release`."""
        with cls._lock:
            record = cls._current = cls._current or cls()
            slot = next(i for i in range(len(record._used) + 1) if i not in record._used)
            record._used.add(slot)
            return record, slot

    def grant(self, slot: int) -> bytes:
        """Put a fresh key into `slot` and return it. Raises `DataError` in a forked child (its parent's record)."""
        if os.getpid() != self._pid:
            raise DataError(f"the region belongs to process {self._pid}, which forked this one; register it here")
        key = secrets.token_bytes(KEY_BYTES)
        os.pwrite(self._fd, key, slot * KEY_BYTES)
        return key

    def revoke(self, slot: int) -> None:
        """Take the key of `slot` away. Nothing in a forked child: the record is its parent's."""
        if os.getpid() == self._pid:
            os.pwrite(self._fd, _NO_KEY, slot * KEY_BYTES)

    def release(self, slot: int) -> None:
        """Revoke and free `slot`; the record goes with its last slot."""
        if os.getpid() != self._pid:
            return
        self.revoke(slot)
        with Record._lock:
            self._used.discard(slot)
            if not self._used:
                os.close(self._fd)
                Record._current = None

    @classmethod
    def _forked(cls) -> None:
        cls._lock = threading.Lock()
        cls._current = None


os.register_at_fork(after_in_child=Record._forked)


class Peer:
    """Reader side: the owner of one descriptor, as it is now; a context manager.

    `check` raises `StaleDescriptor` as soon as the key or the process is gone.
    """

    def __init__(self, owner: Owner, slot: int, key: bytes) -> None:
        if owner.host != host():
            raise Unreachable(
                f"the memory of {owner} is on another machine or in another pid namespace; this version reads shared "
                "memory only: run both processes on one machine, and containers with a common pid namespace"
            )
        self.owner = owner
        self._slot, self._key = slot, key
        self._fds: list[int] = []
        self._alive()
        self._control = self.open(owner.control)
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def open(self, number: int) -> int:
        """Open the owner's memfd `number` for reading; closed with this object."""
        path = f"/proc/{self.owner.pid}/fd/{number}"
        try:
            if not os.readlink(path).startswith(_PREFIX):  # another file has the number now: opening it may do harm
                raise self._deregistered()
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise self.refusal(e) from e
        self._fds.append(fd)
        return fd

    def check(self) -> None:
        """Raise `StaleDescriptor` unless the owner lives and the key stands."""
        if os.pread(self._control, KEY_BYTES, self._slot * KEY_BYTES) != self._key:
            self._alive()
            raise self._deregistered()
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
        if e.errno in (errno.ENOENT, errno.ESRCH, errno.EFAULT, errno.ENXIO, errno.EIO):
            self._alive()
            return self._deregistered()
        return DataError(f"cannot read the memory of {self.owner}: {os.strerror(e.errno or 0)}")

    def close(self) -> None:
        """Close the files that were opened."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
