"""The reader's end of `leases`: from whom to read a version, and for how long the source knows of it."""

from __future__ import annotations

import logging
import time
from types import TracebackType

import msgspec

from gyre_transport import leases
from gyre_transport.backends.tcp import Line
from gyre_transport.descriptor import Descriptor, host
from gyre_transport.errors import DataError, DeadlineExceeded, StaleVersion, Unreachable

log = logging.getLogger(__name__)

_CALL = 20.0  # seconds the source may take to answer: it may be busy
_GIVE_BACK = 5.0  # the same at the end, where nothing depends on it


class Lease:
    """A reader's claim on the version that `source` describes; a context manager, for one thread.

    end: time.monotonic() by which it has given up. shares: whether it maps, and offers, frozen copies. A source that
    does not listen grants none: it is read without.
    """

    def __init__(self, source: Descriptor, *, end: float, shares: bool) -> None:
        self._source, self._end, self._shares = source, end, shares
        self._line: Line | None = None
        try:
            self._line = Line(source, end=min(end, time.monotonic() + _CALL))
        except Unreachable as e:
            log.info("reading without a lease: %s", str(e))

    def holder(self, failed: Descriptor | None = None) -> tuple[Descriptor, bool]:
        """Whom to read from, and whether to map that. failed: the copy of the last answer, which could not be read.

        Raises `StaleVersion` while the version is being replaced, `DeadlineExceeded` when nobody is free in time, and
        as reads do.
        """
        key = b"" if failed is None else failed.key
        while True:
            left = self._end - time.monotonic()
            ask = leases.Ask(host=host(), seconds=left, shares=self._shares, failed=key)
            match self._call(ask):
                case leases.Read(descriptor=descriptor):
                    return descriptor or self._source, False
                case leases.Map(descriptor=copy):
                    return copy, True
                case leases.Wait(seconds=seconds) if left > seconds:
                    time.sleep(seconds)
                case leases.Wait():
                    raise DeadlineExceeded(f"no holder of {self._source.content} was free in time; allow more time")
                case leases.Moved():
                    raise StaleVersion(f"{self._source.content} is being replaced; ask for the current manifest")
                case reply:
                    raise DataError(f"expected where to read, got {reply!r}")

    def offer(self, copy: Descriptor) -> Line | None:
        """Offer a copy to others in place of the claim; it is offered until the line that is returned is closed."""
        self._call(leases.Offer(host=host(), descriptor=copy))
        line, self._line = self._line, None
        return line

    def _call(self, request: leases.Request) -> leases.Reply:
        if self._line is None:
            return leases.Read(descriptor=None)
        end = min(self._end, time.monotonic() + _CALL)
        answer = self._line.call(self._source, msgspec.msgpack.encode(request), end=end)
        reply: leases.Reply = msgspec.msgpack.decode(answer, type=leases.Reply)
        return reply

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        if kind is None:
            try:
                line.call(self._source, msgspec.msgpack.encode(leases.Done()), end=time.monotonic() + _GIVE_BACK)
                line.keep()
            except DataError:  # the version was replaced meanwhile: what was read is whole all the same
                pass
        line.close()
