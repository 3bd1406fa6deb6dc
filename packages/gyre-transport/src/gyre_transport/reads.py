"""One-sided reads of registered memory: what was described, into local memory, or an error. See `memory`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from gyre_transport.backends.channel import Piece
from gyre_transport.buffers import Buffer, anywhere, on_gpu, view
from gyre_transport.descriptor import Content, Descriptor
from gyre_transport.endpoint import Backend, open_channel, streams
from gyre_transport.errors import DeadlineExceeded, OtherContent, ShapeMismatch
from gyre_transport.transfer import Transfer

_CHUNK = 4 << 20  # bytes between two looks at the clock and the key, and of one request
_STREAM = 16 << 20  # bytes that are worth another connection


class Part(NamedTuple):
    """One destination of `read_many`, as the arguments of `read`.

    rows, stride: `into` takes that many stretches of equal length, one after another, whose beginnings lie `stride`
    bytes apart in the region, from `offset` on: some columns of a matrix.
    """

    descriptor: Descriptor
    into: Any
    offset: int | None = None
    rows: int = 1
    stride: int = 0


def read(
    descriptor: Descriptor,
    into: Any,
    *,
    offset: int | None = None,
    deadline: float,
    expect: Content | None = None,
    via: Backend | None = None,
    notify: bytes | None = None,
) -> None:
    """Copy a region into local memory `into` (writable array, tensor, on a GPU or not, or buffer).

    offset: None reads the whole region, and size, dtype and shape must match (untyped bytes and U8 match any); an int
        reads `into`'s size from that byte on.
    deadline: seconds from now. expect: the content the descriptor must be of. via: that backend or none.
    notify: what the owner is told when all of it has come (`notices`), before this returns.
    Raises `ShapeMismatch` or `OtherContent` before anything moves, `StaleDescriptor`, `Unreachable` or
    `DeadlineExceeded`; `into` then holds no meaning.
    """
    end = time.monotonic() + deadline
    if expect is not None and descriptor.content != expect:
        raise OtherContent(f"expected {expect}, got a descriptor of {descriptor.content}; ask for the current one")
    local = anywhere(into, writable=True)
    _match(descriptor, local, offset)
    pieces = list(_stretch(descriptor, local, offset or 0, local.nbytes))
    if len(pieces) == 1 and notify is None:
        _one(pieces[0], end, via)
        return
    workers = streams(descriptor, sum(p.into.nbytes for p in pieces), via, _STREAM)
    transfer = Transfer(pieces, end=end, via=via, notify=notify)
    if workers == 1:
        transfer.run()
    else:
        transfer.start(workers).wait()


def read_many(
    parts: Iterable[Part],
    *,
    deadline: float,
    workers: int | None = None,
    via: Backend | None = None,
    notify: bytes | None = None,
) -> Transfer:
    """Start reading into many destinations at once, from any regions; `wait` for it, or `cancel`.

    deadline: seconds from now until the last byte. workers: threads, each with a connection of its own; default: by
    size and backend. notify: what the owner of each region is told when all parts of all regions have come.
    Raises `ShapeMismatch` before anything moves.
    """
    end = time.monotonic() + deadline
    if workers is not None and not 1 <= workers <= 16:
        raise ShapeMismatch(f"expected 1 to 16 workers, got {workers!r}")
    regions: dict[Descriptor, list[Piece]] = {}
    given: Descriptor | None = None  # the last part's
    first: Descriptor | None = None  # the first that equals it: a transfer tells regions apart by identity
    for part in parts:
        if part.descriptor is not given:
            given = part.descriptor
            pieces = regions.setdefault(given, [])
            first = pieces[0].descriptor if pieces else given
        pieces.extend(_cut(part) if first is None or first is given else _cut(part._replace(descriptor=first)))
    if workers is None:
        sizes = ((d, sum(p.into.nbytes for p in pieces)) for d, pieces in regions.items())
        workers = max((streams(d, size, via, _STREAM) for d, size in sizes), default=0)
    ordered = [p for pieces in regions.values() for p in pieces]
    return Transfer(ordered, end=end, via=via, notify=notify).start(workers)


def read_chunks(
    descriptor: Descriptor, chunk_bytes: int, deadline: float, *, via: Backend | None = None
) -> Iterator[tuple[int, memoryview]]:
    """Read a region piece by piece: (byte offset, up to `chunk_bytes` bytes), in order; each valid until the next.

    The next piece is on its way while one is used. Every piece is checked after it is read; a later one may still
    raise: what was added so far is then void.
    deadline: seconds from the first piece to the last, the consumer's time included. Raises as `read`.
    """
    end = time.monotonic() + deadline
    if chunk_bytes < 1:
        raise ShapeMismatch(f"expected chunks of at least 1 byte, got {chunk_bytes!r}")
    starts = range(0, descriptor.nbytes, chunk_bytes)
    size = min(chunk_bytes, descriptor.nbytes)
    rooms = [view(bytearray(size), writable=True) for _ in starts[:2]]
    with open_channel(descriptor, end=end, adopt=_nobody, via=via) as channel:

        def ask(number: int) -> list[Piece]:
            if number >= len(starts):
                return []
            room, start = rooms[number % 2], starts[number]
            pieces = list(_stretch(descriptor, room, start, min(size, descriptor.nbytes - start)))
            for piece in pieces:
                channel.submit(piece)
            return pieces

        asked = ask(0)
        for number, start in enumerate(starts):
            following = ask(number + 1)
            for piece in asked:
                _in_time(end, piece.offset, descriptor)
                channel.complete()
            _in_time(end, start + sum(p.into.nbytes for p in asked), descriptor)
            yield start, rooms[number % 2].bytes[: sum(p.into.nbytes for p in asked)]
            asked = following


def _one(piece: Piece, end: float, via: Backend | None) -> None:
    """Read one piece in this thread: nobody can cancel it, so there is nothing to keep about it."""
    _in_time(end, 0, piece.descriptor)
    with open_channel(piece.descriptor, end=end, adopt=_nobody, via=via, gpu=on_gpu(piece.into)) as channel:
        channel.submit(piece)
        channel.complete()


def _nobody(interrupt: Callable[[], None]) -> None:
    """Interrupts a read that is only this thread's."""


