"""This process's Mooncake engine: one, from its first use until the process ends; imported when it is asked for."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_transport.buffers import aligned
from gyre_transport.errors import Unreachable

PACKAGE = "mooncake-transfer-engine-non-cuda"
_MOST_GIVEN_UP = 256 << 20  # bytes that transfers which were given up may keep
_DONE = 1  # of transfer_check_status; 0: under way; less: failed


class Engine:
    """What is used of Mooncake. Raises `Unreachable` when it is not here or does not start."""

    def __init__(self, host: str) -> None:
        """host: address that others reach this machine at."""
        self.host = host
        self._given_up: list[Reading] = []
        self._lock = threading.Lock()
        # a connection of its own for each transfer: those it keeps are never closed, not even when their peer is gone
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "0")
        try:
            from mooncake.engine import TransferEngine  # type: ignore[import-not-found,unused-ignore]
        except ImportError as e:
            raise Unreachable(f"Mooncake cannot be imported: {e}; pip install 'gyre-transport[mooncake]'") from e
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise Unreachable(f"Mooncake's engine does not start on {host!r}; see what it logged")
        self.segment = f"{host}:{self._engine.get_rpc_port()}"

    def lend(self, address: int, nbytes: int) -> None:
        """Open memory to whoever reaches the engine. Raises `Unreachable`."""
        if code := self._engine.register_memory(address, nbytes):
            raise Unreachable(f"Mooncake does not register {nbytes:,} bytes ({code}); see what it logged at the owner")

    def take_back(self, address: int) -> None:
        """Refuse new reads of it. One that is under way may go on, and finds what is there."""
        self._engine.unregister_memory(address)

    def begin(self, segment: str, address: int, remote: int, nbytes: int) -> int:
        """Start one read; returns its number, 0 when it failed. May block for seconds, when the segment is new."""
        number = int(self._engine.batch_transfer_async_read(segment, [address], [remote], [nbytes]))
        return number if 0 < number < 1 << 63 else 0  # -1 as an unsigned number would be followed as a pointer

    def state(self, number: int) -> int:
        """Of a read that `begin` started: 0 under way, 1 done, less failed; then the number means nothing any more."""
        return int(self._engine.transfer_check_status(number))

    def give_up(self, reading: Reading) -> None:
        """Keep the room of a reading until nothing writes to it any more."""
        with self._lock:
            self._given_up = [r for r in (*self._given_up, reading) if not r.ended]

    def check(self) -> None:
        """Raise `Unreachable` while too much is kept for transfers that were given up."""
        with self._lock:
            self._given_up = [r for r in self._given_up if not r.ended]
            kept = sum(r.room.nbytes for r in self._given_up)
        if kept > _MOST_GIVEN_UP:
            raise Unreachable(f"Mooncake has not ended transfers of {kept:,} bytes that were given up; use another way")


class Reading:
    """Several extents of one segment, on their way into a room of their own."""

    def __init__(self, engine: Engine, segment: str, extents: list[tuple[int, int, int]], room: NDArray[np.uint8]):
        """extents: (place in the room, address at the owner, bytes), none empty."""
        self.room = room
        self.failed = True  # until all of it has begun
        self._engine, self._segment, self._extents = engine, segment, extents
        self._numbers: list[int] = []
        # in a thread: a name that is not known yet is asked for, and no deadline can be given for that
        self._thread = threading.Thread(target=self._begin, name="gyre-transport mooncake", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        base = self.room.ctypes.data
        for at, remote, nbytes in self._extents:
            number = self._engine.begin(self._segment, base + at, remote, nbytes)
            if not number:
                return
            self._numbers.append(number)
        self.failed = False

    @property
    def ended(self) -> bool:
        """Whether nothing writes to the room any more; if `failed`, what it holds means nothing."""
        if self._thread.is_alive():
            return False
        while self._numbers:
            state = self._engine.state(self._numbers[-1])
            if not state:
                return False
            self.failed = self.failed or state != _DONE
            self._numbers.pop()
        return True


def installed() -> bool:
    """Whether Mooncake's package is here; nothing is imported."""
    return importlib.util.find_spec("mooncake") is not None


def engine(host: str) -> Engine:
    """The process's engine, started for `host` when it is not there yet. Raises `Unreachable`."""
    global _engine
    with _lock:
        if _engine is None:
            _engine = Engine(host)
        return _engine


def room(nbytes: int) -> NDArray[np.uint8]:
    """Memory for a reading."""
    return aligned(nbytes)


def _forked() -> None:
    """In a forked child: the engine's threads are its parent's; its end, which waits for them, must never come."""
    global _engine, _lock
    if _engine is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_engine))
    _engine, _lock = None, threading.Lock()


_engine: Engine | None = None
_lock = threading.Lock()
os.register_at_fork(after_in_child=_forked)
