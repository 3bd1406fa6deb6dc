"""One client of the server: what it asked for, and what is still to be sent. See `server` and `wire`."""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gyre_transport.backends import wire
from gyre_transport.backends.mooncake.owner import Lender
from gyre_transport.backends.verbs.owner import Exposures, Reached
from gyre_transport.backends.wire import Kind, Status
from gyre_transport.buffers import on_gpu
from gyre_transport.control import Export, Record
from gyre_transport.errors import DataError
from gyre_transport.gpu.outlet import Outlet
from gyre_transport.layout import Stretch

log = logging.getLogger(__name__)

RECEIVE = 1 << 14
_SEND = 1 << 20  # bytes a system call
_VECTOR = 256  # stretches a system call
_SMALL = 64 << 10  # bytes of an answer that leaves with its seal in one system call, for the price of a copy
_TURN = 8 << 20  # bytes before the next connection has its turn


class Malformed(Exception):
    """What came is not the protocol."""


class Revoked(Exception):
    """The memory was taken back while it was being sent."""


class _Request(NamedTuple):
    """One that waits for its answer."""

    number: int
    kind: int
    size: int  # of the body, in its kind's unit
    slot: int
    proof: bytes
    body: bytes


class Session:
    """A greeted or greeting connection. All methods are called by the server's thread."""

    def __init__(self, peer: socket.socket, record: Record, exposures: Exposures, lender: Lender) -> None:
        self.socket = peer
        self.active = time.monotonic()
        self.awaited = selectors.EVENT_READ  # what the server waits for now
        self._record, self._exposures, self._lender = record, exposures, lender
        self._reached: Reached | None = None  # the client's queue pairs
        self._nonces = b""
        self._received = bytearray()
        self._number = 0
        self._refused = False
        self._waiting: deque[_Request] = deque()
        self._out = b""  # framing and small answers, to be sent before `_parts`
        self._parts: deque[memoryview] = deque()  # left of the answer under way
        self._export: Export | None = None  # whose memory `_parts` are
        self._slot = 0  # of `_export`
        self._sealed = b""
        self._outlet: Outlet | None = None
        self._ends: dict[object, Callable[[], None]] = {}

    @property
    def events(self) -> int:
        """What to wait for."""
        read = selectors.EVENT_READ if len(self._waiting) < wire.MAX_WAITING else 0
        return read | (selectors.EVENT_WRITE if self._out or self._export is not None or self._waiting else 0)

    @property
    def serves_revoked(self) -> bool:
        """Whether the answer under way, or what its queue pairs reach, is memory that was taken back."""
        if self._reached is not None and self._reached.withdrawn:
            return True
        # identity, since the same memory may have been granted anew
        return self._export is not None and self._record.exports.get(self._slot) is not self._export

    @property
    def idle_since(self) -> float:
        """When it last sent or took anything; a client that something is tied to is never idle."""
        return time.monotonic() if self._ends else self.active

    def at_end(self, key: object, act: Callable[[], None] | None) -> None:
        """Have `act` called once when the connection has ended, in place of what `key` had; None: nothing."""
        self._ends.pop(key, None)
        if act is not None:
            self._ends[key] = act

    def receive(self) -> None:
        """Take in what came. Raises `Malformed`, `EOFError` or `OSError`."""
        try:
            came = self.socket.recv(RECEIVE)
        except BlockingIOError:
            return
        if not came:
            raise EOFError
        self.active = time.monotonic()
        if self._refused:
            return
        self._received += came
        if not self._nonces:
            self._greet()
        while self._nonces and len(self._received) >= wire.REQUEST.size:
            kind, count, slot, proof = wire.REQUEST.unpack_from(self._received)
            end = wire.REQUEST.size + _body_bytes(kind, count)
            if len(self._received) < end:
                return
            body = bytes(self._received[wire.REQUEST.size : end])
            del self._received[:end]
            self._waiting.append(_Request(self._number, kind, count, slot, proof, body))
            self._number += 1

    def _greet(self) -> None:
        if len(self._received) < wire.HELLO.size:
            if not wire.MAGIC.startswith(self._received[:4]):
                raise Malformed("no greeting")
            return
        magic, version, nonce = wire.HELLO.unpack_from(self._received)
        del self._received[: wire.HELLO.size]
        if magic != wire.MAGIC:
            raise Malformed("no greeting")
        mine = wire.nonce()
        self._out += wire.WELCOME.pack(wire.MAGIC, wire.VERSION, Status.OK, mine, self._record.owner.generation)
        self._nonces = nonce + mine
        self._refused = version != wire.VERSION  # the client knows from the welcome

    def send(self) -> None:
        """Send as much as the socket takes, up to a turn. Raises `Revoked`, `Malformed` or `OSError`."""
        sent = 0
        while sent < _TURN:
            if self._export is not None and not self._parts:
                self._seal()
            if self._export is None and self._waiting and len(self._out) < _SEND:
                self._begin(self._waiting.popleft())
                continue
            if not self._out and self._export is None:
                return
            if self.serves_revoked:
                raise Revoked
            more = socket.MSG_MORE if self._export is not None else 0  # the seal or the next answer goes with it
            try:
                n = self.socket.sendmsg([self._out, *self._next()], (), more)
            except BlockingIOError:
                return
            self.active = time.monotonic()
            sent += n
            self._sent(n)

    def _next(self) -> list[memoryview]:
        """The next parts, for one system call."""
        parts: list[memoryview] = []
        left = _SEND
        if self._parts and on_gpu(self._parts[0]):
            self._fetch()
        for part in self._parts:
            if on_gpu(part):  # as soon as what is before it has been sent
                break
            parts.append(part[:left])
            left -= part.nbytes
            if left <= 0 or len(parts) == _VECTOR:
                break
        return parts

    def _fetch(self) -> None:
        self._outlet = self._outlet or Outlet()
        try:
            self._outlet.fetch(self._parts)
        except DataError as e:
            log.error("closed a connection whose reader wants memory of a GPU: %s", str(e))
            raise Revoked from e

    def _sent(self, n: int) -> None:
        framing = min(n, len(self._out))
        self._out = self._out[framing:]
        n -= framing
        while self._parts and n >= self._parts[0].nbytes:
            n -= self._parts.popleft().nbytes
        if n:
            self._parts[0] = self._parts[0][n:]

    def _begin(self, request: _Request) -> None:
        export = self._record.exports.get(request.slot)
        if export is None or not hmac.compare_digest(
            request.proof,
            wire.proof(export.secret, self._nonces, *request[:4], request.body),
        ):
            self._refuse(Status.STALE, request.number)
        elif request.kind == Kind.READ:
            self._read(request, export)
        elif request.kind == Kind.CALL:
            self._call(request, export)
        elif request.kind == Kind.CONNECT:
            self._connect(request, export)
        else:
            self._locate(request, export)

    def _read(self, request: _Request, export: Export) -> None:
        stretches = [Stretch(*s) for s in wire.STRETCH.iter_unpack(request.body)]
        total = sum(s.nbytes for s in stretches)
        if total > wire.MAX_LENGTH:
            raise Malformed(f"{total:,} bytes asked for at once, at most {wire.MAX_LENGTH:,} are served")
        if not all(s.within(export.memory.nbytes) for s in stretches):
            self._refuse(Status.OUTSIDE, request.number)
            return
        gpu = on_gpu(export.memory)
        parts = _gpu_parts(export.memory, stretches) if gpu else [_bytes(export.memory, s) for s in stretches]
        head = wire.ANSWER.pack(Status.OK, request.number, total)
        seal = wire.seal(export.secret, request.proof)
        if total > _SMALL or gpu:
            self._out += head
            self._export, self._slot, self._sealed = export, request.slot, seal
            self._parts.extend(parts)
            return
        answer = b"".join([head, *parts, seal])
        if self._record.exports.get(request.slot) is not export:  # revoked while it was copied
            raise Revoked
        self._out += answer

    def _call(self, request: _Request, export: Export) -> None:
        try:
            answer = None if export.calls is None else export.calls(request.body, self)
        except Exception:
            # as text: a record with the exception would keep this frame's memory mapped
            log.error("a call on %d bytes of memory failed: %s", export.memory.nbytes, traceback.format_exc())
            answer = None
        if answer is None or len(answer) > wire.MAX_CALL:
            self._refuse(Status.REFUSED, request.number)
            return
        self._answer(request, export, answer)

    def _connect(self, request: _Request, export: Export) -> None:
        if self._reached is not None:
            raise Malformed("a second offer of queue pairs")
        near = str(self.socket.getsockname()[0])
        self._reached, answer = self._exposures.connect(export, request.body, near=near)
        if self._reached is not None:
            self.at_end(self._reached, self._reached.close)
            if self._record.exports.get(request.slot) is not export:  # whoever revoked it may have come too early
                self._exposures.withdraw(export)
                raise Revoked
        self._answer(request, export, answer)

    def _locate(self, request: _Request, export: Export) -> None:
        answer = self._lender.locate(export)
        if self._record.exports.get(request.slot) is not export:  # whoever revoked it may have come too early
            self._lender.withdraw(export)
            raise Revoked
        self._answer(request, export, answer)

    def _answer(self, request: _Request, export: Export, answer: bytes) -> None:
        head = wire.ANSWER.pack(Status.OK, request.number, len(answer))
        self._out += head + answer + wire.seal(export.secret, request.proof, answer)

    def _refuse(self, status: Status, number: int) -> None:
        self._out += wire.ANSWER.pack(status, number, 0)
        self._refused = True
        self._waiting.clear()

    def _seal(self) -> None:
        if self.serves_revoked:
            raise Revoked
        self._out += self._sealed
        self._export = None

    def close(self) -> None:
        """Close the socket, let go of the memory, and tell whoever wanted to know."""
        self._export = None
        self._parts.clear()
        self.socket.close()
        ends, self._ends = list(self._ends.values()), {}
        for act in ends:
            with contextlib.suppress(Exception):  # theirs to handle; the server serves on
                act()


