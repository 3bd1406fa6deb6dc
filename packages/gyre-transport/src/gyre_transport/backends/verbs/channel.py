"""Reads over RDMA: requests ahead of answers on several queue pairs, each put into its place by the device itself.

The memory read into is registered once a read, whole, and let go when the read is over. An owner that both ends say can
be reached by RDMA, and cannot, and a region it declines, are left to the next backend for `_AVOID` seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from gyre_transport.backends.channel import Adopt, Piece
from gyre_transport.backends.kept import Kept
from gyre_transport.backends.verbs import direct
from gyre_transport.backends.verbs.connection import Declined, VerbsConnection, key
from gyre_transport.buffers import on_gpu
from gyre_transport.descriptor import Descriptor
from gyre_transport.errors import Unreachable
from gyre_transport.run import TransportConfig

log = logging.getLogger(__name__)

_AVOID = 60.0  # seconds


class _Asked:
    """A piece under way."""

    def __init__(self) -> None:
        self.left = 0  # messages


class _Held(NamedTuple):
    """Registered memory that pieces are parts of."""

    memory: Any
    address: int  # in this process, or the GPU's
    nbytes: int
    key: int
    base: int  # its address to the device


class VerbsChannel:
    """A way to a region of a process that listens and has RDMA; see `channel.Channel`."""

    window = 16 << 20

    def __init__(self, descriptor: Descriptor, config: TransportConfig, *, end: float, adopt: Adopt) -> None:
        self._descriptor, self._end = descriptor, end
        self._asked: deque[_Asked] = deque()
        self._messages: dict[int, _Asked] = {}
        self._number = 0
        self._memory: dict[int, _Held] = {}  # id of what a piece is of -> where it is
        self._staged: dict[int, Any] = {}  # id of GPU memory that the device cannot reach -> it
        if descriptor.endpoint is None or not descriptor.endpoint.rdma:
            raise Unreachable(f"{descriptor.owner} has no RDMA device, or may not use it")
        avoided.check(descriptor.endpoint, key(descriptor))
        found = kept.take(key(descriptor))
        try:
            if found is not None:
                adopt(found.interrupt)
            self._connection = found or VerbsConnection(descriptor, config, end=end, adopt=adopt)
        except BaseException as e:
            if found is not None:
                found.close()
            if not isinstance(e, Unreachable):
                raise
            avoided.add(key(descriptor) if isinstance(e, Declined) else descriptor.endpoint, str(e))
            raise
        assert self._connection.device is not None  # noqa: S101  (open)
        self._device = self._connection.device

    def submit(self, piece: Piece) -> None:
        """Have the device ask for the piece, in as many messages as it takes."""
        asked = _Asked()
        self._asked.append(asked)
        nbytes = piece.into.nbytes
        if not nbytes:
            if self._descriptor.nbytes:
                self._post(asked, lambda number: self._connection.touch(number))
            return
        held = self._register(piece)
        start = held.base + piece.address - held.address
        for at in range(0, nbytes, self._device.max_message):
            length = min(self._device.max_message, nbytes - at)
            offset, address = piece.offset + at, start + at
            self._post(asked, lambda n, o=offset, a=address, b=length: self._connection.ask(n, o, a, b, held.key))

    def _post(self, asked: _Asked, post: Any) -> None:
        self._number += 1
        self._messages[self._number] = asked
        asked.left += 1
        while not post(self._number):
            self._wait()

    def complete(self) -> None:
        """Wait for the oldest piece. The memory is deregistered before it is taken back: what came was the region's."""
        asked = self._asked.popleft()
        while asked.left:
            self._wait()

    def _wait(self) -> None:
        for number in self._connection.ended(self._end):
            self._messages.pop(number).left -= 1

    def reaches(self, piece: Piece) -> bool:
        """Whether the device can write to the GPU memory that `piece` is a part of; if not, it has to be staged."""
        whole: Any = piece.into.obj
        if id(whole) not in self._memory and id(whole) not in self._staged:
            try:
                self._register(piece)
            except Unreachable as e:
                log.info("%d bytes of GPU memory are read through the host: %s", whole.nbytes, str(e))
                self._staged[id(whole)] = whole
        return id(whole) in self._memory

    def _register(self, piece: Piece) -> _Held:
        """The registered memory that `piece` is a part of."""
        whole: Any = piece.into.obj
        found = self._memory.get(id(whole))
        if found is None:
            if on_gpu(piece.into):
                found = _Held(whole, whole.address, whole.nbytes, *direct.hold(self._device, whole))
            else:
                memory = np.frombuffer(memoryview(whole).cast("B"), np.uint8)
                address, nbytes = int(memory.ctypes.data), memory.nbytes
                found = _Held(whole, address, nbytes, *self._device.hold(memory, address, nbytes))
            self._memory[id(whole)] = found
        return found

    def __enter__(self) -> VerbsChannel:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        done = kind is None and not self._messages and self._descriptor.nbytes > 0
        if not done:
            self._connection.close()  # first: the device may still write
        for held in self._memory.values():
            self._device.let_go(held.address, held.nbytes)
        if done:
            kept.give(self._connection)


class _Avoided:
    """Owners, or regions of them, that RDMA did not reach, for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[Hashable, tuple[float, str]] = {}

    def check(self, *those: Hashable) -> None:
        """Raise `Unreachable` with the reason if one of them is avoided."""
        with self._lock:
            now = time.monotonic()
            self._until = {e: (until, why) for e, (until, why) in self._until.items() if until > now}
            for until, why in filter(None, map(self._until.get, those)):
                raise Unreachable(f"{why} (tried before; again in {until - now:.0f} seconds)")

    def add(self, that: Hashable, why: str) -> None:
        """Avoid it from now on."""
        with self._lock:
            self._until[that] = time.monotonic() + _AVOID, why

    def clear(self) -> None:
        """Avoid nobody."""
        with self._lock:
            self._until.clear()


avoided = _Avoided()
kept: Kept[VerbsConnection] = Kept()
