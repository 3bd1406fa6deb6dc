"""The journal: every decision and observation of the scheduler, one line each, in a file that is only appended to.

    {"crc":3735928559,"event":{"seq":17,"at":1.0,"kind":"transfer","cell":0,"numbers":{"w":30,"C_R":64,…}}}

`crc` is the CRC-32 of the bytes of `event`. Each line is handed to the operating system before the decision it records
is carried out, so it survives the death of the process; it is forced to the disk once a second and at the end, so that
a crash of the machine loses at most the last second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from gyre_sched.actions import Record
from gyre_sched.errors import JournalError
from gyre_sched.protocol import Event


class _Line(msgspec.Struct, frozen=True):
    crc: int
    event: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Reading:
    """What a journal holds. `torn`: bytes after the last whole line that could be read, 0 for a whole journal."""

    events: tuple[Event, ...]
    size: int  # bytes of the events
    torn: int = 0
    damage: str = ""  # what is wrong with the first line that could not be read
    more: bool = False  # lines that can be read follow it: not a torn tail but damage within


def encode(event: Event) -> bytes:
    """`event` as a line."""
    raw = msgspec.json.encode(event)
    return b'{"crc":%d,"event":%b}\n' % (zlib.crc32(raw), raw)


def decode(line: bytes) -> Event:
    """The event of a line; raises `JournalError`."""
    try:
        parsed = msgspec.json.decode(line, type=_Line)
        raw = bytes(parsed.event)
        if zlib.crc32(raw) != parsed.crc:
            raise JournalError(f"expected crc {parsed.crc}, got {zlib.crc32(raw)}")
        return msgspec.json.decode(raw, type=Event)
    except msgspec.DecodeError as e:
        raise JournalError(f"not a journal line: {e}") from e


def read_journal(path: Path) -> Reading:
    """Read up to the first line that is torn or damaged. Raises `JournalError` when the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise JournalError(f"cannot read the journal {str(path)!r}: {e.strerror}; check the path") from e
    events: list[Event] = []
    size = 0
    for line in data.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                raise JournalError("the last line is torn")
            event = decode(line)
            if events and event.seq != events[-1].seq + 1:
                raise JournalError(f"expected seq {events[-1].seq + 1}, got {event.seq}")
        except JournalError as e:
            rest = data[size + len(line) :].splitlines(keepends=True)
            return Reading(tuple(events), size, len(data) - size, str(e), any(map(_readable, rest)))
        events.append(event)
        size += len(line)
    return Reading(tuple(events), size)


def _readable(line: bytes) -> bool:
    try:
        decode(line)
    except JournalError:
        return False
    return line.endswith(b"\n")


def durations(events: Iterable[Event]) -> dict[int, dict[str, float]]:
    """Seconds each cell spent in each role it has left."""
    spent: dict[int, dict[str, float]] = {}
    for event in events:
        if event.kind == "role" and event.cell is not None:
            roles = spent.setdefault(event.cell, {})
            role = str(event.numbers["from"])
            roles[role] = roles.get(role, 0.0) + float(event.numbers["seconds"] or 0.0)
    return spent


class Journal:
    """Append to a journal; one writer at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. A torn tail is cut off and told of in `torn`; damage within is not repaired.

        Raises `JournalError`: another scheduler holds it, it is damaged, or it cannot be written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("ab", buffering=0)
        except OSError as e:
            raise JournalError(f"cannot write the journal {str(path)!r}: {e.strerror}") from e
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._file.close()
            raise JournalError(f"another scheduler writes {str(path)!r}; stop it, or use another run directory") from e
        before = read_journal(path)
        if before.more:
            self._file.close()
            raise JournalError(
                f"the journal {str(path)!r} is damaged at byte {before.size} ({before.damage}) with whole lines after "
                "it; move it away to start a new one"
            )
        self.torn = before.torn
        self.last = before.events[-1] if before.events else None
        self.epoch = max((int(e.numbers["epoch"] or 0) for e in before.events if "epoch" in e.numbers), default=0)
        self._size = before.size
        self._next = self.last.seq + 1 if self.last else 0
        self._synced = True
        self._syncing = threading.Lock()
        if self.torn:
            self._file.truncate(before.size)

    def append(self, record: Record) -> Event:
        """Write `record` as the next event. Raises `JournalError` when it cannot; the file then holds whole lines."""
        event = Event(seq=self._next, at=record.at, kind=record.kind, cell=record.cell, numbers=record.numbers)
        line = encode(event)
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(None, f"{written} of {len(line)} bytes were written")
        except OSError as e:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise JournalError(f"cannot write the journal {str(self.path)!r}: {e.strerror}; is the disk full?") from e
        self._size += len(line)
        self._next += 1
        self._synced = False
        return event

    def sync(self) -> None:
        """Force what was written to the disk; may be called from any thread. Raises `JournalError`."""
        with self._syncing:
            if self._synced or self._file.closed:
                return
            self._synced = True
            try:
                os.fsync(self._file.fileno())
            except OSError as e:
                if e.errno == errno.EINVAL:
                    return  # a special file that has no disk to be forced to
                raise JournalError(f"cannot sync the journal {str(self.path)!r}: {e.strerror}") from e

    def close(self) -> None:
        """Sync and close, after a sync that another thread is in: the lock on the file ends here."""
        try:
            self.sync()
        finally:
            with self._syncing:
                self._file.close()
