"""A thread that does one thing after the other, in the order it was given them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Worker:
    """Jobs handle their own errors; one that does not is logged, and the next one is done."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until everything queued so far is done; False when `seconds` were not enough."""
        done = threading.Event()
        self._jobs.put(done.set)
        return done.wait(seconds)

    def close(self) -> None:
        """Do what is queued, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("%s: a job failed", self._thread.name)
