"""What the commands of `gyre-traj` do; `gyre_traj.cli` says what they take."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

_EVERY = 2.0  # seconds between two words about progress


_HIDDEN = {i: f"\\x{i:02x}" for i in (*range(10), *range(11, 32), *range(127, 160))}  # what a terminal would obey


def say(text: str) -> None:
    """Write lines to standard output; what cannot be shown, or would steer the terminal, as an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = text.translate(_HIDDEN).encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(shown + "\n")


def say_json(value: Any) -> None:
    """Write a value as one line of JSON, in ASCII."""
    import msgspec

    line = msgspec.json.encode(value).decode()
    sys.stdout.write(re.sub("[^ -~]", lambda found: json.dumps(found[0])[1:-1], line) + "\n")


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