def _body_bytes(kind: int, count: int) -> int:
    """Bytes of a request's body. Raises `Malformed` for what no client sends."""
    if kind == Kind.READ and 1 <= count <= wire.MAX_STRETCHES:
        return count * wire.STRETCH.size
    if kind in (Kind.CALL, Kind.CONNECT, Kind.LOCATE) and count <= wire.MAX_CALL:
        return count
    raise Malformed(f"a request of kind {kind} with {count}")


def _gpu_parts(memory: memoryview, stretches: list[Stretch]) -> list[memoryview]:
    """The bytes of all stretches, where they are."""
    starts = ((s.offset + row * s.stride, s.length) for s in stretches if s.length for row in range(s.rows))
    return [memory[start : start + length] for start, length in starts]


def _bytes(memory: memoryview, stretch: Stretch) -> memoryview:
    """The bytes of a stretch; of several rows, a copy."""
    if stretch.rows == 1:
        return memory[stretch.offset : stretch.offset + stretch.length]
    flat = np.frombuffer(memory, np.uint8)[stretch.offset :] if stretch.length else np.empty(0, np.uint8)
    rows = np.lib.stride_tricks.as_strided(flat, (stretch.rows, stretch.length), (stretch.stride, 1), writeable=False)
    return memoryview(np.ascontiguousarray(rows).reshape(-1))
