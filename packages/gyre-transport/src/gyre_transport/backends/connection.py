"""The reader's end of a tcp connection: greeting, requests, answers, and what is kept for the next read.

A connection is to one process generation, not to one region, and is kept for the next read (see `kept`). One that saw
an error, a deadline or a cancellation is closed, never used again.

    what the socket says                       what is raised
    refused, closed, reset                     StaleDescriptor: the process ended, or took the memory back
    no connection, or silent for two seconds
    at the network's level, or no greeting
    in twenty                                  Unreachable
    nothing in time                            DeadlineExceeded
    another process answers                    StaleDescriptor
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time

from gyre_transport.backends import wire
from gyre_transport.backends.channel import Adopt
from gyre_transport.backends.kept import Kept, close_kept
from gyre_transport.backends.server import tune
from gyre_transport.backends.wire import Kind, Status
from gyre_transport.descriptor import Descriptor, Endpoint, network
from gyre_transport.errors import DataError, DeadlineExceeded, ShapeMismatch, StaleDescriptor, Unreachable

_CONNECT = 2.0  # seconds: a machine that is up accepts or refuses sooner
_GREET = 20.0  # seconds: but the process that is to say something may be busy
_LATER = 0.05  # seconds that a deadline may be missed by, for fewer system calls
_SILENT = 1_900  # ms until the network's silence about a request is an error


class Connection:
    """A greeted connection to one process generation, for one thread."""

    def __init__(self, descriptor: Descriptor, endpoint: Endpoint, end: float, adopt: Adopt) -> None:
        self.owner = descriptor.owner
        self.key = (endpoint, descriptor.owner.generation)
        self.idle_since = 0.0
        self._number = 0
        self._patience = 0.0  # seconds after which the socket's calls return
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            adopt(self.interrupt)
            self._connect(endpoint, end)
            self._nonces = self._greet(endpoint, end)
            self.socket.settimeout(None)  # the kernel keeps the time, or every call would be two
            self._waits = select.poll()
            self._waits.register(self.socket, select.POLLIN)
        except BaseException:
            self.socket.close()
            raise

    def ask(self, descriptor: Descriptor, kind: Kind, count: int, body: bytes, end: float) -> bytes:
        """Send a request; returns its proof."""
        head = (self._number, kind, count, descriptor.slot)
        proof = wire.proof(descriptor.secret, self._nonces, *head, body)
        self._arm(end)
        try:
            self.socket.sendall(wire.REQUEST.pack(*head[1:], proof) + body)
        except OSError as e:
            raise self._lost(e, end) from e
        self._number += 1
        return proof

    def answer(self, end: float) -> int:
        """Receive the head of the oldest answer; returns its bytes' number, raises what a refusal means."""
        head = bytearray(wire.ANSWER.size)
        self._arm(end)
        self.fill([memoryview(head)], end)
        return self._nbytes(head)

    def receive(self, nbytes: int, parts: list[memoryview], end: float) -> bool:
        """Receive the oldest answer of `nbytes` with its seal into `parts`; whether it has that many.

        What has come is taken with the head in one system call. Raises what a refusal means.
        """
        head = bytearray(wire.ANSWER.size)
        self._arm(end)
        left = self.fill([memoryview(head), *parts], end, least=len(head))
        if self._nbytes(head) != nbytes:
            return False
        if left:
            self.fill(left, end)
        return True

    def _nbytes(self, head: bytearray) -> int:
        status, _, nbytes = wire.ANSWER.unpack(head)
        if status == Status.OK:
            return int(nbytes)
        if status == Status.OUTSIDE:
            raise ShapeMismatch(f"{self.owner} holds less than the descriptor says")
        if status == Status.REFUSED:
            raise DataError(f"{self.owner} takes no calls on that memory, or failed to handle one; its log says more")
        raise StaleDescriptor(f"the memory of {self.owner} was deregistered; ask it for a new descriptor")

    def fill(self, parts: list[memoryview], end: float, least: int | None = None) -> list[memoryview]:
        """Receive until all `parts` are full, or have `least` bytes; returns what is left of them."""
        flags = socket.MSG_WAITALL if least is None else 0
        came = 0
        try:
            while parts and (least is None or came < least):
                n = self.socket.recvmsg_into(parts, 0, flags)[0]
                if not n:
                    raise EOFError
                came += n
                whole = 0
                while whole < len(parts) and n >= parts[whole].nbytes:
                    n -= parts[whole].nbytes
                    whole += 1
                parts = parts[whole:]
                if parts:  # a signal, the end of the time or of the connection: the next call tells
                    parts[0] = parts[0][n:]
                    if time.monotonic() >= end:
                        raise TimeoutError
        except (EOFError, OSError) as e:
            raise self._lost(e, end) from e
        return parts

    def interrupt(self) -> None:
        """From another thread: whatever waits on the connection returns now, with an error."""
        with contextlib.suppress(OSError):  # not connected, or closed
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.socket.close()

    abandon = close

    @property
    def usable(self) -> bool:
        """Whether an idle connection is still up: its peer has neither closed it nor spoken out of turn."""
        return self.socket.fileno() >= 0 and not self._waits.poll(0)

    def lost(self, end: float) -> DataError | None:
        """What has become of a connection on which nothing is under way: None while it is up."""
        if not self._waits.poll(0):
            return None
        try:
            if self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return Unreachable(f"{self.owner} spoke out of turn; is it another version of Gyre?")
            raise EOFError
        except (EOFError, OSError) as e:
            return self._lost(e, end)

    def _connect(self, endpoint: Endpoint, end: float) -> None:
        self.socket.settimeout(max(0.001, min(_CONNECT, end - time.monotonic())))
        try:
            tune(self.socket)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT)  # for requests under way
            self.socket.connect((endpoint.host, endpoint.port))
        except ConnectionRefusedError:
            raise StaleDescriptor(
                f"nobody listens at {endpoint}: {self.owner} ended, or registers no memory any more; ask its "
                "successor for a new descriptor"
            ) from None
        except TimeoutError as e:
            raise _late(end, f"no connection to {self.owner} at {endpoint}") from e
        except OSError as e:
            raise Unreachable(
                f"no connection to {self.owner} at {endpoint}: {e.strerror or e}; check the network and "
                "transport.listen of the owner"
            ) from e

    def _greet(self, endpoint: Endpoint, end: float) -> bytes:
        mine = wire.nonce()
        welcome = bytearray(wire.WELCOME.size)
        self.socket.settimeout(max(0.001, min(_GREET, end - time.monotonic())))
        try:
            self.socket.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION, mine))
            _receive(self.socket, memoryview(welcome))
        except TimeoutError as e:
            raise _late(end, f"{endpoint} accepted a connection, but said nothing") from e
        except (EOFError, OSError) as e:
            raise StaleDescriptor(f"{endpoint} closed the connection at once: {self.owner} is ending") from e
        magic, version, status, nonce, generation = wire.WELCOME.unpack(welcome)
        if (magic, version) != (wire.MAGIC, wire.VERSION):
            raise Unreachable(
                f"{endpoint} does not speak version {wire.VERSION} of the protocol, but {magic!r} {version}; "
                "is it another version of Gyre, or another service on that port?"
            )
        if status == Status.BUSY:
            raise Unreachable(
                f"{self.owner} serves as many connections as it may; try later, or raise transport.max_connections"
            )
        if generation != self.owner.generation:
            raise StaleDescriptor(
                f"{self.owner} ended, and another process listens at {endpoint}; ask its successor for a new descriptor"
            )
        return mine + bytes(nonce)

    def _arm(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise _late(end, f"no answer from {self.owner}")
        if left <= self._patience < left + _LATER:
            return
        self._patience = patience = left + _LATER / 2  # so that the next read with such a deadline need not set it
        timeval = struct.pack("@ll", int(patience), int(patience % 1 * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def _lost(self, e: Exception, end: float) -> DataError:
        if isinstance(e, TimeoutError | BlockingIOError):  # the kernel gave the peer up, or the deadline passed
            return _late(end, f"no answer from {self.owner}")
        if isinstance(e, EOFError | ConnectionError):
            return StaleDescriptor(
                f"{self.owner} closed the connection: it ended, or took the memory back; ask for a new descriptor"
            )
        return Unreachable(f"the connection to {self.owner} is lost: {e}; read again")


def connect(descriptor: Descriptor, *, end: float, adopt: Adopt) -> Connection:
    """A connection to the owner, kept or new. Raises as the module says."""
    endpoint = descriptor.endpoint
    if endpoint is None:
        raise Unreachable(f"{descriptor.owner} does not listen: transport.listen is empty there, or it failed")
    if _loopback(endpoint.host) and endpoint.network != network():
        raise Unreachable(
            f"{descriptor.owner} is on another machine and listens on {endpoint.host} only; set transport.listen "
            "there to an address others reach"
        )
    found = _kept.take((endpoint, descriptor.owner.generation))
    if found is not None:
        adopt(found.interrupt)
        return found
    return Connection(descriptor, endpoint, end, adopt)


def keep(connection: Connection) -> None:
    """Keep a connection on which nothing is under way, for the next read."""
    _kept.give(connection)


def disconnect() -> None:
    """Close the connections, of every backend, that are kept for the next read."""
    close_kept()


def _late(end: float, what: str) -> DataError:
    """The error of a socket's timeout: the deadline's, or the network's."""
    if time.monotonic() >= end:
        return DeadlineExceeded(f"{what} before the deadline; allow more time")
    return Unreachable(f"{what}; check the network and transport.listen of the owner")


def _receive(peer: socket.socket, into: memoryview) -> None:
    while into:
        n = peer.recv_into(into)
        if not n:
            raise EOFError
        into = into[n:]


def _loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


_kept: Kept[Connection] = Kept()
