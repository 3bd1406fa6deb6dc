"""The training side: groups are cut into micro-steps, cells claim them, a batch closes, new weights are out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_sched.simulate.clock import Clock, Sum
from gyre_sched.simulate.engine import Job
from gyre_sched.simulate.scenario import Scenario


@dataclass(slots=True)
class Batch:
    """The batch that is trained."""

    groups: list[list[Job]] = field(default_factory=list)
    unpacked: float = 0.0  # tokens that fill no micro-step yet
    queue: deque[float] = field(default_factory=deque)  # micro-steps nobody has claimed, tokens
    leased: int = 0
    left: float = 0.0  # tokens not trained
    joined: set[int] = field(default_factory=set)  # cells that have its weights


@dataclass(frozen=True, slots=True)
class Closed:
    """A batch that was trained."""

    at: float
    jobs: tuple[Job, ...]
    version: int  # it was trained on


class Training:
    """Feed and trainers. `on_change()` is called when what a scheduler may ask has changed, `on_publish(version)` when
    new weights can be read."""

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        *,
        core: bool,
        on_change: Callable[[], None],
        on_publish: Callable[[int], None],
    ) -> None:
        """core: a batch is opened and closed only while cell 0 trains. `scenario` is a calibrated one."""
        assert scenario.training.rate is not None  # noqa: S101
        self._rate = scenario.training.rate
        self._model, self._size = scenario.training, scenario.workload.groups
        self._members = scenario.workload.group_size
        self._clock, self._core, self._on_change, self._on_publish = clock, core, on_change, on_publish
        self.complete: deque[list[Job]] = deque()  # in order of completion
        self.closed: list[Closed] = []
        self.published = 0
        self.done = 0.0  # tokens trained
        self.open: Batch | None = None
        self.stepping = False
        self.cells: dict[int, bool] = {}  # in training -> computing
        self.busy = Sum(clock)  # cells that compute, join or step
        self._groups: dict[str, list[Job]] = {}
        self._leaving: dict[int, Callable[[], None]] = {}

    @property
    def waiting(self) -> int:
        """Executions of complete groups in no batch."""
        return len(self.complete) * self._members

    @property
    def version(self) -> int:
        """Weights made so far."""
        return len(self.closed)

    @property
    def left(self) -> float:
        """Tokens to train of what exists."""
        waiting = sum(job.tokens for group in self.complete for job in group)
        return waiting + (self.open.left if self.open else 0.0)

    @property
    def micro_steps_left(self) -> int:
        """Of the open batch."""
        batch = self.open
        return 0 if batch is None else len(batch.queue) + batch.leased + (batch.unpacked > 0)

    @property
    def batches_ready(self) -> int:
        """Whole batches that wait, plus the open one if it has work."""
        return len(self.complete) // self._size + (self.micro_steps_left > 0)

    def submit(self, job: Job) -> None:
        """A finished execution."""
        group = self._groups.setdefault(job.group, [])
        group.append(job)
        if len(group) == self._members:
            self.complete.append(self._groups.pop(job.group))
            self._work()
            self._on_change()

    def enter(self, cell: int) -> None:
        """The trainer of `cell` has entered."""
        self.cells[cell] = False
        self._work()

    def leave(self, cell: int, then: Callable[[], None]) -> None:
        """The trainer of `cell` leaves when its micro-step is done, then `then()`."""
        if self.cells[cell]:
            self._leaving[cell] = then
        else:
            del self.cells[cell]
            then()

    # --- work

    @property
    def _eligible(self) -> list[list[Job]]:
        """Complete groups that may go into the next batch, or the open one."""
        groups = list(self.complete)
        if self._model.membership == "arrival":
            return groups
        return [group for group in groups if group[0].batch == self.version]

    @property
    def _able(self) -> bool:
        return bool(self.cells) and (not self._core or 0 in self.cells)

    def _work(self) -> None:
        if self.open is None:
            enough = 1 if self._model.streaming else self._size
            if not self._able or self.published != self.version or len(self._eligible) < enough:
                return
            self.open = Batch()
        batch = self.open
        self._fill(batch)
        for cell in sorted(self.cells):
            if not batch.queue:
                break
            if not self.cells[cell] and cell not in self._leaving:
                self._claim(batch, cell)
        full = len(batch.groups) == self._size
        if full and not batch.queue and not batch.leased and self._able and not self.stepping:
            self.stepping = True
            self.busy.add(1)
            self._clock.after(self._model.optimizer, self._step)

    def _fill(self, batch: Batch) -> None:
        for group in self._eligible[: self._size - len(batch.groups)]:
            self.complete.remove(group)
            batch.groups.append(group)
            tokens = sum(job.tokens for job in group)
            batch.unpacked += tokens
            batch.left += tokens
        while batch.unpacked >= self._model.micro_step:
            batch.queue.append(float(self._model.micro_step))
            batch.unpacked -= self._model.micro_step
        if len(batch.groups) == self._size and batch.unpacked > 0:
            batch.queue.append(batch.unpacked)
            batch.unpacked = 0.0

    def _claim(self, batch: Batch, cell: int) -> None:
        tokens = batch.queue.popleft()
        batch.leased += 1
        self.cells[cell] = True
        self.busy.add(1)
        seconds = tokens / self._rate
        if cell and cell not in batch.joined:
            batch.joined.add(cell)
            seconds += self._model.join
        self._clock.after(seconds, self._computed, batch, cell, tokens)

    def _computed(self, batch: Batch, cell: int, tokens: float) -> None:
        batch.leased -= 1
        batch.left -= tokens
        self.done += tokens
        self.cells[cell] = False
        self.busy.add(-1)
        if then := self._leaving.pop(cell, None):
            del self.cells[cell]
            then()
        self._work()
        self._on_change()

    def _step(self) -> None:
        batch, self.open, self.stepping = self.open, None, False
        assert batch is not None  # noqa: S101
        self.busy.add(-1)
        jobs = tuple(job for group in batch.groups for job in group)
        self.closed.append(Closed(self._clock.now, jobs, self.version))
        self._on_change()
        self._clock.after(self._model.publish, self._publish, self.version)

    def _publish(self, version: int) -> None:
        self.published = version
        self._on_publish(version)
        self._work()
        self._on_change()
