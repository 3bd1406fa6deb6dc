"""What core and satellite do alike: claim micro-steps of a batch and add them to the replica's sums."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from gyre_train.errors import TrainError
from gyre_train.links import LeaseKeeper, Link
from gyre_train.protocol import Claim, Complete, Exhausted, MicroStep, Wait
from gyre_traj.packing import Packed
from gyre_transport.errors import RemoteError

if TYPE_CHECKING:  # it imports Megatron, which takes tens of seconds
    from gyre_train.replica import Replica

log = logging.getLogger(__name__)


class Ending(StrEnum):
    """Why claiming stopped."""

    EXHAUSTED = "exhausted"  # the feed has nothing left
    LEFT = "left"  # the trainer was told to leave
    LOST = "lost"  # the leases are gone: the sums hold work that others do again


class Claims:
    """The micro-steps that one cell adds to its sums in one batch.

    `micro_steps` are the (id, attempt) pairs in the sums.
    """

    def __init__(self, replica: Replica, feed: Link, keeper: LeaseKeeper, *, cell: int, batch: int) -> None:
        self.micro_steps: list[tuple[int, int]] = []
        self._replica = replica
        self._feed = feed
        self._keeper = keeper
        self._cell = cell
        self._batch = batch
        keeper.hold(batch)

    def drain(self, leave: Callable[[], bool], leave_waiting: Callable[[], bool] | None = None) -> Ending:
        """Claim and compute until nothing is left, `leave` (asked before each claim) says so, or leases are lost.

        leave_waiting: asked, if given, whenever there is nothing to claim yet.
        """
        try:
            while not leave():
                if self._keeper.lost:
                    return Ending.LOST
                reply = self._feed.call(Claim(cell=self._cell, batch=self._batch))
                if isinstance(reply, Exhausted):
                    return Ending.EXHAUSTED
                if isinstance(reply, Wait):
                    if leave_waiting is not None and leave_waiting():
                        return Ending.LEFT
                    time.sleep(reply.retry)
                elif not self._compute(reply):
                    return Ending.LOST
        except RemoteError as e:
            log.warning("batch %d: the feed refused: %s", self._batch, e)
            return Ending.LOST
        return Ending.LEFT

    def _compute(self, step: MicroStep) -> bool:
        self._keeper.hold(self._batch, step.lease)
        try:
            packed = msgspec.msgpack.decode(step.packed, type=Packed)
        except msgspec.DecodeError as e:
            raise TrainError(
                f"micro-step {step.micro_step} does not decode: {e}; is the feed another version of Gyre?"
            ) from e
        began = time.monotonic()
        loss, metrics = self._replica.accumulate(packed)
        seconds = time.monotonic() - began
        reply = self._feed.call(
            Complete(
                cell=self._cell,
                batch=self._batch,
                micro_step=step.micro_step,
                attempt=step.attempt,
                loss=loss,
                seconds=seconds,
                metrics=metrics,
            )
        )
        kept: bool = reply.kept
        log.info(
            "batch %d: micro-step %d.%d: %d tokens, %d targets, loss %.4f, mismatch up to %.3f, %.2f s%s",
            self._batch,
            step.micro_step,
            step.attempt,
            packed.tokens,
            packed.targets,
            loss,
            metrics.get("mismatch_max", 0.0),
            seconds,
            "" if kept else "; its lease was lost",
        )
        if kept:
            self.micro_steps.append((step.micro_step, step.attempt))
        return kept
