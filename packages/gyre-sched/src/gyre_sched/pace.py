"""How fast a cell trains, learned from what the feed reports: work done per second and training cell."""

from __future__ import annotations

_FADE = 0.5  # weight of everything seen before a burst, at its end


class Pace:
    """Work done per second of a training cell while there was work. The unit is the feed's; only ratios matter."""

    def __init__(self, at: float = 0.0) -> None:
        self._at = at
        self._trainers = 0
        self._left = 0.0
        self._done = 0.0
        self._work = 0.0
        self._seconds = 0.0

    @property
    def rate(self) -> float | None:
        """Work a second and cell; None before any was seen."""
        return self._work / self._seconds if self._seconds > 0 and self._work > 0 else None

    def trainers(self, count: int, at: float) -> None:
        """From now on `count` cells train."""
        self._pass(at)
        self._trainers = count

    def work(self, left: float, done: float, at: float) -> None:
        """The feed has `left` to train on now, and `done` was done since the run began; after the core was restored
        `done` may go back, which counts as nothing."""
        self._pass(at)
        self._work += max(0.0, done - self._done)
        self._left, self._done = left, done

    def fade(self) -> None:
        """What was seen so far counts half."""
        self._work *= _FADE
        self._seconds *= _FADE

    def _pass(self, at: float) -> None:
        if self._left > 0:
            self._seconds += (at - self._at) * self._trainers
        self._at = at
