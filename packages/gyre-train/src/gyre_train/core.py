"""The core's loop: open a batch, compute its share, collect the others', step, publish, save, close.

    publish v ─▶ open ─▶ claim, complete … ─▶ collect ─▶ add in cell order ─▶ step ─▶ publish v+1 ─▶ save ─▶ close
                  ▲           ▲                  │ work came back                                             │
                  │           └──────────────────┘                                                            │
                  └───────────────────────────────────────────────────────────────────────────────────────────┘
A core whose leases are lost opens the batch again: the feed starts it over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from gyre_train import checkpoint, hf
from gyre_train.claims import Claims, Ending
from gyre_train.errors import LayoutMismatch
from gyre_train.links import Agent, LeaseKeeper, Link, Stopped
from gyre_train.protocol import CloseBatch, Collect, Collected, Handed, OpenBatch, Reopened, Wait
from gyre_transport.errors import DataError, DeadlineExceeded, RemoteError
from gyre_transport.memory import Descriptor, read
from gyre_transport.run import RunDir
from gyre_transport.snapshot import SnapshotSource
from gyre_transport.torch import describe

if TYPE_CHECKING:  # it imports Megatron, which takes tens of seconds
    from gyre_train.replica import Replica

log = logging.getLogger(__name__)

_READ = 120.0  # seconds to read one contribution
_READERS = 10.0  # seconds that those who still read the version before get to end


class Core:
    """Owns the official weights: the only one that steps, publishes and saves.

    announce: tells the scheduler of (version, manifest). model: Hugging Face folder the run started from.
    """

    def __init__(
        self,
        replica: Replica,
        agent: Agent,
        feed: Link,
        keeper: LeaseKeeper,
        source: SnapshotSource,
        announce: Callable[[int, bytes], None],
        *,
        cell: int,
        directory: RunDir,
        model: Path,
    ) -> None:
        self._replica = replica
        self._agent = agent
        self._feed = feed
        self._keeper = keeper
        self._source = source
        self._announce = announce
        self._cell = cell
        self._dir = directory
        self._model = model
        self._manifest = b""
        self._saved = replica.version  # the version the run started from or resumed at needs no saving
        self._exported: int | None = None

    def publish(self) -> None:
        """Make the replica's weights readable as a snapshot and announce it."""
        began = time.monotonic()
        tensors = {name: describe(t) for name, t in self._replica.weights().items()}
        manifest = self._source.advance(self._replica.version, tensors, wait=_READERS)
        self._manifest = msgspec.msgpack.encode(manifest)
        self._announce(self._replica.version, self._manifest)
        log.info("published version %d in %.2f s", self._replica.version, time.monotonic() - began)

    def train(self) -> None:
        """Train batch after batch until ordered out between two of them. Raises `Stopped`, `PeerLost`."""
        try:
            while self._agent.order("training") == "training":
                reply = self._feed.call(
                    OpenBatch(cell=self._cell, version=self._replica.version, manifest=self._manifest)
                )
                if isinstance(reply, Wait):
                    time.sleep(reply.retry)
                else:
                    self._batch(reply.batch)
                    self._keeper.release()
        finally:
            self._keeper.release()

    def finish(self) -> None:
        """Save and export what has not been."""
        if self._saved != self._replica.version:
            self._save()
        self._export()

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _batch(self, batch: int) -> None:
        """Bring one batch to its step; on lost leases return early: opening it again starts it over."""
        began = time.monotonic()
        self._replica.zero()
        claims = Claims(self._replica, self._feed, self._keeper, cell=self._cell, batch=batch)
        try:
            handed = self._gather(batch, claims)
            if handed is None:
                log.warning("batch %d: left or lost; it starts over", batch)
                return
        except RemoteError as e:
            log.warning("batch %d: the feed refused: %s; it starts over", batch, e)
            return
        stepping = time.monotonic()
        norm = self._replica.step(handed.executions)
        seconds = time.monotonic() - stepping
        self.publish()
        version = self._replica.version
        every = self._replica.config.checkpoint_every
        last = version == self._replica.steps
        path = self._save() if last or (every and version % every == 0) else None
        loss = handed.loss / max(1, handed.executions)
        self._feed.call(
            CloseBatch(
                cell=self._cell,
                batch=batch,
                version=version,
                loss=loss,
                grad_norm=norm,
                learning_rate=self._replica.learning_rate,
                seconds=seconds,
                checkpoint=str(path) if path else "",
            )
        )
        log.info(
            "batch %d closed: version %d, loss %.5f, gradient norm %.4f, %d own micro-steps, %.1f s",
            batch,
            version,
            loss,
            norm,
            len(claims.micro_steps),
            time.monotonic() - began,
        )
        if last:
            self._export()

    def _gather(self, batch: int, claims: Claims) -> Handed | None:
        """Compute and collect until every micro-step is in the sums; None: they are void."""
        while True:
            if claims.drain(self._never_leave, self._recalled) is not Ending.EXHAUSTED:
                return None
            handed = self._collect(batch)
            if handed is None:
                continue
            added, lost = self._add(handed)
            reply = self._feed.call(Collected(cell=self._cell, batch=batch, cells=added, lost=lost))
            if not isinstance(reply, Reopened):
                return handed

    def _recalled(self) -> bool:
        """Whether the cell is wanted in rollout while its batch waits for groups that rollout has to make: the sums are
        given up, and the batch starts over when the core is back."""
        return self._agent.order("training") == "idle"

    def _never_leave(self) -> bool:
        """A core ordered out finishes the work there is; only the end of the run interrupts it."""
        if self._agent.order("training") == "stop":
            raise Stopped
        return False

    def _collect(self, batch: int) -> Handed | None:
        """The others' sums once they are complete; None: work came back."""
        while True:
            reply = self._feed.call(Collect(cell=self._cell, batch=batch))
            if isinstance(reply, Handed):
                return reply
            if isinstance(reply, Reopened):
                return None
            self._never_leave()
            time.sleep(reply.retry)

    def _add(self, handed: Handed) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Add each contribution, whole or not at all, in cell order; returns the cells (added, lost)."""
        added, lost = [], []
        staging = (
            [torch.empty(b.shape, dtype=b.dtype) for b in self._replica.gradient_buffers()] if handed.cells else []
        )
        for cell, gradients in zip(handed.cells, handed.gradients, strict=True):
            began = time.monotonic()
            try:
                self._read(gradients, staging)
            except (DataError, DeadlineExceeded, LayoutMismatch) as e:
                log.error("the sums of cell %d could not be read and count for nothing: %s", cell, e)
                lost.append(cell)
                continue
            for index, sums in enumerate(staging):
                self._replica.add_gradients(index, sums)
            added.append(cell)
            size = sum(t.nbytes for t in staging) / 1e6
            log.info("added the sums of cell %d: %.1f MB in %.2f s", cell, size, time.monotonic() - began)
        return tuple(added), tuple(lost)

    def _read(self, gradients: bytes, staging: list[torch.Tensor]) -> None:
        """Read one contribution completely: nothing is added before its last byte was checked to be still offered."""
        descriptors = msgspec.msgpack.decode(gradients, type=tuple[Descriptor, ...])
        if len(descriptors) != len(staging):
            raise LayoutMismatch(
                f"expected {len(staging)} gradient buffers, got {len(descriptors)}; "
                "cells must share [train] and [model]"
            )
        for descriptor, room in zip(descriptors, staging, strict=True):
            read(descriptor, room, deadline=_READ)

    # --- what stays --------------------------------------------------------------------------------------------------

    def _save(self) -> Path:
        began = time.monotonic()
        meta, state = self._replica.state()
        path = checkpoint.save(self._dir.checkpoints, meta, state, keep=self._replica.config.keep_checkpoints)
        self._saved = meta.version
        log.info("saved %s in %.2f s", path, time.monotonic() - began)
        return path

    def _export(self) -> None:
        if self._exported == self._replica.version:
            return
        hf.write_folder(self._model, self._dir.policy, self._replica.weights())
        self._exported = self._replica.version
        log.info("exported version %d to %s", self._replica.version, self._dir.policy)
