"""A trainer's connections: its cell agent, the feed, the scheduler; and the thread that keeps its leases.

Every request may be repeated: an agent that restarts, a feed that is slow or comes back, are waited for up to
`train.agent_deadline` seconds, then the trainer gives up with `PeerLost` and whoever started it decides.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from gyre_sched import protocol as sched
from gyre_train import protocol as feed
from gyre_train.errors import PeerLost
from gyre_transport.bus import BlockingClient
from gyre_transport.errors import BusError, DeadlineExceeded, RemoteError

log = logging.getLogger(__name__)

_CALL = 10.0  # seconds a single attempt may take
_FIRST_RENEWAL = 1.0  # seconds between renewals until a micro-step says how long its lease is


class Stopped(Exception):
    """The trainer was ordered to stop in the middle of something."""


class Link:
    """One service, asked from one thread. patience: seconds it may stay silent."""

    def __init__(self, name: str, address: str, replies: Any, *, patience: float) -> None:
        self._name = name
        self._patience = patience
        self._client = BlockingClient(address, replies)

    def call(self, request: Any, *, longer: float = 0.0) -> Any:
        """Ask until an answer comes. longer: seconds the service may take beyond an ordinary answer.

        Raises `PeerLost` when its patience is over, and `RemoteError` when the service refuses.
        """
        end = time.monotonic() + self._patience + longer
        while True:
            try:
                return self._client.call(request, deadline=min(_CALL, self._patience) + longer)
            except DeadlineExceeded as e:
                if time.monotonic() >= end:
                    raise PeerLost(f"the {self._name} has been silent for {self._patience:g} s; is it up? {e}") from e
                log.warning("the %s is silent: %s", self._name, e)

    def close(self) -> None:
        """Close the socket."""
        self._client.close()


class Agent:
    """The cell agent: says what this trainer should be."""

    def __init__(self, address: str, cell: int, *, patience: float) -> None:
        self._cell = cell
        self._link = Link(f"agent of cell {cell}", address, sched.AgentReply, patience=patience)

    def order(self, state: str, *, wait: float = 0.0, detail: str = "") -> str:
        """Report `state` ("starting", "idle", "training") and return what is wanted: "idle", "training" or "stop".

        wait: seconds the agent may hold the answer while it wants what is. Raises `PeerLost`.
        """
        instance = os.environ.get("GYRE_TRAINER", "")
        report = sched.TrainerReport(cell=self._cell, state=state, wait=wait, detail=detail, instance=instance)
        reply: sched.TrainerOrder = self._link.call(report, longer=wait)
        return reply.want

    def close(self) -> None:
        """Close the socket."""
        self._link.close()


class LeaseKeeper(threading.Thread):
    """Renews the cell's leases while its trainer computes; owned by the trainer, started at once.

    hold(batch) starts renewing, release() stops; `lost` says that a renewal was refused since hold.
    """

    def __init__(self, address: str, cell: int) -> None:
        super().__init__(daemon=True, name="lease-keeper")
        self._address = address
        self._cell = cell
        self._wake = threading.Condition()
        self._batch: int | None = None
        self._interval = _FIRST_RENEWAL
        self._ended = False
        self.lost = False

    def hold(self, batch: int, lease: float | None = None) -> None:
        """Renew the leases on `batch`, every `lease` / 4 seconds once `lease` is known."""
        with self._wake:
            if lease is not None:
                self._interval = max(0.05, lease / 4)
            if batch != self._batch:
                self._batch, self.lost = batch, False
                self._wake.notify()

    def release(self) -> None:
        """Stop renewing."""
        with self._wake:
            self._batch, self.lost = None, False

    def end(self) -> None:
        """Stop the thread, and wait for it."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self.is_alive():
            self.join(timeout=2 * _CALL)

    def run(self) -> None:
        with BlockingClient(self._address, feed.Reply) as client:
            while True:
                with self._wake:
                    self._wake.wait(self._interval if self._batch is not None else None)
                    if self._ended:
                        return
                    batch = self._batch
                if batch is not None:
                    self._renew(client, batch)

    def _renew(self, client: BlockingClient, batch: int) -> None:
        try:
            reply = client.call(feed.Renew(cell=self._cell, batch=batch), deadline=max(1.0, self._interval))
            kept = reply.kept
        except RemoteError as e:  # another batch, or a feed that has restarted
            log.warning("a renewal of batch %d was refused: %s", batch, e)
            kept = False
        except BusError as e:
            log.warning("a renewal of batch %d got no answer: %s", batch, e)
            return
        with self._wake:
            if not kept and batch == self._batch:
                self.lost = True


def announce(address: str, version: int, manifest: bytes, *, patience: float) -> None:
    """Tell the scheduler that the core has published `version`. Raises `PeerLost`."""
    link = Link("scheduler", address, sched.Reply, patience=patience)
    try:
        link.call(sched.Published(version=version, manifest=manifest))
    finally:
        link.close()
