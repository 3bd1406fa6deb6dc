"""Reads over tcp: requests ahead of answers, each answer received straight into its destination.

A connection is to one process generation, not to one region, and is kept for the next read: at most `_KEPT` a peer, for
`_KEEP` seconds. One that saw an error, a deadline or a cancellation is closed, never used again.

    what the socket says                       what is raised
    refused, closed, reset                     StaleDescriptor: the process ended, or took the memory back
    no connection, or silent for two seconds
    at the network's level                     Unreachable
    nothing in time                            DeadlineExceeded
    another process answers                    StaleDescriptor
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections import deque

from gyre_transport.backends import wire
from gyre_transport.backends.channel import Adopt, Piece
from gyre_transport.backends.server import tune
from gyre_transport.backends.wire import Status
from gyre_transport.descriptor import Descriptor, Endpoint, network
from gyre_transport.errors import DataError, DeadlineExceeded, ShapeMismatch, StaleDescriptor, Unreachable

_CONNECT = 2.0  # seconds: a machine that is up accepts or refuses sooner
_SILENT = 1_900  # ms until the network's silence about a request is an error
_KEPT = 4
_KEEP = 10.0  # seconds, less than a server's patience


class Connection:
    """A greeted connection to one process generation."""

    def __init__(self, descriptor: Descriptor, endpoint: Endpoint, end: float, adopt: Adopt) -> None:
        self.key = (endpoint, descriptor.owner.generation)
        self.idle_since = 0.0
        self.number = 0
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            adopt(self.interrupt)
            self._connect(descriptor, endpoint, end)
            self.nonces = self._greet(descriptor, endpoint, end)
        except BaseException:
            self.socket.close()
            raise

    def _connect(self, descriptor: Descriptor, endpoint: Endpoint, end: float) -> None:
        self.socket.settimeout(max(0.001, min(_CONNECT, end - time.monotonic())))
        try:
            tune(self.socket)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT)  # for requests under way
            self.socket.connect((endpoint.host, endpoint.port))
        except ConnectionRefusedError:
            raise StaleDescriptor(
                f"nobody listens at {endpoint}: {descriptor.owner} ended, or registers no memory any more; ask its "
                "successor for a new descriptor"
            ) from None
        except TimeoutError as e:
            raise late(end, f"no connection to {descriptor.owner} at {endpoint}") from e
        except OSError as e:
            raise Unreachable(
                f"no connection to {descriptor.owner} at {endpoint}: {e.strerror or e}; check the network and "
                "transport.listen of the owner"
            ) from e

    def _greet(self, descriptor: Descriptor, endpoint: Endpoint, end: float) -> bytes:
        mine = wire.nonce()
        welcome = bytearray(wire.WELCOME.size)
        try:
            self.socket.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION, mine))
            receive(self.socket, memoryview(welcome))
        except TimeoutError as e:
            raise late(end, f"{endpoint} accepted a connection, but said nothing") from e
        except (EOFError, OSError) as e:
            raise StaleDescriptor(f"{endpoint} closed the connection at once: {descriptor.owner} is ending") from e
        magic, version, status, nonce, generation = wire.WELCOME.unpack(welcome)
        if (magic, version) != (wire.MAGIC, wire.VERSION):
            raise Unreachable(
                f"{endpoint} does not speak version {wire.VERSION} of the protocol, but {magic!r} {version}; "
                "is it another version of Gyre, or another service on that port?"
            )
        if status == Status.BUSY:
            raise Unreachable(
                f"{descriptor.owner} serves as many connections as it may; try later, or raise "
                "transport.max_connections"
            )
        if generation != descriptor.owner.generation:
            raise StaleDescriptor(
                f"{descriptor.owner} ended, and another process listens at {endpoint}; ask its successor for a new "
                "descriptor"
            )
        return mine + bytes(nonce)

    def interrupt(self) -> None:
        """From another thread: whatever waits on the connection returns now, with an error."""
        with contextlib.suppress(OSError):  # not connected, or closed
            self.socket.shutdown(socket.SHUT_RDWR)

    @property
    def usable(self) -> bool:
        """Whether an idle connection is still up: its peer has neither closed it nor spoken out of turn."""
        return not select.select([self.socket], [], [], 0)[0] if self.socket.fileno() >= 0 else False


def late(end: float, what: str) -> DataError:
    """The error of a socket's timeout: the deadline's, or the network's."""
    if time.monotonic() >= end:
        return DeadlineExceeded(f"{what} before the deadline; allow more time")
    return Unreachable(f"{what}; check the network and transport.listen of the owner")


