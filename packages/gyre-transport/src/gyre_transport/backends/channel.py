"""What every backend offers a read: an open way to one region.

with opener(descriptor, end=…, adopt=…) as channel:
    channel.submit(piece)        up to `window` bytes ahead
    channel.complete()           the oldest piece: its bytes are in place, and were still the region's when taken

A channel may put off what is submitted until the next `complete`, to ask for many small pieces at once.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

from gyre_transport.descriptor import Descriptor

ADDRESS_ERRORS = (errno.ENOENT, errno.ESRCH, errno.EFAULT, errno.ENXIO, errno.EIO)
Adopt = Callable[[Callable[[], None]], None]  # given a way to interrupt what is about to block, from another thread


class Piece(NamedTuple):
    """A stretch of a region and the local memory it goes to; one request.

    Of several rows only for a channel that `takes_rows`: `rows` of `into.nbytes // rows` bytes, `stride` bytes apart in
    the region, one after another in `into`.
    """

    descriptor: Descriptor
    offset: int
    into: memoryview
    address: int  # of `into`
    rows: int = 1
    stride: int = 0

    def row(self, number: int) -> Piece:
        """One row as a piece of its own."""
        length = self.into.nbytes // self.rows
        start = number * length
        return Piece(
            self.descriptor,
            self.offset + number * self.stride,
            self.into[start : start + length],
            self.address + start,
        )


class Channel(Protocol):
    """An open way to one region, for one thread.

    Every method raises the package's `DataError`s. Leaving it without an error may keep the connection for the next
    read; leaving it with one closes it. A channel with `takes_rows = True` is given pieces of several rows.
    """

    window: int  # bytes that may be asked for before the oldest is complete

    def submit(self, piece: Piece) -> None:
        """Ask for a piece of the region."""

    def complete(self) -> None:
        """Return when the oldest submitted piece has come and is known to be valid."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, *rest: object) -> None: ...


class Opener(Protocol):
    """A backend. Raises `Unreachable` when this way is closed, `StaleDescriptor` when the memory is gone."""

    def __call__(self, descriptor: Descriptor, *, end: float, adopt: Adopt) -> Channel: ...


def takes_rows(channel: Channel) -> bool:
    """Whether `submit` takes pieces of several rows."""
    return bool(getattr(channel, "takes_rows", False))
