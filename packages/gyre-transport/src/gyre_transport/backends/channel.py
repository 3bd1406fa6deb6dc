"""What every backend offers a read: an open way to one region.

with opener(descriptor, end=…, adopt=…) as channel:
    channel.submit(piece)        up to `window` bytes ahead
    channel.complete()           the oldest piece: its bytes are in place, and were still the region's when taken
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

from gyre_transport.descriptor import Descriptor

ADDRESS_ERRORS = (errno.ENOENT, errno.ESRCH, errno.EFAULT, errno.ENXIO, errno.EIO)
Adopt = Callable[[Callable[[], None]], None]  # given a way to interrupt what is about to block, from another thread


class Piece(NamedTuple):
    """A stretch of a region and the local memory it goes to; one request."""

    descriptor: Descriptor
    offset: int
    into: memoryview
    address: int  # of `into`


class Channel(Protocol):
    """An open way to one region, for one thread.

    Every method raises the package's `DataError`s. Leaving it without an error may keep the connection for the next
    read; leaving it with one closes it.
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
