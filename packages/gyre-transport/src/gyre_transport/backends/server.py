"""The owner's end of the tcp backend: one thread a process serves every region, large reads without copies of its own.

    accept ─▶ HELLO / WELCOME ─▶ request … ─▶ answer …        (see `wire`)
                                    │ malformed: closed          │ revoked before its first byte: refused
                                    │ wrong proof: refused       │ revoked meanwhile: closed, unsealed

Bytes go from the registered memory to the kernel by `send`, which copies them at once. `sendfile` from a memfd would
not: its pages would leave later, perhaps with the next version's bytes in them, after the seal vouched for this one's.

Bounds: `max_connections`; MAX_WAITING requests a connection, then its socket is not read; connections that neither send
nor take anything for `_IDLE` seconds are closed, and so is a peer that does not speak the protocol.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque

from gyre_transport.backends import wire
from gyre_transport.backends.wire import Status
from gyre_transport.control import Export, Record
from gyre_transport.descriptor import Endpoint, network
from gyre_transport.run import TransportConfig

log = logging.getLogger(__name__)

_IDLE = 30.0  # seconds
_SEND = 1 << 20  # bytes a system call
_SMALL = 64 << 10  # bytes of an answer that leaves with its seal in one system call, for the price of a copy
_TURN = 8 << 20  # bytes before the next connection has its turn
_RECEIVE = 1 << 12
_STOP = 5.0  # seconds for the thread to end


class _Malformed(Exception):
    """What came is not the protocol."""


class _Revoked(Exception):
    """The memory was taken back while it was being sent."""


class _Connection:
    """One client: what it asked for and what is still to be sent. All methods are called by the server's thread."""

    def __init__(self, peer: socket.socket, record: Record) -> None:
        self.socket = peer
        self.active = time.monotonic()
        self._record = record
        self._nonces = b""
        self._received = bytearray()
        self._number = 0
        self._refused = False
        self._waiting: deque[tuple[int, int, int, int, bytes]] = deque()  # number, slot, offset, length, proof
        self._out = b""  # framing to be sent before `_data`
        self._data: memoryview | None = None  # left of the answer under way
        self._export: Export | None = None
        self._slot = 0  # of `_export`
        self._sealed = b""

    @property
    def events(self) -> int:
        """What to wait for."""
        read = selectors.EVENT_READ if len(self._waiting) < wire.MAX_WAITING else 0
        return read | (selectors.EVENT_WRITE if self._out or self._data is not None or self._waiting else 0)

    @property
    def serves_revoked(self) -> bool:
        """Whether the answer under way is of memory that was taken back."""
        # identity, since the same memory may have been granted anew
        return self._export is not None and self._record.exports.get(self._slot) is not self._export

    def receive(self) -> None:
        """Take in what came. Raises `_Malformed`, `EOFError` or `OSError`."""
        try:
            came = self.socket.recv(_RECEIVE)
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
            slot, offset, length, proof = wire.REQUEST.unpack_from(self._received)
            del self._received[: wire.REQUEST.size]
            if length > wire.MAX_LENGTH:
                raise _Malformed(f"{length:,} bytes asked for at once, at most {wire.MAX_LENGTH:,} are served")
            self._waiting.append((self._number, slot, offset, length, proof))
            self._number += 1

    def _greet(self) -> None:
        if len(self._received) < wire.HELLO.size:
            if not wire.MAGIC.startswith(self._received[:4]):
                raise _Malformed("no greeting")
            return
        magic, version, nonce = wire.HELLO.unpack_from(self._received)
        del self._received[: wire.HELLO.size]
        if magic != wire.MAGIC:
            raise _Malformed("no greeting")
        mine = wire.nonce()
        self._out += wire.WELCOME.pack(wire.MAGIC, wire.VERSION, Status.OK, mine, self._record.owner.generation)
        self._nonces = nonce + mine
        self._refused = version != wire.VERSION  # the client knows from the welcome

    def send(self) -> None:
        """Send as much as the socket takes, up to a turn. Raises `_Revoked` or `OSError`."""
        sent = 0
        while sent < _TURN:
            if self._data is not None and not self._data.nbytes:
                self._seal()
            if self._data is None and self._waiting and len(self._out) < _SEND:
                self._begin(*self._waiting.popleft())
                continue
            if not self._out and self._data is None:
                return
            if self.serves_revoked:
                raise _Revoked
            data = b"" if self._data is None else self._data[:_SEND]
            more = socket.MSG_MORE if self._data is not None else 0  # the seal or the next answer goes with it
            try:
                n = self.socket.sendmsg([self._out, data], (), more)
            except BlockingIOError:
                return
            self.active = time.monotonic()
            sent += n
            of_data = max(0, n - len(self._out))
            self._out = self._out[n:]
            if self._data is not None:
                self._data = self._data[of_data:]

    def _begin(self, number: int, slot: int, offset: int, length: int, proof: bytes) -> None:
        export = self._record.exports.get(slot)
        asked = (number, slot, offset, length)
        if export is None or not hmac.compare_digest(proof, wire.proof(export.secret, self._nonces, *asked)):
            self._refuse(Status.STALE, number)
        elif offset + length > export.memory.nbytes:
            self._refuse(Status.OUTSIDE, number)
        else:
            self._export, self._slot, data = export, slot, export.memory[offset : offset + length]
            self._sealed = wire.seal(export.secret, self._nonces, *asked)
            self._out += wire.ANSWER.pack(Status.OK, number)
            if length <= _SMALL:
                self._out += bytes(data)
                self._seal()
            else:
                self._data = data

    def _refuse(self, status: Status, number: int) -> None:
        self._out += wire.ANSWER.pack(status, number)
        self._refused = True
        self._waiting.clear()

    def _seal(self) -> None:
        if self.serves_revoked:
            raise _Revoked
        self._out += self._sealed
        self._data = self._export = None

    def close(self) -> None:
        """Close the socket and let go of the memory."""
        self._data = self._export = None
        self.socket.close()


