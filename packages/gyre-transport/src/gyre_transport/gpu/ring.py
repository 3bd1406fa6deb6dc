"""Pinned memory used in turn: what was taken first is given back first."""

from __future__ import annotations

from collections import deque

from gyre_transport.buffers import Buffer
from gyre_transport.errors import DataError

_ALIGN = 4096


class Ring:
    """Stretches of one buffer.

        free │ oldest … newest │ free        or        newest │ free │ oldest …

    A stretch never goes around the end: what is left there stays free for that turn.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._taken: deque[tuple[int, int]] = deque()  # [from, to), oldest first

    def take(self, nbytes: int) -> tuple[memoryview, int] | None:
        """(memory, address) of `nbytes`; None: give something back first. Raises `DataError` when it never fits."""
        room = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        if room > self._buffer.nbytes:
            raise DataError(f"expected pieces of at most {self._buffer.nbytes:,} bytes, got one of {nbytes:,}")
        start = self._place(room)
        if start is None:
            return None
        self._taken.append((start, start + room))
        return self._buffer.bytes[start : start + nbytes], self._buffer.address + start

    def _place(self, room: int) -> int | None:
        if not self._taken:
            return 0
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest > oldest:
            if newest + room <= self._buffer.nbytes:
                return newest
            newest = 0
        return newest if newest + room <= oldest else None

    def give(self) -> None:
        """Give the oldest stretch back."""
        self._taken.popleft()
