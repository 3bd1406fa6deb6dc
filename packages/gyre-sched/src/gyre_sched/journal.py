"""The journal: everything the policy was told and everything it decided, one line each, only ever appended to.

    {"crc":1234567890,"input":{"type":"received","at":1.0,"request":{…}},"then":2}
    {"crc":3735928559,"event":{"seq":17,"at":1.0,"kind":"transfer","cell":0,"numbers":{"w":30,"C_R":64,…}}}
    {"crc":2847362910,"event":{"seq":18,"at":1.0,"kind":"role",…}}

An input that changed nothing (a heartbeat, the clock) is not written. `then` says how many events follow: a step is
whole or it is cut off, since nothing was done about one that was not written whole. `crc` is the CRC-32 of the bytes of
`input` or `event`. The lines of a step are handed to the operating system together before any of its decisions is
carried out, so they survive the death of the process; they are forced to the disk once a second and at the end, so that
a crash of the machine loses at most the last second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from gyre_sched.actions import Input, Record
from gyre_sched.errors import JournalError
from gyre_sched.protocol import Event


class _Line(msgspec.Struct, frozen=True):
    crc: int
    event: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    then: int = 0


class Told(msgspec.Struct, frozen=True):
    """An input as a line of the journal."""

    input: Input
    then: int  # events that follow from it


@dataclass(frozen=True, slots=True)
class Step:
    """One input and what was decided on it."""

    input: Input
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a journal holds, whole steps only. `torn`: bytes after them, 0 for a whole journal."""

    steps: tuple[Step, ...]
    size: int  # bytes of the steps
    torn: int = 0
    damage: str = ""  # what is wrong with the first line that could not be read
    more: bool = False  # whole lines follow what is torn: not a torn tail but damage within

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of all steps."""
        return tuple(event for step in self.steps for event in step.events)


_input_decoder = msgspec.json.Decoder(Input)  # type: ignore[var-annotated]
_event_decoder = msgspec.json.Decoder(Event)
_line_decoder = msgspec.json.Decoder(_Line)


def encode(event: Event) -> bytes:
    """`event` as a line."""
    raw = msgspec.json.encode(event)
    return b'{"crc":%d,"event":%b}\n' % (zlib.crc32(raw), raw)


def encode_input(told: Input, then: int) -> bytes:
    """`told` as a line that `then` events follow."""
    raw = msgspec.json.encode(told)
    return b'{"crc":%d,"input":%b,"then":%d}\n' % (zlib.crc32(raw), raw, then)


def decode(line: bytes) -> Event | Told:
    """What a line holds; raises `JournalError`."""
    try:
        parsed = _line_decoder.decode(line)
        raw = bytes(parsed.event) or bytes(parsed.input)
        if zlib.crc32(raw) != parsed.crc:
            raise JournalError(f"expected crc {parsed.crc}, got {zlib.crc32(raw)}")
        if bytes(parsed.event):
            return _event_decoder.decode(raw)
        return Told(_input_decoder.decode(raw), parsed.then)
    except msgspec.DecodeError as e:
        raise JournalError(f"not a journal line: {e}") from e


def read_journal(path: Path) -> Reading:
    """Read up to the first step that is torn or damaged. Raises `JournalError` when the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise JournalError(f"cannot read the journal {str(path)!r}: {e.strerror}; check the path") from e
    reader = _Reader()
    position = 0
    for line in data.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                raise JournalError("the last line is torn")
            reader.take(decode(line), len(line))
        except JournalError as e:
            rest = data[position + len(line) :].splitlines(keepends=True)
            return reader.reading(len(data), str(e), more=any(map(_readable, rest)))
        position += len(line)
    return reader.reading(len(data))


class _Reader:
    """Puts lines together to steps."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._size = self._pending = 0  # bytes of whole steps; of the one being read
        self._seq = -1
        self._told: Told | None = None
        self._events: list[Event] = []

    def take(self, item: Event | Told, size: int) -> None:
        """Raises `JournalError` for a line out of place."""
        if isinstance(item, Told):
            if self._told is not None:
                raise JournalError(f"expected {self._told.then - len(self._events)} more events of the step before")
            if item.then < 0:
                raise JournalError(f"expected a count of events, got {item.then!r}")
            self._told = item
        elif item.seq != self._seq + 1:
            raise JournalError(f"expected seq {self._seq + 1}, got {item.seq}")
        elif self._told is None:
            raise JournalError(f"event {item.seq} follows from no input")
        else:
            self._events.append(item)
            self._seq = item.seq
        self._pending += size
        if self._told is not None and len(self._events) == self._told.then:
            self._steps.append(Step(self._told.input, tuple(self._events)))
            self._size, self._pending, self._told, self._events = self._size + self._pending, 0, None, []

    def reading(self, size: int, damage: str = "", *, more: bool = False) -> Reading:
        """Of a file of `size` bytes."""
        if self._told is not None and not damage:
            damage = "the last step is torn"
        return Reading(tuple(self._steps), self._size, size - self._size, damage, more)


def _readable(line: bytes) -> bool:
    try:
        decode(line)
    except JournalError:
        return False
    return line.endswith(b"\n")


def durations(events: Iterable[Event]) -> dict[int, dict[str, float]]:
    """Seconds each cell spent in each role, the present one until the last event."""
    spent: dict[int, dict[str, float]] = {}
    now: dict[int, tuple[str, float]] = {}  # role, since
    at = 0.0
    for event in events:
        at = event.at
        if event.kind == "role" and event.cell is not None:
            roles = spent.setdefault(event.cell, {})
            role = str(event.numbers["from"])
            roles[role] = roles.get(role, 0.0) + float(event.numbers["seconds"] or 0.0)
            now[event.cell] = str(event.numbers["to"]), at
    for cell, (role, since) in now.items():
        spent[cell][role] = spent[cell].get(role, 0.0) + at - since
    return spent


class Journal:
    """Append to a journal; one writer at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; `before` is what it held. A torn tail is cut off and told of in `torn`; damage
        within is not repaired.

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
                f"the journal {str(path)!r} is damaged after byte {before.size} ({before.damage}) with whole lines "
                "after it; move it away to start a new one"
            )
        self.torn = before.torn
        self.before = before.steps
        self._size = before.size
        self._next = next((s.events[-1].seq + 1 for s in reversed(before.steps) if s.events), 0)
        self._synced = True
        self._syncing = threading.Lock()
        if self.torn:
            self._file.truncate(before.size)

    def append(self, told: Input, records: Sequence[Record]) -> list[Event]:
        """Write a step; returns its events. Raises `JournalError` when it cannot; the file then holds whole steps."""
        events = [
            Event(seq=self._next + i, at=r.at, kind=r.kind, cell=r.cell, numbers=r.numbers)
            for i, r in enumerate(records)
        ]
        data = b"".join([encode_input(told, len(events)), *map(encode, events)])
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(None, f"{written} of {len(data)} bytes were written")
        except OSError as e:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise JournalError(f"cannot write the journal {str(self.path)!r}: {e.strerror}; is the disk full?") from e
        self._size += len(data)
        self._next += len(events)
        self._synced = False
        return events

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
