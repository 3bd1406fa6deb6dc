"""The call log: append-only, framed, checksummed; one file an execution.

    file    = "GTRAJ\\n" + format (uint16 LE) + frame*
    frame   = payload length (uint32 LE) + crc32 of length and payload (uint32 LE) + payload
    payload = one `gyre_traj.records.Record`, msgpack

A process killed at any moment leaves whole frames and at most one torn one at the end: readers report it, the next
writer cuts it. A frame that is broken, in its length too, with whole ones behind it is damage and never cut silently.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_traj.errors import BrokenCall, CorruptLog, LogError, NotALog, UnknownCall
from gyre_traj.records import Call, Delivered, Header, Record, unpack_ids

FORMAT = 1
_MAGIC = b"GTRAJ\n"
_PREFACE = _MAGIC + struct.pack("<H", FORMAT)
_FRAME = struct.Struct("<II")
_FIELDS = {kind.__struct_config__.tag: {"type", *kind.__struct_fields__} for kind in (Header, Call, Delivered)}
_ENCODER = msgspec.msgpack.Encoder()
# How a payload begins: a map, of up to 15 fields or more, whose first names the kind.
_TAGGED = re.compile(
    rb"(?:[\x80-\x8f]|\xde..)\xa4type(?:" + b"|".join(re.escape(_ENCODER.encode(tag)) for tag in _FIELDS) + b")",
    re.DOTALL,
)
_DECODER = msgspec.msgpack.Decoder(Record)


class LogWriter:
    """Appends records to a log; the first one of a new log is a `Header`. One writer a file, guarded by a lock.

    `torn`: bytes of a torn tail that opening cut off. Raises `LogError`, `NotALog`, `CorruptLog`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._fd = -1
        self.torn = 0
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LogError(f"log {str(path)!r} has another writer; a log takes one at a time") from None
            data = self._path.read_bytes()
            frames = list(_frames(data, str(path)))
            self._end = frames[-1][1] if frames else min(len(data), len(_PREFACE))
            self._started = bool(frames)
            self.torn = len(data) - self._end
            self._unlisted = self._end < len(_PREFACE)  # a new file's name may not be on disk yet
            if self._end < len(_PREFACE):  # a new file, or one whose writer died in its first bytes
                self.torn = len(data)
                os.ftruncate(self._fd, 0)
                self._end = 0
                self._write(_PREFACE)
            elif self.torn:
                os.ftruncate(self._fd, self._end)
        except OSError as error:
            self.close()
            raise LogError(f"log {str(path)!r} cannot be opened for writing: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def empty(self) -> bool:
        """No record is in the log: a `Header` comes next."""
        return not self._started

    def append(self, record: Record) -> None:
        """Hand one whole frame to the operating system; it survives the death of this process.

        Raises `LogError` when the disk is full or the log is closed; the log then ends with the record before.
        """
        if isinstance(record, Header) is self._started:
            raise LogError(f"log {str(self._path)!r}: the first record, and no other, is a Header; got {record!r:.80}")
        self._write(encode_frame(record))
        self._started = True

    def sync(self) -> None:
        """Force what was appended to disk; it survives the death of the machine. Raises `LogError`."""
        try:
            os.fsync(self._fd)
            if self._unlisted:
                _sync_folder(self._path.parent)
                self._unlisted = False
        except OSError as error:
            raise LogError(f"log {str(self._path)!r} cannot be synced: {error}") from error

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, frame: bytes) -> None:
        if self._fd < 0:
            raise LogError(f"log {str(self._path)!r} is closed; open a new LogWriter to append")
        cause: OSError | None = None
        try:
            written = os.write(self._fd, frame)
        except OSError as error:
            written, cause = 0, error
        if written != len(frame):
            what = f"log {str(self._path)!r}: wrote {written} of {len(frame)} bytes ({cause or 'short write'})"
            try:
                os.ftruncate(self._fd, self._end)
            except OSError as error:
                self.close()  # appending behind half a record would bury it
                raise LogError(f"{what} and cannot take them back ({error}); open the log again") from error
            raise LogError(f"{what}; the record was taken back; free disk space and append it again") from cause
        self._end += written


