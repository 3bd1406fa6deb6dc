"""The reader's queue pairs to one grant of one process, and the tcp connection that tells whether it stands.

what the device says                        and the tcp connection     what is raised
remote access error                                                    StaleDescriptor: the memory was taken back
retries exceeded, flushed; or nothing yet   was closed by the owner    StaleDescriptor: its process ended
retries exceeded, flushed; or nothing yet   was lost                   Unreachable
retries exceeded, flushed                   stands                     Unreachable
nothing in time                             stands                     DeadlineExceeded
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from gyre_transport.backends.channel import Adopt
from gyre_transport.backends.tcp import Line
from gyre_transport.backends.verbs import fabric
from gyre_transport.backends.verbs.device import Device
from gyre_transport.backends.verbs.handshake import Decline, Offer, decode_answer, encode
from gyre_transport.backends.verbs.library import load
from gyre_transport.backends.verbs.queues import QueuePairs
from gyre_transport.backends.wire import Kind
from gyre_transport.descriptor import Descriptor
from gyre_transport.errors import Cancelled, DataError, DeadlineExceeded, StaleDescriptor, Unreachable
from gyre_transport.run import TransportConfig

_DRAIN = 2.0  # seconds for what is under way to come back after an error
_SPIN, _NAP, _LOOK = 64, 50e-6, 0.01  # polls without a pause; seconds of a pause; between looks at the tcp connection

Key = tuple[object, bytes, int, bytes]  # endpoint, process generation, slot, secret


def key(descriptor: Descriptor) -> Key:
    """What a kept connection is found by."""
    return descriptor.endpoint, descriptor.owner.generation, descriptor.slot, descriptor.secret


class Declined(Unreachable):
    """The owner gives no RDMA to this region; others of it may well be reached."""


class VerbsConnection:
    """Ready queue pairs; a byte of the memory has come through each. For one thread. Raises as the module says."""

    def __init__(self, descriptor: Descriptor, config: TransportConfig, *, end: float, adopt: Adopt) -> None:
        v = load()  # the common reason why not, before anything is opened
        self.key = key(descriptor)
        self.idle_since = 0.0
        self._owner, self._interrupted, self._next_look = descriptor.owner, False, 0.0
        self._meanings = {
            v.enums.IBV_WC_REM_ACCESS_ERR: True,
            v.enums.IBV_WC_REM_INV_REQ_ERR: True,
            v.enums.IBV_WC_REM_OP_ERR: True,
            v.enums.IBV_WC_RETRY_EXC_ERR: False,
            v.enums.IBV_WC_RNR_RETRY_EXC_ERR: False,
            v.enums.IBV_WC_WR_FLUSH_ERR: False,
        }  # whether the status alone says that the memory was taken back
        self._scratch = np.zeros(8, np.uint8)
        self._line = Line(descriptor, end=end, adopt=adopt)
        self.device: Device | None = None
        self._queues: QueuePairs | None = None
        self._scratch_key: int | None = None
        try:
            adopt(self.interrupt)
            self._shake_hands(descriptor, config, end)
            if descriptor.nbytes:
                self._probe(5 * config.rdma_patience, end)
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, descriptor: Descriptor, config: TransportConfig, end: float) -> None:
        links = descriptor.endpoint.rdma if descriptor.endpoint else ()
        found = fabric.choose(fabric.ports(), links=links, device=config.rdma_device, near=self._line.near)
        if found is None:
            raise Unreachable(
                f"{descriptor.owner} has RDMA on {' and '.join(links) or 'no link'}; no active port here has"
            )
        self.device = device = Device.open(found[0])
        self._queues = queues = QueuePairs(device, device.own, found[1], count=config.queue_pairs)
        offer = encode(Offer(side=queues.side))
        try:
            answer = decode_answer(self._line.call(descriptor, offer, end=end, kind=Kind.CONNECT))
        except (msgspec.DecodeError, ValueError) as e:
            raise Unreachable(f"{descriptor.owner} answers an offer of RDMA with something else: {e}") from e
        if isinstance(answer, Decline):
            raise Declined(f"{descriptor.owner} declines: {answer.reason}")
        queues.connect(answer.side, config.rdma_patience)
        self.address, self.rkey = answer.address, answer.rkey
        self._scratch_key, _ = device.hold(self._scratch, self._scratch.ctypes.data, self._scratch.nbytes)

    def _probe(self, within: float, end: float) -> None:
        """Read a byte through each queue pair in `within` seconds: whether a path leads there shows only now."""
        left = self.pairs
        for number in range(left):
            self.touch(number)
        try:
            while left:
                left -= len(self.ended(min(end, time.monotonic() + within)))
        except DeadlineExceeded as e:
            if time.monotonic() >= end:
                raise
            raise Unreachable(f"no RDMA path to {self._owner}: a byte did not come in {within:.1f} seconds") from e

    @property
    def pairs(self) -> int:
        """How many queue pairs there are."""
        return len(self._queues.side.queue_pairs) if self._queues else 0

    def ask(self, number: int, offset: int, address: int, nbytes: int, local_key: int) -> bool:
        """Read at `offset` of the region into registered local memory; False: complete another first."""
        assert self._queues is not None  # noqa: S101  (open)
        return self._queues.post(number, address, nbytes, local_key, self.address + offset, self.rkey)

    def touch(self, number: int) -> bool:
        """Read one byte and forget it: an error if the memory is not there any more."""
        assert self._scratch_key is not None  # noqa: S101  (open)
        return self.ask(number, 0, self._scratch.ctypes.data, 1, self._scratch_key)

    def ended(self, end: float) -> list[int]:
        """Wait; the numbers of reads whose bytes are in place now, at least one."""
        assert self._queues is not None  # noqa: S101  (open)
        polls = 0
        while not (came := self._queues.poll()):
            now = time.monotonic()
            if self._interrupted:
                raise Cancelled("the read was interrupted")
            if now >= end:
                raise DeadlineExceeded(f"{self._owner} did not answer before the deadline; allow more time")
            if now >= self._next_look:
                self._next_look = now + _LOOK
                if (lost := self._line.lost(end)) is not None:
                    raise lost
            polls += 1
            time.sleep(0 if polls < _SPIN else _NAP)
        for _, status in came:
            if status:
                raise self._failed(status, end)
        return [number for number, _ in came]

    def _failed(self, status: int, end: float) -> DataError:
        taken_back = self._meanings.get(status)
        if taken_back:
            return StaleDescriptor(
                f"the memory of {self._owner} was deregistered; ask it for a new descriptor (ibv_wc_status {status})"
            )
        if (lost := self._line.lost(end)) is not None:
            return lost
        if taken_back is None:
            return DataError(f"the RDMA device failed a read with ibv_wc_status {status}; read again")
        return Unreachable(
            f"{self._owner} does not answer over RDMA (ibv_wc_status {status}), although its tcp connection stands; "
            "check the network's RDMA (pfc, mtu, firewalls on UDP port 4791)"
        )

    def abandon(self) -> None:
        """In a forked child: close its copy of the tcp connection; the rest is its parent's."""
        self._line.close()

    def interrupt(self) -> None:
        """From another thread: `ended` raises now."""
        self._interrupted = True

    @property
    def usable(self) -> bool:
        """Whether an idle connection still stands; it is not interrupted any more."""
        self._interrupted = False
        return self._line.lost(time.monotonic() + 1.0) is None

    def close(self) -> None:
        """Nothing is written through it any more when this returns. Idempotent."""
        if self._queues is not None:
            self._queues.drain(_DRAIN)
            self._queues.close()
        self._line.close()
        if self.device is not None:
            if self._scratch_key is not None:
                self.device.let_go(self._scratch.ctypes.data, self._scratch.nbytes)
                self._scratch_key = None
            self.device.close()
            self.device = None
