"""Idle connections, kept for the next read: at most `KEPT` of a key, for about `_KEEP` seconds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable
from typing import Any, Protocol

KEPT = 4
_KEEP = 10.0  # seconds, less than a server's patience
_SWEEP = 1.0  # seconds between two looks at all that is kept


class Keepable(Protocol):
    """A connection that may be kept."""

    idle_since: float  # time.monotonic(), when it was given

    @property
    def key(self) -> Hashable:
        """What it can be used for."""

    @property
    def usable(self) -> bool:
        """Whether it is still up."""

    def close(self) -> None:
        """Close it."""

    def abandon(self) -> None:
        """In a forked child: close its copies of the parent's files, and nothing that is the parent's."""


class Kept[C: Keepable]:
    """Connections on which nothing is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.idle: dict[Hashable, list[C]] = {}
        self._swept = 0.0
        _pools.append(self)

    def take(self, key: Hashable) -> C | None:
        """A connection that is up, or None."""
        with self._lock:
            self._sweep(time.monotonic())
            connections = self.idle.get(key, [])
            while connections:
                connection = connections.pop()
                if connection.usable:
                    return connection
                connection.close()
        return None

    def give(self, connection: C) -> None:
        """Keep a connection."""
        connection.idle_since = time.monotonic()
        with self._lock:
            self._sweep(connection.idle_since)
            connections = self.idle.setdefault(connection.key, [])
            if len(connections) < KEPT:
                connections.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close all."""
        with self._lock:
            for connections in self.idle.values():
                for connection in connections:
                    connection.close()
            self.idle.clear()

    def abandon(self) -> None:
        """In a forked child: its copies would keep its parent's connections up."""
        self._lock = threading.Lock()
        for connections in self.idle.values():
            for connection in connections:
                connection.abandon()
        self.idle = {}

    def _sweep(self, now: float) -> None:
        if now < self._swept + _SWEEP:
            return
        self._swept, before = now, now - _KEEP
        for key, connections in list(self.idle.items()):
            for connection in [c for c in connections if c.idle_since < before]:
                connections.remove(connection)
                connection.close()
            if not connections:
                del self.idle[key]


def close_kept() -> None:
    """Close all that is kept anywhere."""
    for pool in _pools:
        pool.close()


def _forked() -> None:
    for pool in _pools:
        pool.abandon()


_pools: list[Kept[Any]] = []
os.register_at_fork(after_in_child=_forked)
