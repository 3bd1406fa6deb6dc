"""The owner's side: which keys open which memory, now.

Each process that registers memory holds one control record: a memfd of 16-byte slots, one a region, a slot's bytes
being the secret of the region's only valid descriptor (zeros: none), and beside it the same as a table for the thread
that serves reads over tcp. A reader compares the secret before it reads, after every piece and at the end. The owner
takes it away before the memory is freed, changed or given another meaning; so bytes that were read while the secret
still stood are the registered ones.

Nothing here has a name in a file system: a memfd lives as long as its owner, whatever ended it (`kill -9` included),
and there is nothing to sweep. Secrets are written and compared by system calls, which also order them against the
bytes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from gyre_transport.descriptor import SECRET_BYTES, Content, Endpoint, Owner, host, secret
from gyre_transport.errors import DataError

_NO_SECRET = bytes(SECRET_BYTES)


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started; None when there is no such process, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZXx" else int(fields[19])


def memfd(name: str, nbytes: int) -> int:
    """A new anonymous file of `nbytes` for good, closed on exec. Raises `DataError`."""
    fd = os.memfd_create(f"gyre-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # who maps it is safe from its end
    except (OSError, OverflowError) as e:
        os.close(fd)
        raise DataError(f"cannot allocate {nbytes:,} bytes of shared memory: {e}; free memory or ask for less") from e
    return fd


class Caller(Protocol):
    """Who made a call, as long as its connection lasts."""

    def at_end(self, key: object, act: Callable[[], None] | None) -> None:
        """Have `act` called once when the connection has ended, in place of what `key` had; None: nothing."""


Calls = Callable[[bytes, Caller], bytes]  # answers in microseconds: it runs in the thread that serves reads


class Export(msgspec.Struct, frozen=True, eq=False):
    """Memory as it may be read now: one grant of one region. Compared by identity."""

    secret: bytes
    memory: memoryview  # [nbytes], format "B"
    calls: Calls | None = None  # handles what readers that hold the descriptor say


class Listener(Protocol):
    """Serves a record's exports to other machines."""

    endpoint: Endpoint

    def revoked(self, export: Export) -> None:
        """An export went away: stop sending it. When this returns no device reads it any more."""

    def close(self) -> None:
        """Stop; nothing is left open."""

    def abandon(self) -> None:
        """In a forked child: close its copies of the parent's files."""


class Record:
    """This process's control record; it lives as long as a slot of it is taken."""

    _lock = threading.RLock()  # a region that is collected while another is made releases its slot in between
    _current: Record | None = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        start = start_time(self._pid)
        if start is None:
            raise DataError("cannot read /proc/self/stat; registered memory needs a mounted /proc")
        self._fd = memfd("control", 0)
        self.owner = Owner(host=host(), pid=self._pid, start=start, control=self._fd)
        self.exports: dict[int, Export] = {}
        self.listener: Listener | None = None
        self._used: set[int] = set()

    @classmethod
    def take(cls) -> tuple[Record, int]:
        """A free slot in this process's record; give it back with `release`."""
        with cls._lock:
            record = cls._current = cls._current or cls()
            slot = next(i for i in range(len(record._used) + 1) if i not in record._used)
            record._used.add(slot)
            return record, slot

    def grant(self, slot: int, memory: memoryview, content: Content | None, calls: Calls | None = None) -> bytes:
        """Make `memory` readable under a fresh key, which is returned; what `slot` opened before is revoked.

        Raises `DataError` in a forked child (its parent's record).
        """
        if os.getpid() != self._pid:
            raise DataError(f"the region belongs to process {self._pid}, which forked this one; register it here")
        key = secrets.token_bytes(SECRET_BYTES)
        proof = secret(self.owner, key, slot, memory.nbytes, content)
        self.revoke(slot)
        self.exports[slot] = Export(proof, memory, calls)
        os.pwrite(self._fd, proof, slot * SECRET_BYTES)
        return key

    def revoke(self, slot: int) -> None:
        """Take the secret of `slot` away. Nothing in a forked child: the record is its parent's."""
        if os.getpid() != self._pid:
            return
        os.pwrite(self._fd, _NO_SECRET, slot * SECRET_BYTES)
        export = self.exports.pop(slot, None)
        if export is not None and self.listener is not None:
            self.listener.revoked(export)

    def release(self, slot: int) -> None:
        """Revoke and free `slot`; the record goes with its last slot."""
        if os.getpid() != self._pid:
            return
        self.revoke(slot)
        with Record._lock:
            self._used.discard(slot)
            if self._used:
                return
            os.close(self._fd)
            Record._current = None
        if self.listener is not None:
            self.listener.close()

    @classmethod
    def _forked(cls) -> None:
        cls._lock = threading.RLock()
        record, cls._current = cls._current, None
        if record is not None:
            record.exports.clear()
            if record.listener is not None:
                record.listener.abandon()


os.register_at_fork(after_in_child=Record._forked)
