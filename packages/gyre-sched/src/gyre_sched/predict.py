"""How long executions take: durations learned in the run, quantiles of what is left, the predicted end of a burst.

Pure and bounded: of each burst a fixed number of durations is kept, chosen by a hash of the execution's id, so that the
sample is the same in every replay and not biased by when an execution ended. Durations of a burst count only when the
burst is over: those that are known while it runs are the short ones.
"""

from __future__ import annotations

import heapq
import zlib
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

_SAMPLE = 256  # durations kept of a burst
_BURSTS = 4  # bursts remembered; the seed counts as one until it is the oldest
_TASKS = 10_000  # tasks whose lengths are remembered, the last seen


class Durations:
    """Past durations of executions, seconds from start to end."""

    def __init__(self, seed: Iterable[float] = ()) -> None:
        """seed: durations known beforehand, of a trace or an earlier run; at most 256 of them are kept."""
        self._bursts: deque[list[float]] = deque(maxlen=_BURSTS)
        self._new: list[tuple[int, float]] = []  # heap of (-hash, duration): the smallest hashes are kept
        self._sorted: list[float] = []
        given = sorted(seed)
        if given:
            step = max(1.0, len(given) / _SAMPLE)
            self._bursts.append([given[int((i + 0.5) * step)] for i in range(min(len(given), _SAMPLE))])
            self._sorted = self._bursts[0]

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, execution: str, seconds: float) -> None:
        """An execution of the burst under way took this long."""
        item = (-zlib.crc32(execution.encode()), seconds)
        if len(self._new) < _SAMPLE:
            heapq.heappush(self._new, item)
        else:
            heapq.heappushpop(self._new, item)

    def turn(self) -> None:
        """The burst under way is over: what it showed counts from here on."""
        if self._new:
            self._bursts.append([seconds for _, seconds in self._new])
            self._new = []
            self._sorted = sorted(s for burst in self._bursts for s in burst)

    def quantile(self, share: float, age: float = 0.0) -> float | None:
        """The duration that `share` of those past ones longer than `age` seconds did not exceed; None if there are
        none. With `age` 0 this is the plain empirical quantile."""
        first = bisect_right(self._sorted, age)
        left = len(self._sorted) - first
        return self._sorted[first + min(left - 1, int(share * left))] if left else None

    def longest_remaining(self, running: Running, at: float, share: float) -> float:
        """Seconds until the last of `running` ends, each taken to last for its conditional quantile; 0 for one that
        outlasts every past duration, of which nothing is known.

        The quantile of the total duration is a step function of the age, so of the executions on one step only the
        youngest matters: the cost is two bisections a step that somebody is on, whatever the number of executions.
        """
        worst, age, step = 0.0, 0.0, -1
        while (started := running.youngest(at - age)) is not None:
            step = max(step + 1, bisect_right(self._sorted, at - started))
            if step >= len(self._sorted):
                break
            left = len(self._sorted) - step
            worst = max(worst, started + self._sorted[step + min(left - 1, int(share * left))] - at)
            age = self._sorted[step]
        return worst


class Ran(NamedTuple):
    """An execution that was started: of which task, and when."""

    task: str
    at: float


class Running:
    """The executions that were started and have not ended."""

    def __init__(self) -> None:
        self._started: dict[str, Ran] = {}
        self._order: list[float] = []  # their starts, sorted

    def __len__(self) -> int:
        return len(self._order)

    def start(self, execution: str, task: str, at: float) -> None:
        """`execution` starts; once."""
        if execution not in self._started:
            self._started[execution] = Ran(task, at)
            insort(self._order, at)

    def end(self, execution: str) -> Ran | None:
        """`execution` ends; returns how it began, None if that was not told."""
        ran = self._started.pop(execution, None)
        if ran is not None:
            del self._order[bisect_right(self._order, ran.at) - 1]
        return ran

    def youngest(self, at: float) -> float | None:
        """The latest start that is not after `at`."""
        i = bisect_right(self._order, at)
        return self._order[i - 1] if i else None


class TaskLengths:
    """Mean duration of the executions of each task; the tasks seen last are remembered."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def add(self, task: str, seconds: float) -> None:
        """An execution of `task` took this long; the last eight or so count."""
        mean, count = self._means.pop(task, (0.0, 0))
        count = min(count + 1, 8)
        self._means[task] = (mean + (seconds - mean) / count, count)
        if len(self._means) > _TASKS:
            self._means.popitem(last=False)

    def __getitem__(self, task: str) -> float | None:
        known = self._means.get(task)
        return known[0] if known else None
