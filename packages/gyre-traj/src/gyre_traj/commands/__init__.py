"""What the commands of `gyre-traj` do; `gyre_traj.cli` says what they take."""

from __future__ import annotations

import sys
import time
from typing import Any

_EVERY = 2.0  # seconds between two words about progress


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(text + "\n")


def say_json(value: Any) -> None:
    """Write a value as one line of JSON."""
    import msgspec

    say(msgspec.json.encode(value).decode())


class Progress:
    """Says on standard error how far long work is; silent when it is done before two seconds."""

    def __init__(self, of: int, what: str) -> None:
        self._of = of
        self._what = what
        self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        """Tell that `done` are done."""
        now = time.monotonic()
        if now - self._last >= _EVERY:
            self._last = now
            sys.stderr.write(f"gyre-traj: {self._what}: {done:,} of {self._of:,} logs\n")
            sys.stderr.flush()
