"""The feed's state: answers trainers, fills the open batch, knows what is left. Pure; time is passed in.

    Submit ─▶ buffer ─▶ [prepare] ─▶ prepared ─▶ [pack] ─▶ batch ─▶ trainers ─▶ record, fates
                          in a thread               in a thread

A core that opens an older version than the last one was restored from a checkpoint: the batches since then are
replayed, with the same groups.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from gyre_sched.protocol import Backlog
from gyre_train.errors import FeedError
from gyre_train.feed.batch import Batch
from gyre_train.feed.buffer import Buffer, Group, admitted
from gyre_train.feed.config import FeedConfig
from gyre_train.feed.history import Closed, History
from gyre_train.feed.leases import Step
from gyre_train.feed.metrics import step_record
from gyre_train.feed.packer import PackedStep, Packer
from gyre_train.feed.prepare import Fated, PreparedGroup
from gyre_train.protocol import (
    Claim,
    CloseBatch,
    Collect,
    Collected,
    Complete,
    Exhausted,
    FeedStatus,
    Handed,
    HandOver,
    Join,
    Joined,
    MicroStep,
    Ok,
    OpenBatch,
    Opened,
    Renew,
    Reopened,
    Reply,
    Request,
    Stats,
    Taken,
    Wait,
)
from gyre_traj.intake import Accepted, Submit
from gyre_traj.rows import Row

log = logging.getLogger(__name__)

CORE = 0


class Feed:
    """See the module. size: groups a batch is made of."""

    def __init__(self, config: FeedConfig, *, size: int) -> None:
        self.config = config
        self.size = size
        self.buffer = Buffer(group_timeout=config.group_timeout, max_groups=config.max_groups)
        self.batch: Batch | None = None
        self.history = History(size)
        self._core_silent = False  # said so already
        self._last: Batch | None = None  # closed: late hand-overs still ask about it
        self._prepared: dict[int, tuple[PreparedGroup, list[Row]]] = {}  # by group number, until packed
        self._steps_closed = 0  # micro-steps of the batches that this process closed
        self._executions_closed = 0  # and their executions

    # --- executions in ---------------------------------------------------------------------------------------------

    def submit(self, message: Submit, now: float) -> Accepted:
        """Take a finished execution in; idempotent. Raises `FeedError`."""
        return self.buffer.submit(message, now)

    def to_prepare(self) -> tuple[int, Group] | None:
        """The next complete group whose rows are needed soon: for the open batch or the one after it."""
        for number in range(self._filled, min(self._next + self.size, len(self.buffer.complete))):
            if number not in self._prepared:
                return number, self.buffer.complete[number]
        return None

    def prepared(self, number: int, group: PreparedGroup, rows: list[Row]) -> None:
        """A group was prepared; its exclusions are final."""
        self._prepared[number] = (group, rows)
        for execution in group.executions:
            if execution.fated is Fated.EXCLUDED:
                self.buffer.exclude(execution.execution, execution.reason)

    def to_pack(self) -> tuple[Batch, PreparedGroup, list[Row]] | None:
        """The open batch's next group, if it is prepared."""
        if self.batch is None or self.batch.full or self._filled not in self._prepared:
            return None
        return self.batch, *self._prepared[self._filled]

    def packed(self, batch: Batch, group: PreparedGroup, micro_steps: list[PackedStep]) -> None:
        """The group and the micro-steps its arrival completed; ignored when the batch was given up meanwhile."""
        if batch is not self.batch:
            return
        del self._prepared[self._filled]
        batch.add(group, micro_steps)

    # --- trainers ----------------------------------------------------------------------------------------------------

    def answer(self, request: Request, now: float) -> Reply:
        """Answer a trainer; `CloseBatch` goes to `closing` and `commit` instead. Raises `FeedError`."""
        match request:
            case OpenBatch():
                return self._open(request, now)
            case Join(cell=cell):
                return self._join(cell, now)
            case Claim():
                return self._claim(request, now)
            case Renew(cell=cell):
                batch = self._batch(request.batch)
                return batch.leases.renew(cell, now) if batch else Ok(kept=False)
            case Complete(cell=cell):
                batch = self._batch(request.batch)
                if batch is None:
                    return Ok(kept=False)
                return batch.leases.complete(
                    cell,
                    (request.micro_step, request.attempt),
                    now,
                    loss=request.loss,
                    seconds=request.seconds,
                    metrics=request.metrics,
                )
            case HandOver(cell=cell):
                batch = self._batch(request.batch)
                if batch is None:
                    return Taken(kept=not request.micro_steps)
                return batch.leases.offer(cell, request.micro_steps, request.gradients, now)
            case Collect():
                return self._collect(self._opened(request.cell, request.batch), now)
            case Collected(cells=cells, lost=lost):
                batch = self._opened(request.cell, request.batch)
                if lost:
                    log.warning("batch %d: the sums of cells %s could not be read; recomputed", batch.index, list(lost))
                return batch.leases.collected(cells, lost, now)
            case FeedStatus():
                return self.stats()
            case _:
                raise FeedError(f"{type(request).__name__} is not answered here")

    def tick(self, now: float) -> None:
        """Let time pass: groups that wait too long, cells that went silent."""
        for group in self.buffer.expire(now):
            log.warning(
                "group %r goes on with %d of %d members: the others did not come within feed.group_timeout=%s s",
                group.name,
                len(group.members),
                group.size,
                self.config.group_timeout,
            )
        if self.batch is None:
            return
        for cell in self.batch.leases.expire(now):
            log.warning("batch %d: cell %d was silent; its micro-steps are queued again", self.batch.index, cell)
        silent = self.batch.leases.core_silent(now)
        if silent and not self._core_silent:
            log.warning("batch %d: the core is silent; the batch waits until it is opened again", self.batch.index)
        self._core_silent = silent

    def _open(self, request: OpenBatch, now: float) -> Reply:
        if request.cell != CORE:
            raise FeedError(f"cell {request.cell!r} cannot open a batch: the core, cell {CORE}, does")
        if self.batch is not None and request.version == self.batch.version:
            log.warning("batch %d is opened again: nothing done so far counts", self.batch.index)
            self.batch.reset(request.version, request.manifest, now)
            return Opened(batch=self.batch.index, version=request.version)
        index = self.history.index(request.version)
        first = self.history.first_group(index)
        if first >= len(self.buffer.complete):
            return Wait(reason="no group is complete")
        if given_up := self.history.open(index):
            log.warning("the core is back at version %d; %d closed batches are replayed", request.version, given_up)
            self._last = None
            self._prepared = {n: p for n, p in self._prepared.items() if n >= first}
        self.batch = Batch(
            index,
            version=request.version,
            manifest=request.manifest,
            size=self.size,
            packer=Packer(self.config.tokens, self.config.layout),
            core=CORE,
            lease=self.config.lease_s,
            now=now,
        )
        return Opened(batch=index, version=request.version)

    def _join(self, cell: int, now: float) -> Reply:
        if self.batch is None:
            return Wait(reason="no batch is open")
        refused = self.batch.leases.join(cell, now)
        if refused is not None:
            return refused
        return Joined(batch=self.batch.index, version=self.batch.version, manifest=self.batch.manifest)

    def _claim(self, request: Claim, now: float) -> Reply:
        batch = self._batch(request.batch)
        if batch is None:
            return Exhausted()
        claimed = batch.leases.claim(request.cell, now)
        if not isinstance(claimed, Step):
            return claimed
        return MicroStep(
            micro_step=claimed.id,
            attempt=claimed.attempt,
            lease=self.config.lease_s,
            packed=batch.packed(claimed.id),
        )

    def _collect(self, batch: Batch, now: float) -> Reply:
        offers = batch.leases.collect(now)
        if isinstance(offers, Wait | Reopened):
            return offers
        return Handed(
            cells=tuple(o.cell for o in offers),
            gradients=tuple(o.gradients for o in offers),
            executions=batch.executions,
            loss=batch.leases.loss,
        )

    def closing(self, request: CloseBatch, now: float) -> tuple[Batch, dict[str, Any]] | None:
        """The record of the batch that `request` would close; None when it is closed already. Raises `FeedError`.

        Nothing has changed yet: write the record, then `commit`.
        """
        head = self.history.head
        if head is not None and (request.batch, request.version) == (head.index, head.new_version):
            return None
        batch = self._opened(request.cell, request.batch)
        if not batch.leases.finished:
            raise FeedError(f"batch {batch.index} cannot be closed: not every micro-step is in the core's sums")
        allowed = {batch.version + 1} if batch.executions else {batch.version, batch.version + 1}
        if request.version not in allowed:
            raise FeedError(
                f"batch {batch.index} was trained on version {batch.version} with {batch.executions} executions: "
                f"its step makes version {batch.version + 1}, got {request.version!r}"
            )
        return batch, step_record(batch, request, now - batch.opened)

    def implied_close(self, request: Request) -> CloseBatch | None:
        """A core that opens the next version without having closed this batch stepped, saved and died before it could
        say so: its batch must be closed, not trained again. Loss is what the leases know, the rest is not a number."""
        batch = self.batch
        if not isinstance(request, OpenBatch) or batch is None or request.version != batch.version + 1:
            return None
        if not batch.leases.finished:
            return None
        return CloseBatch(
            cell=request.cell,
            batch=batch.index,
            version=request.version,
            loss=batch.leases.loss / max(1, batch.executions),
            grad_norm=math.nan,
            learning_rate=math.nan,
            seconds=math.nan,
        )

    def commit(self, batch: Batch, request: CloseBatch) -> None:
        """The record is written: the batch is closed and its executions have met their fate."""
        for group in batch.groups:
            for execution in group.executions:
                if execution.fated is not Fated.EXCLUDED:
                    reason = "placeholder" if execution.fated is Fated.PLACEHOLDER else ""
                    self.buffer.train(execution.execution, batch.index + 1, reason)
        self.history.close(Closed(batch.index, batch.version, request.version))
        self.buffer.retire(self.history.next_group)
        self._steps_closed += len(batch.leases.steps)
        self._executions_closed += batch.executions
        batch.shrink()
        self.batch, self._last = None, batch

    def _batch(self, index: int) -> Batch | None:
        """The open batch or the one before it; None: a stale request."""
        for batch in (self.batch, self._last):
            if batch is not None and batch.index == index:
                return batch
        return None

    def _opened(self, cell: int, index: int) -> Batch:
        if cell != CORE:
            raise FeedError(f"cell {cell!r} asks what only the core, cell {CORE}, may ask")
        if self.batch is None or self.batch.index != index:
            now = "none" if self.batch is None else self.batch.index
            raise FeedError(f"batch {index!r} is not open (open: {now}); open a batch first")
        return self.batch

    # --- what is left ------------------------------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        """Number of the first group that belongs to no batch yet."""
        if self.batch is not None:
            return self.history.first_group(self.batch.index + 1)
        return self.history.next_group

    @property
    def _filled(self) -> int:
        """Number of the next group to go into a batch."""
        if self.batch is None:
            return self._next
        return self.history.first_group(self.batch.index) + len(self.batch.groups)

    @property
    def _version(self) -> int:
        """The weights that the last closed batch made, as far as known."""
        if self.history.head is not None:
            return self.history.head.new_version
        return self.batch.version if self.batch is not None else 0

    def _work_left(self) -> int:
        """Micro-steps of the open batch that are not computed; rows that are not packed yet count as one."""
        if self.batch is None:
            return 0
        coming = self.batch.packer.pending > 0 or len(self.buffer.complete) > self._filled < self._next
        return self.batch.leases.left + int(coming)

    def backlog(self) -> Backlog:
        """What the scheduler needs to know. A complete group that admits nobody counts one in `waiting`: it must be
        taken through a batch all the same. Work is counted in micro-steps; an execution that waits counts as many as
        one made so far in the mean."""
        groups = self.buffer.complete[self._next :]
        waiting = sum(max(1, sum(admitted(m) for m in g.members)) for g in groups)
        left = self._work_left()
        steps = len(self.batch.leases.steps) if self.batch is not None else 0
        executions = self._executions_closed + (self.batch.executions if self.batch is not None else 0)
        a_execution = (self._steps_closed + steps) / executions if executions else 0.0
        return Backlog(
            waiting=waiting,
            open_batch=None if self.batch is None else self.batch.index,
            micro_steps_left=left,
            batches_closed=len(self.history.closed),
            executions_trained=self.buffer.trained,
            executions_excluded=self.buffer.excluded,
            batches_ready=len(groups) // self.size + int(left > 0),
            version=self._version,
            work_left=left + waiting * a_execution,
            work_done=float(self._steps_closed + steps - (self.batch.leases.left if self.batch is not None else 0)),
        )

    def stats(self) -> Stats:
        """For an operator."""
        steps = self.batch.leases.steps if self.batch is not None else ()
        return Stats(
            groups_complete=len(self.buffer.complete),
            executions_waiting=self.backlog().waiting,
            executions_trained=self.buffer.trained,
            executions_excluded=self.buffer.excluded,
            batches_closed=len(self.history.closed),
            open_batch=None if self.batch is None else self.batch.index,
            micro_steps_done=len(steps) - self.batch.leases.left if self.batch is not None else 0,
            micro_steps_total=len(steps),
            version=self._version,
        )
