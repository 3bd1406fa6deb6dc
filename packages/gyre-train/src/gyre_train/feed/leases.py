"""Who works on which micro-step of the open batch: a pure state machine, time passed in.

    queued ──claim──▶ leased ──complete──▶ done ──hand-over taken by the core──▶ counted
       ▲                │  core completes: counted at once                          │
       └── the cell is lost, leaves, or is refused (attempt + 1) ◀── done           └── only `reset` takes it back

A micro-step's (id, attempt) names one computation of it: whatever arrives under an older attempt is refused. A
satellite's contribution is all or nothing: until the core has added it, losing the cell returns all its micro-steps.
From `collect` to `collected` the core is reading the offers it was given: those cells cannot expire meanwhile.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import StrEnum

from gyre_train.errors import FeedError
from gyre_train.protocol import Exhausted, Ok, Reopened, Taken, Wait

Pair = tuple[int, int]  # (micro-step, attempt)


class State(StrEnum):
    """Of a micro-step."""

    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"  # in the sums of `cell`, which the core has not added yet
    COUNTED = "counted"  # in the core's sums


@dataclass(slots=True)
class Step:
    """One micro-step. `loss`, `seconds` and `metrics` are what its last completion reported."""

    id: int
    attempt: int = 0
    state: State = State.QUEUED
    cell: int | None = None
    loss: float = 0.0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offer:
    """A satellite's sums, waiting to be read by the core."""

    cell: int
    pairs: frozenset[Pair]
    gradients: bytes


@dataclass(slots=True)
class _Cell:
    seen: float  # when it was last heard, on the caller's clock
    offer: Offer | None = None


