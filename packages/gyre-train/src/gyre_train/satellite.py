"""The satellite's loop: join the open batch, take its weights, compute, hand the sums over.

idle ──ordered to train──▶ join ──▶ pull the snapshot ──▶ claim, complete … ──▶ hand over ──taken──▶ join …
                            ▲                                  │ leases lost: the sums are void
                            └──────────────────────────────────┘
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from gyre_train.claims import Claims, Ending
from gyre_train.errors import TrainError
from gyre_train.links import Agent, LeaseKeeper, Link, Stopped
from gyre_train.protocol import HandOver, Join, Joined, Taken, Wait
from gyre_transport.errors import ChecksumMismatch, DataError, DeadlineExceeded, RemoteError
from gyre_transport.memory import register
from gyre_transport.snapshot import Manifest, Snapshot, pull
from gyre_transport.torch import tensors

if TYPE_CHECKING:  # it imports Megatron, which takes tens of seconds
    from gyre_train.replica import Replica

log = logging.getLogger(__name__)

_PULL = 120.0  # seconds to read a snapshot
_PULL_FAILURES = 5  # in a row, before the satellite gives up


class Satellite:
    """Trains on the core's behalf. It holds no optimizer and no weights of its own until it first joins."""

    def __init__(self, replica: Replica, agent: Agent, feed: Link, keeper: LeaseKeeper, *, cell: int) -> None:
        self._replica = replica
        self._agent = agent
        self._feed = feed
        self._keeper = keeper
        self._cell = cell
        self._failures = 0
        self._pulled: Snapshot | None = None  # kept while it serves others
        self._held = b""  # the manifest of its weights: a core that was restored makes a version again, and otherwise

    def train(self) -> None:
        """Join batch after batch until ordered out. Raises `Stopped`, `PeerLost`."""
        try:
            while self._agent.order("training") == "training":
                reply = self._feed.call(Join(cell=self._cell))
                if isinstance(reply, Wait):
                    time.sleep(reply.retry)
                    continue
                self._keeper.hold(reply.batch)
                if self._refresh(reply):
                    self._contribute(reply.batch)
                self._keeper.release()
        finally:
            self._keeper.release()

    def finish(self) -> None:
        """Nothing to save: a satellite's state is the core's."""
        if self._pulled is not None:
            self._pulled.close()

    def _refresh(self, joined: Joined) -> bool:
        """Take the weights of the batch; False: they could not be had, join again."""
        if joined.version == self._replica.version and joined.manifest == self._held:
            return True
        manifest = msgspec.msgpack.decode(joined.manifest, type=Manifest)
        began = time.monotonic()
        try:
            snapshot = pull(manifest, deadline=_PULL)
        except (DataError, DeadlineExceeded) as e:
            # The core has moved on or is gone; only bytes that arrive wrong again and again are a fault to stop for.
            self._failures += isinstance(e, ChecksumMismatch)
            if self._failures >= _PULL_FAILURES:
                raise TrainError(f"version {joined.version} could not be pulled {self._failures} times: {e}") from e
            log.warning("version %d could not be pulled: %s", joined.version, e)
            time.sleep(0.2)
            return False
        self._failures = 0
        if self._pulled is not None:
            self._pulled.close()
        self._pulled = snapshot if snapshot.serves else None
        self._replica.load_weights(tensors(snapshot), version=snapshot.version)
        self._held = joined.manifest
        log.info(
            "took version %d: %.1f MB in %.2f s", snapshot.version, manifest.nbytes / 1e6, time.monotonic() - began
        )
        return True

    def _contribute(self, batch: int) -> None:
        self._replica.zero()
        claims = Claims(self._replica, self._feed, self._keeper, cell=self._cell, batch=batch)
        if claims.drain(lambda: self._agent.order("training") != "training") is Ending.LOST:
            log.warning("batch %d: the leases were lost; %d micro-steps are void", batch, len(claims.micro_steps))
            return
        self._hand_over(batch, tuple(claims.micro_steps))

    def _hand_over(self, batch: int, micro_steps: tuple[tuple[int, int], ...]) -> None:
        """Offer the sums until they are taken; they stay readable, and unchanged, meanwhile."""
        sums = [buffer.cpu() for buffer in self._replica.gradient_buffers()]
        regions = [register(buffer) for buffer in sums]
        began = time.monotonic()
        try:
            offer = HandOver(
                cell=self._cell,
                batch=batch,
                micro_steps=micro_steps,
                gradients=msgspec.msgpack.encode(tuple(region.descriptor for region in regions)),
            )
            while isinstance(reply := self._feed.call(offer), Wait):
                if self._agent.order("training") == "stop":
                    raise Stopped
                time.sleep(reply.retry)
        except RemoteError as e:
            log.warning("batch %d: the feed refused the hand-over: %s", batch, e)
            return
        finally:
            for region in regions:
                region.close()
        kept = isinstance(reply, Taken) and reply.kept
        log.info(
            "batch %d: %d micro-steps handed over, %s after %.2f s",
            batch,
            len(micro_steps),
            "taken" if kept else "refused",
            time.monotonic() - began,
        )
