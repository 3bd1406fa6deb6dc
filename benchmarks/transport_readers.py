"""Readers of a snapshot as processes of their own, for benchmarks/transport.py.

python benchmarks/transport_readers.py < manifest and orders, a line each
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import msgspec
import numpy as np

from gyre_transport import Manifest, Snapshot, pull, snapshot
from gyre_transport.buffers import aligned

WAIT = 300.0


class Cost(msgspec.Struct, frozen=True):
    """What one pull, or several at once, took beside time."""

    cpu: float = 0.0  # seconds of the readers' processors
    sent: int = 0  # bytes that the source's process sent

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu + other.cpu, self.sent + other.sent)


class Readers:
    """Up to `count` processes that pull when told. `costs`: of each order, every time it was given."""

    def __init__(self, manifest: str, count: int) -> None:
        self.costs: dict[str, list[Cost]] = {}
        self._processes = [
            subprocess.Popen([sys.executable, __file__], stdin=-1, stdout=-1, text=True) for _ in range(count)
        ]
        for p in self._processes:
            self._tell(p, manifest)
        for p in self._processes:
            self._answer(p)

    def pull(self, name: str, count: int, **order: Any) -> Callable[[], None]:
        """Have `count` of them pull at once; it has ended when the last one has. name: its key in `costs`."""

        def run() -> None:
            for p in self._processes[:count]:
                self._tell(p, json.dumps(order))
            costs = [msgspec.json.decode(self._answer(p), type=Cost) for p in self._processes[:count]]
            self.costs.setdefault(name, []).append(sum(costs, Cost()))

        return run

    def drop(self) -> None:
        """Have all let go of what they hold."""
        self.pull("drop", len(self._processes), nothing=True)()

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
    def _answer(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a reader ended")
        return line


def main() -> None:
    """Read as ordered."""
    manifest = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Manifest)
    room = aligned(manifest.nbytes)  # what a trainer's parameters are
    room[:] = 0
    sent = [0]
    read = vars(snapshot)["read"]

    def counted(holder: Any, into: Any, **how: Any) -> None:
        read(holder, into, **how)
        if holder.owner == manifest.descriptor.owner and how.get("via") != "shm":
            sent[0] += memoryview(into).nbytes

    vars(snapshot)["read"] = counted
    print(flush=True)
    held: Snapshot | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if held is not None:
            held.close()
        held, began, sent[0] = None, process_time(), 0
        if not order.pop("nothing", False):
            copy, into = order.pop("copy", False), room if order.pop("into", False) else None
            held = pull(manifest, deadline=WAIT, into=into, **order)
            if copy:
                np.copyto(room, np.frombuffer(held.buffer, np.uint8))
        print(json.dumps({"cpu": process_time() - began, "sent": sent[0]}), flush=True)


if __name__ == "__main__":
    main()