class Leases:
    """The micro-steps of one batch.

    core: the cell whose completions count at once. lease: seconds without a sign of life after which a satellite is
    lost. `now` is seconds on any monotonic clock.
    """

    def __init__(self, *, core: int, lease: float, now: float) -> None:
        self.core = core
        self.lease = lease
        self.sealed = False
        self.returned = 0  # times a micro-step went back to the queue
        self._steps: list[Step] = []
        self._queue: list[int] = []  # heap of ids: the oldest first, so that returned work is not starved
        self._cells: dict[int, _Cell] = {core: _Cell(now)}
        self._taken: dict[int, set[Pair]] = {}
        self._handed: tuple[int, ...] = ()

    # --- what is known -----------------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[Step, ...]:
        """All micro-steps in order of id."""
        return tuple(self._steps)

    @property
    def left(self) -> int:
        """Micro-steps that are not computed yet: queued or leased."""
        return sum(s.state in (State.QUEUED, State.LEASED) for s in self._steps)

    @property
    def queued(self) -> int:
        """Micro-steps that can be claimed now."""
        return len(self._queue)

    @property
    def finished(self) -> bool:
        """No micro-step will come and every one is in the core's sums."""
        return self.sealed and all(s.state is State.COUNTED for s in self._steps)

    @property
    def loss(self) -> float:
        """Σ w·ℓ over the micro-steps computed so far, added in order of id."""
        return sum(s.loss for s in self._steps if s.state in (State.DONE, State.COUNTED))

    def is_member(self, cell: int) -> bool:
        """Whether `cell` is in the batch: the core always is, a satellite from `join` until its end."""
        return cell in self._cells

    def core_silent(self, now: float) -> bool:
        """Whether the core has not been heard for a lease. Its batch cannot go on without it, nor be saved."""
        return now > self._cells[self.core].seen + self.lease

    # --- the batch grows -----------------------------------------------------------------------------------------

    def add(self) -> int:
        """A micro-step was packed: queue it and return its id."""
        if self.sealed:
            raise FeedError("a micro-step was packed after the batch was sealed")
        step = Step(len(self._steps))
        self._steps.append(step)
        heapq.heappush(self._queue, step.id)
        return step.id

    def seal(self) -> None:
        """All micro-steps of the batch have been added."""
        self.sealed = True

    def reset(self, now: float) -> None:
        """The core lost its sums: nothing counts, nobody is a member, and what was ever claimed gets a new attempt."""
        for step in self._steps:
            if step.state is not State.QUEUED:
                self._requeue(step)
        self._cells = {self.core: _Cell(now)}
        self._taken = {}
        self._handed = ()

    # --- cells ---------------------------------------------------------------------------------------------------

    def join(self, cell: int, now: float) -> Wait | None:
        """A satellite with empty sums enters the batch; None: it has. A member that joins again has lost its sums."""
        if cell == self.core:
            raise FeedError(f"cell {cell!r} is the core: it opens batches and does not join them")
        if cell in self._handed:
            return Wait(reason="the core is reading what this cell handed over")
        if self.core_silent(now):
            return Wait(reason="the core is silent")
        if self.sealed and not self._queue:
            return Wait(reason="the open batch has no micro-step left", retry=0.5)
        if cell in self._cells:
            self._drop(cell)
        self._cells[cell] = _Cell(now)
        return None

    def renew(self, cell: int, now: float) -> Ok:
        """A sign of life."""
        member = self._cells.get(cell)
        if member is None:
            return Ok(kept=cell in self._taken)  # after a taken hand-over there is nothing left to lose
        member.seen = now
        return Ok()

    def expire(self, now: float) -> tuple[int, ...]:
        """Drop the satellites that were silent for a lease; returns them."""
        lost = tuple(
            cell
            for cell, member in self._cells.items()
            if cell != self.core and cell not in self._handed and now > member.seen + self.lease
        )
        for cell in lost:
            self._drop(cell)
        return lost

    # --- micro-steps ---------------------------------------------------------------------------------------------

    def claim(self, cell: int, now: float) -> Step | Wait | Exhausted:
        """Lease the oldest micro-step to `cell`.

        A cell that still holds an uncompleted one gets the same again: the reply was lost on the way. A cell that is
        not a member, or has offered its sums, gets nothing more: its hand-over says what became of them.
        """
        member = self._cells.get(cell)
        if member is None or member.offer is not None:
            return Exhausted()
        member.seen = now
        for step in self._steps:
            if step.state is State.LEASED and step.cell == cell:
                return step
        if cell != self.core and self.core_silent(now):
            return Wait(reason="the core is silent")
        if self._queue:
            step = self._steps[heapq.heappop(self._queue)]
            step.state, step.cell = State.LEASED, cell
            return step
        return Exhausted() if self.sealed else Wait(reason="no micro-step is packed yet")

    def complete(
        self, cell: int, pair: Pair, now: float, *, loss: float, seconds: float, metrics: dict[str, float]
    ) -> Ok:
        """A micro-step is in the sums of `cell`. Not kept: the lease was lost. Repeating it changes nothing."""
        step = self._find(pair[0])
        if pair in self._taken.get(cell, ()):
            return Ok()
        member = self._cells.get(cell)
        if member is None or step.cell != cell or step.attempt != pair[1] or step.state is State.QUEUED:
            return Ok(kept=False)
        member.seen = now
        if step.state is State.LEASED:
            step.state = State.COUNTED if cell == self.core else State.DONE
            step.loss, step.seconds, step.metrics = loss, seconds, metrics
        return Ok()

    # --- hand-over -----------------------------------------------------------------------------------------------

    def offer(self, cell: int, pairs: tuple[Pair, ...], gradients: bytes, now: float) -> Taken | Wait:
        """A satellite offers its sums and claims no more; asked again until it is `Taken`.

        The sums must hold micro-steps that this cell completed and still holds: one stale one spoils them all.
        """
        if cell == self.core:
            raise FeedError(f"cell {cell!r} is the core: it has nobody to hand over to")
        offered = frozenset(pairs)
        if offered and offered <= self._taken.get(cell, set()):
            return Taken()
        member = self._cells.get(cell)
        if member is None:
            return Taken(kept=not offered)
        member.seen = now
        if cell in self._handed:
            return Wait(reason="the core is reading the sums")
        held = {(s.id, s.attempt) for s in self._steps if s.cell == cell and s.state is State.DONE}
        if not offered <= held or not offered:
            self._drop(cell)
            return Taken(kept=not offered)
        for step in self._steps:  # what it leaves behind: unfinished, or completed but not in these sums
            if (
                step.cell == cell
                and step.state in (State.LEASED, State.DONE)
                and (step.id, step.attempt) not in offered
            ):
                self._requeue(step)
        member.offer = Offer(cell, offered, gradients)
        return Wait(reason="the core has not added the sums yet")

    def collect(self, now: float) -> tuple[Offer, ...] | Wait | Reopened:
        """The core asks for the offers it has not added yet, in cell order."""
        self._cells[self.core].seen = now
        if self._queue or any(s.state is State.LEASED and s.cell == self.core for s in self._steps):
            return Reopened()
        if not self.sealed:
            return Wait(reason="the batch is not full yet")
        offers = {c: m.offer for c, m in self._cells.items() if m.offer is not None}
        for step in self._steps:
            if step.state is not State.COUNTED and step.cell not in offers:
                return Wait(reason=f"cell {step.cell} has not handed over micro-step {step.id}")
        self._handed = tuple(sorted(offers))
        return tuple(offers[c] for c in self._handed)

    def collected(self, cells: tuple[int, ...], lost: tuple[int, ...], now: float) -> Ok | Reopened:
        """The core has added the offers of `cells`; those of `lost` could not be read. Raises `FeedError`."""
        self._cells[self.core].seen = now
        named = sorted((*cells, *lost))
        if named != list(self._handed):
            if not self._handed and set(cells) <= set(self._taken):  # repeated: the reply was lost
                return Ok() if self.finished else Reopened()
            raise FeedError(f"the core was handed the sums of cells {list(self._handed)!r}, but answers for {named!r}")
        self._handed = ()
        for cell in cells:
            offer = self._cells.pop(cell).offer
            assert offer is not None  # noqa: S101  (handed cells have one)
            for id_, _ in offer.pairs:
                self._steps[id_].state = State.COUNTED
            self._taken.setdefault(cell, set()).update(offer.pairs)
        for cell in lost:
            self._drop(cell)
        return Reopened() if lost else Ok()

    # --- inside --------------------------------------------------------------------------------------------------

    def _find(self, id_: int) -> Step:
        if not 0 <= id_ < len(self._steps):
            raise FeedError(f"micro-step {id_!r} does not exist; the batch has {len(self._steps)} so far")
        return self._steps[id_]

    def _drop(self, cell: int) -> None:
        """End the membership of a satellite: everything it holds that does not count returns."""
        del self._cells[cell]
        for step in self._steps:
            if step.cell == cell and step.state in (State.LEASED, State.DONE):
                self._requeue(step)

    def _requeue(self, step: Step) -> None:
        step.attempt += 1
        step.state, step.cell = State.QUEUED, None
        step.loss, step.seconds, step.metrics = 0.0, 0.0, {}
        heapq.heappush(self._queue, step.id)
        self.returned += 1
