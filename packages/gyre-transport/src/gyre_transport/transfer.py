"""A read that is under way: pieces taken from one queue by one or more workers, each with a way of its own.

    running ──last piece complete──▶ done      valid: the destinations hold what was registered
       ├──first error of a worker──▶ failed    the others are interrupted
       └──cancel, deadline─────────▶ failed
Once `wait` or `cancel` has returned or raised, nothing writes to the destinations any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from gyre_transport import notices
from gyre_transport.backends.channel import Piece, takes_rows
from gyre_transport.backends.tcp import Line
from gyre_transport.buffers import on_gpu
from gyre_transport.endpoint import Backend, open_channel
from gyre_transport.errors import Cancelled, DataError, DeadlineExceeded

_AHEAD = 1024  # pieces asked for and not complete, a worker


class Transfer:
    """One read of many pieces; a context manager that cancels what is not done when it is left."""

    def __init__(
        self, pieces: Iterable[Piece], *, end: float, via: Backend | None = None, notify: bytes | None = None
    ) -> None:
        self._pieces = deque(pieces)
        self._notice = None if notify is None else notices.encode(notify)
        self._owners = [] if notify is None else list({id(p.descriptor): p.descriptor for p in self._pieces}.values())
        self._total = sum(p.into.nbytes for p in self._pieces)
        self._end, self._via = end, via
        self._gpu = any(on_gpu(p.into) for p in self._pieces)
        self._lock = threading.Lock()
        self._interrupts: list[Callable[[], None]] = []
        self._error: DataError | BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._done_bytes = 0
        self._left = len(self._pieces)

    @property
    def valid(self) -> bool:
        """Whether every destination holds its registered bytes, and every owner was told. Never after an error."""
        return self._error is None and self._left == 0 and not self._owners

    @property
    def running(self) -> bool:
        """Whether a worker may still write to a destination."""
        return any(t.is_alive() for t in self._threads)

    @property
    def done_bytes(self) -> int:
        """Bytes in place so far; they mean nothing before all are."""
        return self._done_bytes

    def start(self, workers: int) -> Transfer:
        """Go on in threads."""
        for number in range(workers):
            thread = threading.Thread(target=self._work, name=f"gyre-transport read {number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def run(self) -> None:
        """Do all of it in this thread. Raises as `wait`."""
        self._work()
        self._result()

    def wait(self, deadline: float | None = None) -> None:
        """Return when every byte is in place.

        deadline: seconds from now; None, or later than the transfer's own: the transfer's own. One that passes cancels.
        Raises `StaleDescriptor`, `Unreachable`, `ShapeMismatch`, `DeadlineExceeded` or `Cancelled`; no destination
        then holds a meaning.
        """
        end = self._end if deadline is None else min(self._end, time.monotonic() + deadline)
        try:
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
            if self.running:
                self._fail(self._late())
        except BaseException:
            self.cancel()
            raise
        self._finish()
        self._result()

    def cancel(self) -> None:
        """Stop, unless it is done; `wait` then raises `Cancelled`. Returns when no worker runs any more."""
        if self.running or self._left:
            self._fail(Cancelled(f"the read was cancelled after {self._done_bytes:,} of {self._total:,} bytes"))
        self._finish()

    def _finish(self) -> None:
        for thread in self._threads:
            thread.join()  # soon: done, or interrupted

    def _result(self) -> None:
        if self._error is not None:
            raise self._error

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._done_bytes:,} of {self._total:,} bytes were read before the deadline; allow more time"
        )

    def _fail(self, error: BaseException) -> None:
        """Keep the first error and stop every worker."""
        with self._lock:
            self._error = self._error or error
            for interrupt in self._interrupts:  # under the lock: a connection given back is another's
                interrupt()
            self._interrupts.clear()

    # --- workers ---

    def _work(self) -> None:
        try:
            piece = self._take()
            while piece is not None:
                piece = self._region(piece)
            self._tell()
        except BaseException as e:  # kept for whoever waits
            self._fail(e)

    def _region(self, piece: Piece) -> Piece | None:
        """Read pieces of one region, from `piece` on; return the first that is of another."""
        descriptor, ahead = piece.descriptor, 0
        under_way: deque[Piece] = deque()
        following: Piece | None = piece
        adopted: list[Callable[[], None]] = []

        def adopt(interrupt: Callable[[], None]) -> None:
            with self._lock:
                self._proceed()
                self._interrupts.append(interrupt)
                adopted.append(interrupt)

        self._proceed()
        with open_channel(descriptor, end=self._end, adopt=adopt, via=self._via, gpu=self._gpu) as channel:
            whole = takes_rows(channel)
            while True:
                mine = following is not None and following.descriptor is descriptor
                if mine and following is not None and following.rows > 1 and not whole:
                    following = self._split(following)
                if not under_way and not mine:
                    self._disown(adopted)
                    return following
                self._proceed()
                if mine and following is not None and (not under_way or self._fits(channel.window, ahead, following)):
                    channel.submit(following)
                    under_way.append(following)
                    ahead += following.into.nbytes
                    following = self._take()
                    if len(under_way) < _AHEAD:
                        continue
                channel.complete()
                size = under_way.popleft().into.nbytes
                ahead -= size
                with self._lock:
                    self._done_bytes += size
                    self._left -= 1

    @staticmethod
    def _fits(window: int, ahead: int, piece: Piece) -> bool:
        return ahead + piece.into.nbytes <= window

    def _take(self) -> Piece | None:
        try:
            return self._pieces.popleft()
        except IndexError:
            return None

    def _tell(self) -> None:
        """Send the notice to every owner, once all pieces have come."""
        with self._lock:
            notice = self._notice if self._left == 0 else None
            if notice is not None:
                self._notice = None
        while notice is not None and self._owners:
            self._proceed()
            with Line(self._owners[0], end=self._end) as line:
                line.call(self._owners[0], notice, end=self._end)
                line.keep()
            self._owners.pop(0)

    def _split(self, piece: Piece) -> Piece:
        """Put the rows of `piece` in its place; returns the first."""
        with self._lock:
            self._pieces.extendleft(piece.row(n) for n in reversed(range(1, piece.rows)))
            self._left += piece.rows - 1
        return piece.row(0)

    def _proceed(self) -> None:
        if self._error is not None:
            raise self._error
        if time.monotonic() >= self._end:
            raise self._late()

    def _disown(self, adopted: list[Callable[[], None]]) -> None:
        """Before their connections go back to where the next read finds them."""
        with self._lock:
            self._interrupts = [i for i in self._interrupts if i not in adopted]

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()
