"""How often something that ends by itself is started again."""

from __future__ import annotations

from collections import deque


class Attempts:
    """At most `most` restarts within any `window` seconds: one that ends again and again is given up, one that ends
    once in a long while is not."""

    def __init__(self, most: int, window: float) -> None:
        self._most = most
        self._window = window
        self._ends: deque[float] = deque()

    def again(self, now: float) -> bool:
        """Count an end at `now`; whether to start again."""
        self._ends.append(now)
        while self._ends[0] <= now - self._window:
            self._ends.popleft()
        return len(self._ends) <= self._most

    @property
    def ends(self) -> int:
        """Ends within the window, as of the last one."""
        return len(self._ends)