def receive(peer: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises `EOFError`, or `OSError` as the socket does."""
    while into:
        n = peer.recv_into(into)
        if not n:
            raise EOFError
        into = into[n:]


def _fill(peer: socket.socket, parts: list[memoryview], end: float) -> None:
    """Fill all `parts`. Raises as `receive`; `BlockingIOError` when the socket's time is over."""
    while parts:
        n = peer.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        if not n:
            raise EOFError
        while parts and n >= parts[0].nbytes:
            n -= parts.pop(0).nbytes
        if parts:  # a signal, the end of the time or of the connection: the next call tells
            parts[0] = parts[0][n:]
            if time.monotonic() >= end:
                raise TimeoutError


class TcpChannel:
    """A way to a region of any process that listens; see `channel.Channel`."""

    window = 8 << 20

    def __init__(self, descriptor: Descriptor, *, end: float, adopt: Adopt) -> None:
        if descriptor.endpoint is None:
            raise Unreachable(f"{descriptor.owner} does not listen: transport.listen is empty there, or it failed")
        if _loopback(descriptor.endpoint.host) and descriptor.endpoint.network != network():
            raise Unreachable(
                f"{descriptor.owner} is on another machine and listens on {descriptor.endpoint.host} only; set "
                "transport.listen there to an address others reach"
            )
        self._descriptor, self._secret, self._end = descriptor, descriptor.secret, end
        self._waiting: deque[tuple[Piece, bytes]] = deque()
        key = (descriptor.endpoint, descriptor.owner.generation)
        found = _kept.take(key)
        if found is not None:
            adopt(found.interrupt)
        self._connection = found or Connection(descriptor, descriptor.endpoint, end, adopt)

    def submit(self, piece: Piece) -> None:
        """Send the request."""
        c, d = self._connection, self._descriptor
        asked = (c.number, d.slot, piece.offset, piece.into.nbytes)
        proof = wire.proof(self._secret, c.nonces, *asked)
        self._arm()
        try:
            c.socket.sendall(wire.REQUEST.pack(*asked[1:], proof))
        except OSError as e:
            raise self._lost(e) from e
        self._waiting.append((piece, wire.seal(self._secret, c.nonces, *asked)))
        c.number += 1

    def complete(self) -> None:
        """Receive the oldest answer into its place."""
        piece, expected = self._waiting.popleft()
        head, seal = bytearray(wire.ANSWER.size), bytearray(wire.MAC_BYTES)
        self._arm()
        try:
            self._receive(memoryview(head), piece.into, memoryview(seal))
        except (EOFError, OSError) as e:
            raise self._lost(e) from e
        if not hmac.compare_digest(seal, expected):
            raise StaleDescriptor(f"the answer of {self._descriptor.owner} is not sealed with the descriptor's key")

    def _receive(self, head: memoryview, into: memoryview, seal: memoryview) -> None:
        """Receive one answer; its head alone decides whether bytes follow."""
        peer = self._connection.socket
        _fill(peer, [head], self._end)
        self._accepted(*wire.ANSWER.unpack(head))
        self._arm()
        _fill(peer, [into, seal], self._end)

    def _accepted(self, status: int, number: int) -> None:
        if status == Status.OK:
            return
        if status == Status.OUTSIDE:
            raise ShapeMismatch(f"{self._descriptor.owner} holds less than the descriptor says")
        raise StaleDescriptor(f"the memory of {self._descriptor.owner} was deregistered; ask it for a new descriptor")

    def _arm(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise late(self._end, f"no answer from {self._descriptor.owner}")
        peer = self._connection.socket
        peer.settimeout(None)  # the kernel keeps the time, or every call would be two
        timeval = struct.pack("@ll", int(left), int(left % 1 * 1e6) or 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def _lost(self, e: Exception) -> DataError:
        owner = self._descriptor.owner
        if isinstance(e, TimeoutError | BlockingIOError):  # the kernel gave the peer up, or the deadline passed
            return late(self._end, f"no answer from {owner}")
        if isinstance(e, EOFError | ConnectionError):
            return StaleDescriptor(
                f"{owner} closed the connection: it ended, or took the memory back; ask for a new descriptor"
            )
        return Unreachable(f"the connection to {owner} is lost: {e}; read again")

    def __enter__(self) -> TcpChannel:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None and not self._waiting:
            _kept.give(self._connection)
        else:
            self._connection.socket.close()


class _Kept:
    """Idle connections, for the next read from the same process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[Endpoint, bytes], list[Connection]] = {}

    def take(self, key: tuple[Endpoint, bytes]) -> Connection | None:
        """A connection that is up, or None."""
        with self._lock:
            self._sweep()
            connections = self._idle.get(key, [])
            while connections:
                connection = connections.pop()
                if connection.usable:
                    return connection
                connection.socket.close()
        return None

    def give(self, connection: Connection) -> None:
        """Keep a connection on which nothing is under way."""
        connection.idle_since = time.monotonic()
        with self._lock:
            self._sweep()
            connections = self._idle.setdefault(connection.key, [])
            if len(connections) < _KEPT:
                connections.append(connection)
            else:
                connection.socket.close()

    def close(self) -> None:
        """Close all."""
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.socket.close()
            self._idle.clear()

    def _sweep(self) -> None:
        before = time.monotonic() - _KEEP
        for key, connections in list(self._idle.items()):
            for connection in [c for c in connections if c.idle_since < before]:
                connections.remove(connection)
                connection.socket.close()
            if not connections:
                del self._idle[key]


def disconnect() -> None:
    """Close the connections that are kept for the next read."""
    _kept.close()


def _loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


def _forked() -> None:  # a child's copies would keep its parent's connections up
    global _kept
    _kept._lock = threading.Lock()
    _kept.close()
    _kept = _Kept()


_kept = _Kept()
os.register_at_fork(after_in_child=_forked)
