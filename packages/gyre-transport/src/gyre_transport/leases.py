"""Who may read one version of a snapshot now, and from whom: event in, answer out; no clock, no I/O.

    Ask ──▶ Read     a lease: read from that memory, the source's or a copy's; `Done` or `Offer` when it has come
        ──▶ Map      somebody on the reader's machine has a frozen copy
        ──▶ Wait     somebody on the reader's machine is fetching one, or every holder serves as many as it may
        ──▶ Moved    the version is being replaced
    Offer            the reader has a verified, frozen copy, and serves it to others while it is connected

So a version leaves the source about `fan_out` times at once and once a machine, and copies multiply. A lease ends with
`Done`, `Offer`, its time, or the reader's connection; one on the source's own memory keeps the next version back. One
that is older than `PATIENCE` still does, but makes no other reader wait: its holder may have stopped.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from gyre_transport.descriptor import Descriptor

_POLL = 0.02  # seconds between two questions of a reader that waits
LONGEST = 3600.0  # seconds of a lease
PATIENCE = 30.0  # seconds that one reader waits for another at most


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """A reader wants the version. Reply: `Read`, `Map`, `Wait` or `Moved`."""

    host: str
    seconds: float  # until it gives up
    shares: bool = True  # it can map what others on its machine hold, and would serve its own copy
    failed: bytes = b""  # key of the copy that it was sent to and could not read; then it is sent to the source


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The reader has its bytes, or gave up. Reply: `Ok`."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """The reader has a verified copy that others may read while its connection lasts. Reply: `Ok`."""

    host: str
    descriptor: Descriptor


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """A lease to read from `descriptor`; None: from the source itself."""

    descriptor: Descriptor | None


class Map(msgspec.Struct, frozen=True, kw_only=True, tag="map"):
    """There is a copy on the reader's machine."""

    descriptor: Descriptor


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Ask again in `seconds`."""

    seconds: float


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag="moved"):
    """The version is being replaced."""


class Ok(msgspec.Struct, frozen=True, kw_only=True, tag="ok"):
    """Noted."""


Request = Ask | Done | Offer
Reply = Read | Map | Wait | Moved | Ok


class _Lease(msgspec.Struct, frozen=True):
    holder: object | None  # whose memory is read; None: the source's
    host: str
    shares: bool
    since: float  # seconds, of the caller's clock
    until: float


class Leases:
    """The readers and copies of one version. fan_out: readers a holder serves at once. most: leases, and copies."""

    def __init__(self, *, fan_out: int, most: int) -> None:
        self._fan_out, self._most = fan_out, most
        self._leases: dict[object, _Lease] = {}
        self._copies: dict[object, Offer] = {}
        self._draining = False

    def on_source(self, now: float) -> int:
        """Leases on the source's own memory."""
        self._expire(now)
        return sum(lease.holder is None for lease in self._leases.values())

    @property
    def copies(self) -> int:
        """Readers that serve the version on."""
        return len(self._copies)

    def drain(self, draining: bool = True) -> None:
        """Grant no more leases; or, with False, go on."""
        self._draining = draining

    def handle(self, reader: object, request: Request, now: float) -> Reply:
        """What `reader` is answered. now: seconds, of any clock that does not go back."""
        self.gone(reader)  # whatever it had: what it says now replaces it
        if isinstance(request, Ask):
            return self._ask(reader, request, now)
        if isinstance(request, Offer) and len(self._copies) < self._most:
            self._copies[reader] = request
        return Ok()

    def gone(self, reader: object) -> None:
        """It has nothing any more: its connection has ended."""
        self._leases.pop(reader, None)
        self._copies.pop(reader, None)

    def _ask(self, reader: object, ask: Ask, now: float) -> Reply:
        if self._draining:
            return Moved()
        self._expire(now)
        if ask.failed:
            for key in [k for k, copy in self._copies.items() if copy.descriptor.key == ask.failed]:
                del self._copies[key]
        recent = [lease for lease in self._leases.values() if now - lease.since < PATIENCE]
        if ask.shares:
            for copy in self._copies.values():
                if copy.host == ask.host:
                    return Map(descriptor=copy.descriptor)
            if any(lease.shares and lease.host == ask.host for lease in recent):
                return Wait(seconds=_POLL)
        load = Counter(lease.holder for lease in recent)
        holder = None if ask.failed else min((*self._copies, None), key=lambda holder: load[holder])
        if len(self._leases) >= self._most or (load[holder] >= self._fan_out and not ask.failed):
            return Wait(seconds=_POLL)
        until = now + min(max(ask.seconds, 0.0), LONGEST)
        self._leases[reader] = _Lease(holder, ask.host, ask.shares, now, until)
        return Read(descriptor=None if holder is None else self._copies[holder].descriptor)

    def _expire(self, now: float) -> None:
        for reader in [r for r, lease in self._leases.items() if lease.until <= now]:
            del self._leases[reader]
