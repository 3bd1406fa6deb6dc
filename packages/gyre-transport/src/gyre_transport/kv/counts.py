"""What a linker did, as numbers: kept in memory, written to a file whole, at most once a second and at the end."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

FAILURES = (
    "unreachable",  # no way to the source, or it ended in the middle
    "deadline",  # it took too long
    "refused",  # the source has other pages: another model, dtype, page size or rank
    "full",  # no room here
    "unsettled",  # the engine has new weights and old pages; it gets none until its cache is flushed
)
COUNTERS = (
    "stored",  # pages copied out of the engine's pool
    "not_stored",  # pages for which there was no room
    "evicted",  # pages that made room
    "restored",  # pages copied back into the pool
    "served",  # pages leased to other engines
    "leases_expired",  # leases nobody acknowledged in time
    "pulls",  # moves asked for
    "fetched",  # pages that came from other engines
    "fetched_bytes",
    "dropped",  # pages forgotten because of new weights, a flushed cache, or the end of a hold
    *(f"pulls_{failure}" for failure in FAILURES),
)


class Counts:
    """Named counters, for several threads."""

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._written: dict[str, int] | None = None

    def add(self, name: str, n: int = 1) -> None:
        """Count; `name` is one of `COUNTERS`."""
        with self._lock:
            self._counts[name] += n

    def set(self, name: str, n: int) -> None:
        """Take over a number that is counted elsewhere."""
        with self._lock:
            self._counts[name] = n

    def snapshot(self) -> dict[str, int]:
        """All of them."""
        with self._lock:
            return dict(self._counts)

    def write(self) -> None:
        """Bring the file up to date. A file that cannot be written is logged, and no reason to stop."""
        counts = self.snapshot()
        if self._path is None or counts == self._written:
            return
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(counts), indent=1) + b"\n")
            os.replace(partial, self._path)
            self._written = counts
        except OSError as e:
            log.warning("cannot write %s: %s", self._path, e)
