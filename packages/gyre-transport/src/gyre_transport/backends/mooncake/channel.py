"""The reader's end: what was submitted is read into memory of the channel's own, checked, and only then copied out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_transport.backends.channel import Adopt, Piece
from gyre_transport.backends.mooncake.engine import Reading, engine, room
from gyre_transport.backends.mooncake.owner import TOKEN_BYTES, Declined, Place, decode
from gyre_transport.backends.tcp import Line
from gyre_transport.backends.wire import Kind
from gyre_transport.descriptor import Descriptor
from gyre_transport.errors import Cancelled, DeadlineExceeded, StaleDescriptor, Unreachable

_LOOK = 0.5  # seconds between two looks at the owner while nothing comes
_SHORTEST, _LONGEST = 5e-5, 1e-3  # seconds between two looks at the engine


class MooncakeChannel:
    """A way to a region of a process that has lent it to its engine; see `channel.Channel`."""

    window = 16 << 20

    def __init__(self, descriptor: Descriptor, host: str, *, end: float, adopt: Adopt) -> None:
        """host: address that others reach this machine at."""
        if descriptor.endpoint is None or not descriptor.endpoint.mooncake:
            raise Unreachable(f"{descriptor.owner} does not name mooncake in its transport.backends, or has it not")
        self._descriptor, self._end = descriptor, end
        self._waiting: list[Piece] = []
        self._came = 0  # pieces that have come and were not completed
        self._interrupted = False
        self._room = room(0)
        self._engine = engine(host)
        self._engine.check()
        self._line = Line(descriptor, end=end, adopt=lambda interrupt: adopt(partial(self._interrupt, interrupt)))
        try:
            place = self._locate()
            if isinstance(place, Declined):
                raise Unreachable(f"{descriptor.owner} declines Mooncake: {place.reason}")
            self._place = place
        except BaseException:
            self._line.close()
            raise

    def submit(self, piece: Piece) -> None:
        """Remember the piece."""
        self._waiting.append(piece)

    def complete(self) -> None:
        """Read all that was submitted, unless the oldest piece has come already."""
        if not self._came:
            self._read(self._waiting)
            self._came, self._waiting = len(self._waiting), []
        self._came -= 1

    def _read(self, pieces: list[Piece]) -> None:
        extents, at = [(0, self._place.token_address, TOKEN_BYTES)], TOKEN_BYTES
        for piece in pieces:
            if piece.into.nbytes:
                extents.append((at, self._place.address + piece.offset, piece.into.nbytes))
            at += piece.into.nbytes
        if self._room.nbytes < at:
            self._room = room(at)
        self._room[:TOKEN_BYTES] = 0
        reading = Reading(self._engine, self._place.segment, extents, self._room)
        try:
            self._wait(reading)
        except BaseException:
            self._room = room(0)
            self._engine.give_up(reading)
            raise
        self._unchanged()
        if reading.failed:
            raise Unreachable(f"Mooncake could not read from {self._descriptor.owner}; see what it logged")
        if self._room[:TOKEN_BYTES].tobytes() != self._place.token:
            raise Unreachable(f"another process than {self._descriptor.owner} serves {self._place.segment}")
        at = TOKEN_BYTES
        for piece in pieces:
            _copy(self._room[at : at + piece.into.nbytes], piece)
            at += piece.into.nbytes

    def _wait(self, reading: Reading) -> None:
        """Return when all has come or failed. An owner that is gone meanwhile is not waited for."""
        pause, look = _SHORTEST, time.monotonic() + _LOOK
        while not reading.ended:
            now = time.monotonic()
            if self._interrupted:
                raise Cancelled("the read was interrupted")
            if now >= self._end:
                raise DeadlineExceeded(
                    f"nothing more came from {self._descriptor.owner} through Mooncake before the deadline; allow more "
                    "time"
                )
            if now >= look:
                self._unchanged()
                look = time.monotonic() + _LOOK
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _unchanged(self) -> None:
        """Raise `StaleDescriptor` unless the key stands and the memory is where it was."""
        if self._locate() != self._place:
            raise StaleDescriptor(f"the memory of {self._descriptor.owner} was lent anew; ask it for a new descriptor")

    def _locate(self) -> Place | Declined:
        answer = self._line.call(self._descriptor, b"", end=self._end, kind=Kind.LOCATE)
        try:
            return decode(answer)
        except msgspec.DecodeError as e:
            raise Unreachable(f"{self._descriptor.owner} says nonsense about Mooncake: {e}") from e

    def _interrupt(self, line: Callable[[], None]) -> None:
        self._interrupted = True
        line()

    def __enter__(self) -> MooncakeChannel:
        return self

    def __exit__(self, kind: object, *rest: Any) -> None:
        if kind is None and not self._waiting:
            self._line.keep()
        else:
            self._line.close()


def _copy(source: NDArray[np.uint8], piece: Piece) -> None:
    if piece.into.nbytes:
        np.copyto(np.frombuffer(piece.into, np.uint8), source)
