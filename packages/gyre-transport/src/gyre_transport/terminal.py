"""Progress of long work on stderr: a line that moves on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time

_MOVING, _STILL = 0.2, 10.0  # seconds between two looks


class Meter:
    """Bytes done of bytes in all; `update` may be called from several threads. A context manager."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._moves = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()
        self._lock = threading.Lock()
        self._drawn = False

    def update(self, done: int, total: int) -> None:
        """Show it when it is time to."""
        now = time.monotonic()
        with self._lock:
            if now - self._shown < (_MOVING if self._moves else _STILL):
                return
            self._shown, self._drawn = now, True
            rate = done / max(now - self._began, 1e-9)
            text = f"{self._doing}: {size(done)} of {size(total)} ({100 * done // max(total, 1)}%), {size(rate)}/s"
            sys.stderr.write(f"\r\x1b[K{text}" if self._moves else f"{text}\n")
            sys.stderr.flush()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._drawn and self._moves:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class Tally:
    """Named steps of a known number; a context manager."""

    def __init__(self, doing: str, total: int) -> None:
        self._doing, self._total = doing, total
        self._moves = sys.stderr.isatty()
        self._done = 0
        self._shown = time.monotonic()

    def step(self, name: str) -> None:
        """The next one, called `name`, begins."""
        self._done += 1
        now = time.monotonic()
        if not (self._moves or now - self._shown >= _STILL):
            return
        self._shown = now
        text = f"{self._doing}: {self._done} of {self._total}, {name}"
        sys.stderr.write(f"\r\x1b[K{text}" if self._moves else f"{text}\n")
        sys.stderr.flush()

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._moves:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def size(nbytes: float) -> str:
    """Bytes for people: "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.{0 if unit == 'B' else 1}f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
