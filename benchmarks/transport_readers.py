"""Readers of a snapshot as processes of their own, for benchmarks/transport.py.

python benchmarks/transport_readers.py < manifest and orders, a line each
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from gyre_transport import Manifest, Snapshot, pull
from gyre_transport.buffers import aligned

WAIT = 300.0


class Readers:
    """Up to `count` processes that pull when told."""

    def __init__(self, manifest: str, count: int) -> None:
        self._processes = [
            subprocess.Popen([sys.executable, __file__], stdin=-1, stdout=-1, text=True) for _ in range(count)
        ]
        for p in self._processes:
            self._tell(p, manifest)
        for p in self._processes:
            self._answer(p)

    def pull(self, count: int, **order: Any) -> Callable[[], None]:
        """Have `count` of them pull at once; it has ended when the last one has."""

        def run() -> None:
            for p in self._processes[:count]:
                self._tell(p, json.dumps(order))
            for p in self._processes[:count]:
                self._answer(p)

        return run

    def drop(self) -> None:
        """Have all let go of what they hold."""
        self.pull(len(self._processes), drop=True)()

    def close(self) -> None:
        """End them."""
        for p in self._processes:
            assert p.stdin is not None
            p.stdin.close()
            p.wait(WAIT)

    @staticmethod
    def _tell(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("a reader ended")


def main() -> None:
    """Read as ordered."""
    manifest = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Manifest)
    room = aligned(manifest.nbytes)  # what a trainer's parameters are
    room[:] = 0
    print(flush=True)
    held: Snapshot | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if held is not None:
            held.close()
        held = None
        if not order.pop("drop", False):
            copy, into = order.pop("copy", False), room if order.pop("into", False) else None
            held = pull(manifest, deadline=WAIT, into=into, **order)
            if copy:
                np.copyto(room, np.frombuffer(held.buffer, np.uint8))
        print(flush=True)


if __name__ == "__main__":
    main()
