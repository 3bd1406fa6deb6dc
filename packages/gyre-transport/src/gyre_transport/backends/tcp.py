"""Reads and calls over tcp: requests ahead of answers, each answer received straight into its destinations.

Small pieces share a request: one proof, one seal and a handful of system calls for up to `_BATCH` bytes.
"""

from __future__ import annotations

import hmac
from collections import deque
from typing import NamedTuple

from gyre_transport.backends import wire
from gyre_transport.backends.channel import Adopt, Piece
from gyre_transport.backends.connection import Connection, connect, disconnect, keep
from gyre_transport.backends.wire import Kind
from gyre_transport.descriptor import Descriptor
from gyre_transport.errors import DataError, StaleDescriptor

__all__ = ["Line", "TcpChannel", "disconnect"]

_BATCH = 1 << 20  # bytes after which a request leaves


class _Asked(NamedTuple):
    """A request under way."""

    pieces: list[Piece]
    nbytes: int
    seal: bytes


class TcpChannel:
    """A way to a region of any process that listens; see `channel.Channel`."""

    window = 8 << 20
    takes_rows = True

    def __init__(self, descriptor: Descriptor, *, end: float, adopt: Adopt) -> None:
        self._descriptor, self._secret, self._end = descriptor, descriptor.secret, end
        self._batch: list[Piece] = []  # submitted, not asked for
        self._batch_bytes = 0
        self._asked: deque[_Asked] = deque()
        self._came = 0  # pieces that have come and were not completed
        self._connection = connect(descriptor, end=end, adopt=adopt)

    def submit(self, piece: Piece) -> None:
        """Put the piece into the next request, and send that when it is large enough."""
        self._batch.append(piece)
        self._batch_bytes += piece.into.nbytes
        if self._batch_bytes >= _BATCH or len(self._batch) == wire.MAX_STRETCHES:
            self._ask()

    def complete(self) -> None:
        """Receive the oldest answer, unless the oldest piece came with the one before."""
        if self._came:
            self._came -= 1
            return
        if self._batch and len(self._asked) < 2:  # nothing to gain by waiting for more
            self._ask()
        asked = self._asked.popleft()
        seal = bytearray(wire.MAC_BYTES)
        parts = [*(p.into for p in asked.pieces), memoryview(seal)]
        if not self._connection.receive(asked.nbytes, parts, self._end) or not hmac.compare_digest(seal, asked.seal):
            raise _other(self._descriptor)
        self._came = len(asked.pieces) - 1

    def _ask(self) -> None:
        pieces, nbytes = self._batch, self._batch_bytes
        self._batch, self._batch_bytes = [], 0
        body = b"".join(
            wire.STRETCH.pack(p.offset, p.into.nbytes // p.rows, p.rows, p.stride if p.rows > 1 else 0) for p in pieces
        )
        proof = self._connection.ask(self._descriptor, Kind.READ, len(pieces), body, self._end)
        self._asked.append(_Asked(pieces, nbytes, wire.seal(self._secret, proof)))

    def __enter__(self) -> TcpChannel:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None and not self._asked and not self._batch:
            keep(self._connection)
        else:
            self._connection.socket.close()


class Line:
    """Calls to whoever handles them at the owner of `descriptor`; a context manager, for one thread.

    What the owner ties to the caller (a lease) ends with the line, or with this process.
    """

    def __init__(self, descriptor: Descriptor, *, end: float, adopt: Adopt = lambda interrupt: None) -> None:
        self._connection: Connection | None = None
        self._connection = connect(descriptor, end=end, adopt=adopt)

    @property
    def near(self) -> str:
        """This end's address; "" when closed."""
        return "" if self._connection is None else str(self._connection.socket.getsockname()[0])

    def lost(self, end: float) -> DataError | None:
        """What has become of the connection between calls: None while the owner is at its other end."""
        return DataError("the line is closed") if self._connection is None else self._connection.lost(end)

    def call(self, descriptor: Descriptor, payload: bytes, *, end: float, kind: Kind = Kind.CALL) -> bytes:
        """Ask, and return the answer. payload: up to `wire.MAX_CALL` bytes. Raises the package's `DataError`s."""
        if len(payload) > wire.MAX_CALL:
            raise DataError(f"expected a call of at most {wire.MAX_CALL:,} bytes, got {len(payload):,}; send less")
        if self._connection is None:
            raise DataError("the line is closed; open another")
        try:
            proof = self._connection.ask(descriptor, kind, len(payload), payload, end)
            nbytes, seal = self._connection.answer(end), bytearray(wire.MAC_BYTES)
            if nbytes > wire.MAX_CALL:
                raise _other(descriptor)
            answer = bytearray(nbytes)
            self._connection.fill([memoryview(answer), memoryview(seal)], end)
            if not hmac.compare_digest(seal, wire.seal(descriptor.secret, proof, bytes(answer))):
                raise _other(descriptor)
        except BaseException:
            self.close()
            raise
        return bytes(answer)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.socket.close()

    def keep(self) -> None:
        """Close it, but keep the connection for the next read: when nothing is tied to it any more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            keep(connection)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _other(descriptor: Descriptor) -> StaleDescriptor:
    return StaleDescriptor(f"the answer of {descriptor.owner} is not sealed with the descriptor's key")