@dataclass(slots=True, eq=False)
class Log:
    """A log as read."""

    header: Header | None = None  # None: no whole header yet
    calls: list[Call] = field(default_factory=list)  # in the order written
    delivered: dict[str, bool] = field(default_factory=dict)  # call id -> some answer of it reached the harness whole
    torn: int = 0  # bytes after the last whole record: a dead writer's, or one that is writing now
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)  # call id -> fields only newer releases know
    foreign: list[dict[str, Any]] = field(default_factory=list)  # records of kinds only newer releases know
    _index: dict[str, Call] = field(default_factory=dict, repr=False)

    @property
    def skipped(self) -> int:
        """Number of records of kinds this release does not know; they stay in the file, and in `foreign`."""
        return len(self.foreign)

    def call(self, call: str) -> Call:
        """Return a call's record. Raises `UnknownCall`."""
        if call not in self._index:
            self._index = {c.call: c for c in reversed(self.calls)}  # of repeated records the first counts
        try:
            return self._index[call]
        except KeyError:
            raise UnknownCall(f"no call {call!r} in this log of {len(self.calls)} calls") from None

    def full_prompt(self, call: str) -> NDArray[np.uint32]:
        """Whole prompt ids of a call. Raises `UnknownCall`, `BrokenCall`."""
        return self._resolve(call, with_output=False)

    def full_ids(self, call: str) -> NDArray[np.uint32]:
        """Whole prompt + output ids of a call. Raises `UnknownCall`, `BrokenCall`."""
        return self._resolve(call, with_output=True)

    def _resolve(self, call: str, *, with_output: bool) -> NDArray[np.uint32]:
        record = self.call(call)
        pieces = [record.output] if with_output else []
        seen = set()
        while True:
            if record.call in seen:
                raise BrokenCall(f"call {record.call!r} is its own ancestor; the log contradicts itself")
            seen.add(record.call)
            if len(record.prompt) % 4 or len(record.output) % 4:
                raise BrokenCall(f"call {record.call!r}: ids are 4 bytes each; a field has a part of one")
            pieces.append(record.prompt)
            prefix, child = record.prefix, record.call
            if record.parent is None:
                if prefix:
                    raise BrokenCall(f"call {child!r} has prefix {prefix} and no parent that has those ids")
                break
            record = self.call(record.parent)
            length = record.prefix + (len(record.prompt) + len(record.output)) // 4
            if prefix != length:
                raise BrokenCall(
                    f"call {child!r} has prefix {prefix}, its parent {record.call!r} has {length} ids in all"
                )
            pieces.append(record.output)
        return unpack_ids(b"".join(reversed(pieces)))


def read_log(path: str | Path) -> Log:
    """Read a log, also while it is being written. Raises `LogError`, `NotALog`, `CorruptLog`."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise LogError(f"log {str(path)!r} cannot be read: {error}") from error
    log = Log()
    end = min(len(data), len(_PREFACE))
    for start, end in _frames(data, str(path)):
        record, unknown = _decode(memoryview(data)[start + _FRAME.size : end], f"log {str(path)!r}, byte {start}")
        if record is None:
            log.foreign.append(unknown)
        elif isinstance(record, Call):
            log.calls.append(record)
            if unknown:
                log.extra.setdefault(record.call, unknown)
        elif isinstance(record, Delivered):
            log.delivered[record.call] = record.ok or log.delivered.get(record.call, False)
        elif log.header is None and not log.calls:
            log.header = record
        else:
            raise CorruptLog(f"log {str(path)!r}, byte {start}: a header in the middle of the log")
    log.torn = len(data) - end
    return log


def encode_frame(record: Record) -> bytes:
    """Return a record as one frame."""
    payload = _ENCODER.encode(record)
    length = len(payload).to_bytes(4, "little")
    return length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little") + payload


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _frames(data: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each whole frame; stop at a torn tail."""
    preface = data[: len(_PREFACE)]
    if not (preface.startswith(_MAGIC) or _MAGIC.startswith(preface)):
        raise NotALog(f"{name!r} is not a call log: expected it to begin with {_MAGIC!r}, got {preface!r}")
    if len(preface) < len(_PREFACE):
        return
    if (version := int.from_bytes(preface[len(_MAGIC) :], "little")) > FORMAT:
        raise NotALog(f"{name!r} has log format {version}, this package reads up to {FORMAT}; update gyre-traj")
    view = memoryview(data)
    start = len(_PREFACE)
    while len(data) - start >= _FRAME.size:
        length, checksum = _FRAME.unpack_from(data, start)
        end = start + _FRAME.size + length
        if end > len(data) or _checksum(view[start:end]) != checksum:
            torn = end >= len(data) and not _frame_after(data, start)  # written in part
            if torn or not any(view[start:]):  # or blocks the disk never received
                return
            raise CorruptLog(
                f"log {name!r} is damaged at byte {start} of {len(data)}: a frame is broken, others follow; "
                f"restore the file, or cut it there (truncate -s {start}) to keep what is before"
            )
        yield start, end
        start = end


def _checksum(frame: memoryview) -> int:
    """Crc32 of a frame's length and payload."""
    return zlib.crc32(frame[_FRAME.size :], zlib.crc32(frame[:4]))


def _frame_after(data: bytes, start: int) -> bool:
    """Whether a whole frame lies behind the broken one at `start`: then its length lies, and it is no torn tail."""
    view = memoryview(data)
    for found in _TAGGED.finditer(data, start + _FRAME.size + 1):
        at = found.start() - _FRAME.size
        length, checksum = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + length
        if at > start and end <= len(data) and _checksum(view[at:end]) == checksum:
            return True
    return False


def _decode(payload: memoryview, where: str) -> tuple[Record | None, dict[str, Any]]:
    """Decode a payload into a record and the fields only a newer writer knows; no record: a kind only it knows."""
    try:
        raw = msgspec.msgpack.decode(payload)
        if isinstance(raw, dict) and isinstance(raw.get("type"), str) and raw["type"] not in _FIELDS:
            return None, raw
        record = _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"{where}: whole, but not a record of this package: {error}") from error
    known = _FIELDS[raw["type"]]
    return record, {name: value for name, value in raw.items() if name not in known}