class Server:
    """Serves a record's exports until it is closed. Raises `OSError` when it cannot listen."""

    def __init__(self, record: Record, config: TransportConfig) -> None:
        family = socket.AF_INET6 if ":" in config.listen else socket.AF_INET
        self._listener = socket.create_server((config.listen, config.port), family=family, backlog=128)
        self._listener.setblocking(False)
        host = config.advertise or _advertised(config.listen)
        self.endpoint = Endpoint(host=host, port=self._listener.getsockname()[1], network=network())
        self._record = record
        self._most = config.max_connections
        self._connections: set[_Connection] = set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lock = threading.RLock()  # between `_closing` and the use of `_wake`
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="gyre-transport tcp", daemon=True)
        self._thread.start()

    def revoked(self) -> None:
        """Have the connections that send what is no longer there closed."""
        with self._lock:
            if not self._closing:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close every connection and end the thread. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:  # there, when it collects the last region
            self._thread.join(_STOP)

    def abandon(self) -> None:
        """In a forked child: close its copies of the parent's files, so that peers notice when the parent ends."""
        self._closing = True
        for connection in self._connections:
            connection.socket.close()
        self._listener.close()
        os.close(self._wake)
        self._selector.close()

    def _loop(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(_IDLE / 4):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj == self._wake:
                        self._woken()
                    else:
                        self._turn(key.data, events)
                self._drop_idle()
        except Exception:
            if not self._closing:
                log.exception(
                    "the tcp server at %s stopped; readers on other machines fail from here on", self.endpoint
                )
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._listener.close()
            self._selector.close()
            with self._lock:
                self._closing = True
                os.close(self._wake)

    def _accept(self) -> None:
        try:
            peer, address = self._listener.accept()
        except OSError as e:  # gone again, or no file number is free: the others are served meanwhile
            log.warning("a connection could not be accepted: %s", e)
            return
        peer.setblocking(False)
        if len(self._connections) >= self._most:
            log.warning("refused %s: %d connections are open (transport.max_connections)", address, self._most)
            with contextlib.suppress(OSError):
                peer.send(wire.WELCOME.pack(wire.MAGIC, wire.VERSION, Status.BUSY, bytes(16), bytes(16)))
            peer.close()
            return
        try:
            tune(peer)
        except OSError:
            peer.close()
            return
        connection = _Connection(peer, self._record)
        self._connections.add(connection)
        self._selector.register(peer, selectors.EVENT_READ, connection)

    def _turn(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                connection.receive()
            connection.send()
            self._selector.modify(connection.socket, connection.events, connection)
        except _Malformed as e:
            log.warning("closed a connection that does not speak the protocol: %s", e)
            self._drop(connection)
        except (_Revoked, EOFError, OSError):
            self._drop(connection)

    def _woken(self) -> None:
        os.eventfd_read(self._wake)
        for connection in [c for c in self._connections if c.serves_revoked]:
            self._drop(connection)

    def _drop_idle(self) -> None:
        before = time.monotonic() - _IDLE
        for connection in [c for c in self._connections if c.active < before]:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()


def tune(peer: socket.socket) -> None:
    """Options both ends set: no delay for small answers; a machine that is gone is noticed in about two seconds.

    Not TCP_USER_TIMEOUT: it would also end the connection of a reader that takes nothing for a while.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)  # seconds
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)


def _advertised(listen: str) -> str:
    """The address others reach this machine at, when it listens on all of its own."""
    if listen not in ("0.0.0.0", "::"):  # noqa: S104  (compared, not bound)
        return listen
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    found = socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM)
    return str(found[0][4][0])