def _cut(part: Part) -> Iterator[Piece]:
    """Check a part and cut it into requests."""
    local = anywhere(part.into, writable=True)
    if part.rows == 1:
        _match(part.descriptor, local, part.offset)
        return _stretch(part.descriptor, local, part.offset or 0, local.nbytes)
    return _rows(part, local, _row_bytes(part, local))


def _stretch(descriptor: Descriptor, local: Buffer, offset: int, nbytes: int) -> Iterator[Piece]:
    for at in range(0, nbytes or 1, _CHUNK):  # an empty read asks, too: its descriptor may be stale
        yield Piece(descriptor, offset + at, local.bytes[at : min(at + _CHUNK, nbytes)], local.address + at)


def _rows(part: Part, local: Buffer, length: int) -> Iterator[Piece]:
    at, offset = 0, part.offset or 0
    several = _CHUNK // length if length else part.rows
    if not several:  # a row takes more than one request
        for row in range(part.rows):
            room = Buffer(
                bytes=local.bytes[at : at + length], address=local.address + at, dtype=local.dtype, shape=local.shape
            )
            yield from _stretch(part.descriptor, room, offset + row * part.stride, length)
            at += length
        return
    for row in range(0, part.rows, several):
        rows = min(several, part.rows - row)
        room_bytes = local.bytes[at : at + rows * length]
        yield Piece(part.descriptor, offset + row * part.stride, room_bytes, local.address + at, rows, part.stride)
        at += rows * length


def _row_bytes(part: Part, local: Buffer) -> int:
    """Bytes of one row. Raises `ShapeMismatch` unless all rows lie in the region and fill the destination."""
    if part.rows < 1 or local.nbytes % part.rows:
        raise ShapeMismatch(f"expected {local.nbytes:,} bytes to be {part.rows!r} rows of equal length")
    length = local.nbytes // part.rows
    offset = -1 if part.offset is None else part.offset
    last = offset + (part.rows - 1) * part.stride + length
    if offset < 0 or part.stride < length or last > part.descriptor.nbytes:
        raise ShapeMismatch(
            f"{part.rows} rows of {length:,} bytes, {part.stride:,} apart, from byte {part.offset}, are not in a "
            f"region of {part.descriptor.nbytes:,}; read inside it"
        )
    return length


def _match(descriptor: Descriptor, local: Buffer, offset: int | None) -> None:
    """Refuse a destination that is not what was registered, before anything moves."""
    if offset is not None:
        if offset < 0 or offset + local.nbytes > descriptor.nbytes:
            raise ShapeMismatch(
                f"bytes [{offset:,}, {offset + local.nbytes:,}) are not in a region of {descriptor.nbytes:,}; read "
                "inside it"
            )
    elif local.nbytes != descriptor.nbytes:
        raise ShapeMismatch(
            f"the region has {descriptor.nbytes:,} bytes, the destination {local.nbytes:,}; give an offset to read a "
            "part"
        )
    if local.dtype is None or descriptor.dtype is None:
        return
    if local.dtype != descriptor.dtype and "U8" not in (local.dtype, descriptor.dtype):
        raise ShapeMismatch(
            f"the region holds {descriptor.dtype}, the destination {local.dtype}; read into the same dtype"
        )
    if offset is None and local.dtype == descriptor.dtype and local.shape != descriptor.shape:
        raise ShapeMismatch(f"the region has shape {descriptor.shape}, the destination {local.shape}; reshape it first")


def _in_time(end: float, done: int, descriptor: Descriptor) -> None:
    if time.monotonic() >= end:
        raise DeadlineExceeded(
            f"{done:,} of {descriptor.nbytes:,} bytes of {descriptor.owner} were read before the deadline; allow more "
            "time"
        )
