"""Every way from the owner's memory into local memory."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq

from gyre_transport.backends.tcp import disconnect
from gyre_transport.bench.peers import mooncake_engine
from gyre_transport.buffers import aligned
from gyre_transport.descriptor import Descriptor
from gyre_transport.endpoint import Backend
from gyre_transport.errors import DataError
from gyre_transport.reads import Part, read, read_many

SMALL = 64 << 10  # bytes of a small read
_PIECE = 4 << 20  # bytes a zmq message
_WAIT = 300.0  # seconds

Path = Callable[[], None]


def base_of(name: str) -> str:
    """What a path is compared with: a copy where one is all there is to it, else plain sockets."""
    return "memcpy" if name == "memcpy" or "shm" in name else "raw sockets"


class Paths:
    """Ways into `room`: `large` reads all of it, `small` pieces of SMALL bytes at random places. A context manager."""

    def __init__(self, told: dict[str, Any], size: int, count: int) -> None:
        """told: what the owner says. size: bytes, a multiple of SMALL. count: small reads."""
        self.room, self._local = aligned(size), aligned(size)  # alike, or every copy is slower
        self.room[:] = 0
        self._local.view(np.uint32)[:] = np.arange(size // 4, dtype=np.uint32)
        places = np.random.default_rng(0).integers(0, size // SMALL, count)
        self._offsets = [int(p) * SMALL for p in places]
        self._allocated, self._registered = (
            msgspec.msgpack.decode(bytes.fromhex(told[k]), type=Descriptor) for k in ("allocated", "registered")
        )
        self._raw = socket.create_connection(("127.0.0.1", told["raw"]))
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._zmq: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._zmq.setsockopt(zmq.LINGER, 0)
        self._zmq.connect(told["zmq"])
        self._peer = told["mooncake"]
        self._mooncake: Any = None if self._peer is None else mooncake_engine()
        if self._mooncake is not None:
            self._mooncake.register_memory(self.room.ctypes.data, size)
        ways: tuple[Backend, ...] = ("shm", "verbs", "tcp", "mooncake")
        self.works = tuple(way for way in ways if self._works(way))

    def _works(self, way: Backend) -> bool:
        try:
            read(self._allocated, self.room[:SMALL], offset=0, deadline=10.0, via=way)
        except DataError:
            return False
        return True

    def correct(self) -> bool:
        """Whether `room` holds the owner's bytes; forgets them."""
        right = bool(np.array_equal(self.room, self._local))
        self.room[:] = 0
        return right

    def large(self) -> dict[str, Path]:
        """Read all of it."""
        size = self.room.nbytes
        paths: dict[str, Path] = {"memcpy": lambda: np.copyto(self.room, self._local)}
        for way in self.works:
            paths[f"gyre {way}"] = lambda way=way: read(self._allocated, self.room, deadline=_WAIT, via=way)  # type: ignore[misc]
            if way == "shm":
                paths["gyre shm, registered"] = self._registered_read
        paths["raw sockets"] = lambda: self._raw_read(0, size, self.room)
        paths["zmq"] = lambda: self._zmq_read([(o, min(_PIECE, size - o), o) for o in range(0, size, _PIECE)])
        if self._mooncake is not None:
            paths["mooncake tcp"] = lambda: self._mooncake_read([(0, size, 0)])
        return paths

    def small(self) -> dict[str, Path]:
        """Read pieces of SMALL bytes; one call each, or all in one."""
        places = [(o, SMALL, i * SMALL % self.room.nbytes) for i, o in enumerate(self._offsets)]
        both = [(offset, self.room[to : to + length]) for offset, length, to in places]

        def each(via: Backend) -> None:
            for offset, room in both:
                read(self._allocated, room, offset=offset, deadline=_WAIT, via=via)

        def many(via: Backend) -> None:
            read_many([Part(self._allocated, room, offset) for offset, room in both], deadline=_WAIT, via=via).wait()

        def raw() -> None:
            for offset, room in both:
                self._raw_read(offset, SMALL, room)

        def memcpy() -> None:
            for offset, room in both:
                np.copyto(room, self._local[offset : offset + SMALL])

        paths: dict[str, Path] = {"memcpy": memcpy}
        for way in self.works:
            paths[f"gyre {way}, read"] = lambda way=way: each(way)  # type: ignore[misc]
            paths[f"gyre {way}, read_many"] = lambda way=way: many(way)  # type: ignore[misc]
        paths["raw sockets"] = raw
        paths["zmq"] = lambda: self._zmq_read(places)
        if self._mooncake is not None:
            paths["mooncake tcp"] = lambda: self._mooncake_read(places)
        return paths

    def _registered_read(self) -> None:
        read(self._registered, self.room.view(np.uint32), deadline=_WAIT, via="shm")

    def _raw_read(self, offset: int, length: int, room: Any) -> None:
        self._raw.sendall(offset.to_bytes(8, "big") + length.to_bytes(8, "big"))
        left = memoryview(room)
        while left:
            left = left[self._raw.recv_into(left, left.nbytes, socket.MSG_WAITALL) :]

    def _zmq_read(self, places: list[tuple[int, int, int]]) -> None:
        for offset, length, to in places:
            self._zmq.send(msgspec.msgpack.encode((offset, length)))
            frame = self._zmq.recv(copy=False)
            self.room[to : to + length] = np.frombuffer(frame.buffer, np.uint8)

    def _mooncake_read(self, places: list[tuple[int, int, int]]) -> None:
        name, remote = self._peer
        local = self.room.ctypes.data
        for offset, length, to in places:
            if self._mooncake.transfer_sync_read(name, local + to, remote + offset, length) < 0:
                raise DataError("mooncake's transfer_sync_read failed; see what it logged")

    def close(self) -> None:
        """Close every connection."""
        self._raw.close()
        self._zmq.close()
        disconnect()

    def __enter__(self) -> Paths:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
