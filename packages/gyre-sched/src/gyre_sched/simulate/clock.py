"""Simulated time: what happens when, in order; and sums over time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """Events in order of time, and of their making among equals."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = count()

    def at(self, time: float, do: Callable[..., None], *args: Any) -> None:
        """Call `do(*args)` at `time`, which is not past."""
        heapq.heappush(self._heap, (time, next(self._serial), do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Call `do(*args)` in `seconds`."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._serial), do, args))

    def next(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._heap:
            return False
        self.now, _, do, args = heapq.heappop(self._heap)
        self.events += 1
        do(*args)
        return True


class Sum:
    """The integral of a value over time."""

    __slots__ = ("_at", "_clock", "_total", "value")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._total = self._at = self.value = 0.0

    def add(self, change: float) -> None:
        """From now on the value is larger by `change`."""
        now = self._clock.now
        self._total += self.value * (now - self._at)
        self._at = now
        self.value += change

    @property
    def total(self) -> float:
        """Up to now."""
        return self._total + self.value * (self._clock.now - self._at)
