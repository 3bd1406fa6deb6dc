"""An engine that shares its time among requests.

It decodes all its requests at one pace, which falls with their number and their contexts. What a request has got is
therefore a difference of the engine's running token count, and a heap of targets finds who is done next.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import count

from gyre_sched.simulate.clock import Clock
from gyre_sched.simulate.scenario import Fleet, Switch
from gyre_sched.simulate.trace import Turn


class Job:
    """An execution."""

    __slots__ = (
        "batch", "capped", "context", "engine", "fresh", "group", "left", "move", "name", "started", "task", "token",
        "tokens", "turn", "turns", "version",
    )  # fmt: skip

    def __init__(self, name: str, batch: int, group: str, task: str, turns: tuple[Turn, ...]) -> None:
        self.name, self.batch, self.group, self.task, self.turns = name, batch, group, task, turns
        self.turn = 0
        self.context = 0  # tokens, those of the call under way included
        self.fresh = 0  # of them still to prefill
        self.left = 0.0  # tokens still to sample of the call under way
        self.tokens = 0.0  # unique ones of the calls that are over
        self.engine: EngineModel | None = None  # it sticks to
        self.move = False  # its context has to come from another engine
        self.token = 0  # counts its steps: an event meant for an earlier one is void
        self.started = -1.0
        self.version = 0  # weights it began with
        self.capped = False


class EngineModel:
    """One engine. `on_done(job)` is called when a request has its last token."""

    def __init__(self, index: int, clock: Clock, fleet: Fleet, switch: Switch, on_done: Callable[[Job], None]) -> None:
        self.index = index
        self.jobs: set[Job] = set()  # executions that stick to it
        self._clock, self._fleet, self._switch, self._on_done = clock, fleet, switch, on_done
        self._active: dict[Job, float | None] = {}  # target; None while its prompt is prefilled
        self._heap: list[tuple[float, int, Job]] = []
        self._waiting: deque[Job] = deque()  # for room in the cache
        self._resident: OrderedDict[Job, int] = OrderedDict()  # contexts in the cache, least recently used first
        self._cached = 0  # their tokens
        self._context = 0  # tokens of the active requests
        self._decoding = 0
        self._work = 0.0  # tokens a request present all the time would have got
        self._at = 0.0  # when that was so
        self._rate = 0.0  # of it, a second
        self._prefilled = 0.0  # when the prefill is free
        self._timer = 0
        self._paused = 0
        self._serial = count()

    # --- requests

    def submit(self, job: Job) -> None:
        """A call of `job`: `fresh` tokens to prefill, `left` to sample."""
        if self._context and self._context + job.context > self._fleet.kv_tokens:
            self._waiting.append(job)
        else:
            self._admit(job)

    def withdraw(self, job: Job) -> bool:
        """Take the request of `job` away, if it has one here; `job.left` is what is still to be sampled."""
        if job in self._waiting:
            self._waiting.remove(job)
            return True
        if job not in self._active:
            return False
        self._advance()
        target = self._active.pop(job)
        job.token += 1
        if target is not None:
            job.left = max(0.0, target - self._work)
            job.fresh = 0
            self._decoding -= 1
        self._released(job)
        return True

    def forget(self, job: Job) -> None:
        """The execution is not here any more."""
        self.jobs.discard(job)
        self._cached -= self._resident.pop(job, 0)

    def pause(self, seconds: float) -> None:
        """New weights in place: nobody decodes for so long, and every context is computed again."""
        self._advance()
        for job in [j for j in self._resident if j not in self._active]:
            self._cached -= self._resident.pop(job)
        self._paused += 1
        self._schedule()
        self._clock.after(seconds + self._context / self._fleet.prefill, self._resume)

    def _resume(self) -> None:
        self._advance()
        self._paused -= 1
        self._schedule()

    def _admit(self, job: Job) -> None:
        delay, fresh = 0.0, job.fresh
        if job in self._resident:
            self._cached -= self._resident.pop(job)
        elif job.move and self._switch.move == "kv":
            delay = self._switch.move_seconds + (job.context - fresh) / self._switch.move_rate
        else:
            fresh = job.context
        job.move = False
        self._prefilled = max(self._clock.now, self._prefilled) + fresh / self._fleet.prefill
        self._resident[job] = job.context
        self._cached += job.context
        self._context += job.context
        self._active[job] = None
        self._evict()
        job.token += 1
        self._clock.at(self._prefilled + delay, self._begin, job, job.token)

    def _evict(self) -> None:
        if self._cached > self._fleet.kv_tokens:
            for job in [j for j in self._resident if j not in self._active]:
                self._cached -= self._resident.pop(job)
                if self._cached <= self._fleet.kv_tokens:
                    return

    def _begin(self, job: Job, token: int) -> None:
        if job.token != token or job not in self._active:
            return
        self._advance()
        target = self._work + job.left
        self._active[job] = target
        heapq.heappush(self._heap, (target, next(self._serial), job))
        self._decoding += 1
        self._schedule()

    def _released(self, job: Job) -> None:
        self._context -= job.context
        while self._waiting and (
            not self._context or self._context + self._waiting[0].context <= self._fleet.kv_tokens
        ):
            self._admit(self._waiting.popleft())
        self._schedule()

    # --- time

    def _advance(self) -> None:
        now = self._clock.now
        self._work += (now - self._at) * self._rate
        self._at = now

    def _schedule(self) -> None:
        """The pace has changed: set the timer for who is done next."""
        self._timer += 1
        heap = self._heap
        while heap and self._active.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)  # withdrawn
        if not heap or self._paused:
            self._rate = 0.0
            return
        self._rate = 1.0 / self._fleet.step(self._decoding, self._context)
        self._clock.at(self._at + max(0.0, heap[0][0] - self._work) / self._rate, self._done, self._timer)

    def _done(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance()
        target, _, job = heapq.heappop(self._heap)
        self._work = max(self._work, target)  # rounding must not leave a request a hair short for ever
        del self._active[job]
        self._decoding -= 1
        job.left = 0.0
        self._released(job)
        self._on_done(job)
