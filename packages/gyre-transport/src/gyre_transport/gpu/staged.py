"""The reader's end of GPU memory: a channel around the channel of any backend.

    submit ──▶ asked for, into the ring ──the backend says it is valid──▶ on its way to the GPU ──▶ in place

While a piece goes from the ring to the GPU, the next ones come into the ring: two copies are under way at most, and as
many requests as the backend allows. A piece that the network card can put on the GPU itself goes past all that, as does
one for the host. Nothing is copied to the GPU before it is known to be the region's.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple, cast

from gyre_transport.backends.channel import Channel, Piece, takes_rows
from gyre_transport.buffers import view
from gyre_transport.errors import DataError
from gyre_transport.gpu.memory import Copy, GpuBytes, GpuMemory, over, wait
from gyre_transport.gpu.ring import Ring

_ROOM = 16 << 20  # bytes of pinned memory, a channel
_WINDOW = 8 << 20  # bytes: two pieces, even where the backend wants one at a time
_COPIES = 2
_DRAIN = 10.0  # seconds for copies to end after an error


class _Asked(NamedTuple):
    """A piece that the backend is asked for."""

    place: GpuBytes | None  # None: it is in place when the backend has completed it
    room: memoryview
    nbytes: int


class StagedChannel:
    """See `backends.channel.Channel`; pieces may be of GPU memory (`GpuBytes`)."""

    def __init__(self, inner: Channel, *, end: float) -> None:
        self.window, self.takes_rows = max(_WINDOW, inner.window), takes_rows(inner)
        self._inner, self._end = inner, end
        self._ring: Ring | None = None
        self._waiting: deque[Piece] = deque()
        self._asked: deque[_Asked] = deque()
        self._asked_bytes = 0
        self._copying: deque[Copy | None] = deque()  # oldest first; None: in place
        self._lent: dict[int, GpuMemory] = {}  # written by the network card

    def submit(self, piece: Piece) -> None:
        """Ask the backend as soon as it, and the ring, have room."""
        self._waiting.append(piece)
        self._ask()

    def complete(self) -> None:
        """Bring the oldest piece into its place, with the next one behind it."""
        while len(self._copying) < _COPIES and (self._asked or self._waiting):
            self._ask()
            if not self._asked:  # the ring is full of what is on its way to the GPU
                break
            self._inner.complete()
            place, room, nbytes = self._asked.popleft()
            self._asked_bytes -= nbytes
            self._copying.append(None if place is None else place.obj.copy_in(place.start, room))
        self._ask()
        copy = self._copying[0]
        if copy is not None:
            wait(copy, self._end)
            assert self._ring is not None  # noqa: S101  (it came from there)
            self._ring.give()
        self._copying.popleft()

    def _ask(self) -> None:
        while self._waiting:
            piece = self._waiting[0]
            nbytes = piece.into.nbytes
            if self._asked and self._asked_bytes + nbytes > self._inner.window:
                return
            place = cast("memoryview | GpuBytes", piece.into)
            if not isinstance(place, GpuBytes) or self._direct(piece, place):
                asked = _Asked(None, memoryview(b""), nbytes)
            else:
                taken = self._take(place)
                if taken is None:
                    return
                piece = piece._replace(into=taken[0], address=taken[1])
                asked = _Asked(place, taken[0], nbytes)
            self._waiting.popleft()
            self._inner.submit(piece)
            self._asked.append(asked)
            self._asked_bytes += nbytes

    def _direct(self, piece: Piece, place: GpuBytes) -> bool:
        reaches = getattr(self._inner, "reaches", None)
        if reaches is None or not place.nbytes or not reaches(piece):
            return False
        self._lent[id(place.obj)] = place.obj
        return True

    def _take(self, place: GpuBytes) -> tuple[memoryview, int] | None:
        if self._ring is None:
            self._ring = Ring(view(place.obj.pinned(_ROOM), writable=True))
        return self._ring.take(place.nbytes)

    def __enter__(self) -> StagedChannel:
        return self

    def __exit__(self, kind: object, *rest: Any) -> None:
        self._inner.__exit__(kind, *rest)  # nothing comes into the ring any more
        end = time.monotonic() + _DRAIN
        slow = [c for c in self._copying if c is not None and not over(c, end)]
        if slow:
            raise DataError(f"{len(slow)} copies to the GPU did not end; it may still write to the destination")
        if kind is None:
            for memory in self._lent.values():
                memory.flush()
