"""Who is let in at a bound tcp socket, and how it is known that somebody was not.

    peer ── CURVE handshake ──▶ socket ── ZAP: is this client's key one of the run's? ──▶ gate (a thread)
             │ no keys, or another server's: libzmq refuses      │ another client's: refused
             └────────────────────┬──────────────────────────────┘
                                  ▼ handshake event
        at the server  Refusals: counted and logged
        at the client  Reception: the reason of a missed deadline

A socket that is guarded while no gate answers refuses everybody (ZAP_ENFORCE_DOMAIN).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import threading
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from gyre_transport.keys import Keys

log = logging.getLogger(__name__)

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_numbers = itertools.count()


class _Client:
    """What pyzmq asks about a client's key."""

    def __init__(self, keys: Keys) -> None:
        self._allowed = z85.decode(keys.client_public)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key`, in Z85, may enter."""
        return hmac.compare_digest(z85.decode(key), self._allowed)


class Gate:
    """Answers libzmq's questions about clients' keys, in a thread that lives as long as a guarded socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._domains: dict[int, str] = {}  # by socket
        self._authenticator: ThreadAuthenticator | None = None

    def guard(self, socket: zmq.Socket[Any], keys: Keys) -> None:
        """Make `socket`, before it is bound, let in who has the keys."""
        with self._lock:
            if self._authenticator is None:
                self._authenticator = ThreadAuthenticator(zmq.asyncio.Context.instance(), log=_quiet)
                self._authenticator.start()
            domain = f"gyre-{next(_numbers)}"
            self._domains[id(socket)] = domain
            self._authenticator.configure_curve_callback(domain, _Client(keys))
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def forget(self, socket: zmq.Socket[Any]) -> None:
        """`socket` is closed. Nothing for one that was not guarded."""
        with self._lock:
            domain = self._domains.pop(id(socket), None)
            if domain is None or self._authenticator is None:
                return
            self._authenticator.credentials_providers.pop(domain, None)
            if not self._domains:
                self._authenticator.stop()
                self._authenticator = None


_quiet = logging.getLogger(f"{__name__}.zap")  # pyzmq tells every decision, with keys
_quiet.setLevel(logging.CRITICAL)
gate = Gate()


class Refusals:
    """Counts and logs the peers that a bound asyncio socket refused."""

    def __init__(self, socket: zmq.Socket[Any], address: str) -> None:
        self.count = 0
        self._socket = socket
        self._address = address
        self._events = _events(socket, _FAILED, socket.context)
        self._watching = asyncio.create_task(self._watch(), name=f"refusals {address}")

    async def _watch(self) -> None:
        while True:
            if not _kind(await self._events.recv_multipart()) & _FAILED:
                continue
            self.count += 1
            if self.count & (self.count - 1) == 0:  # the first, the second, the fourth, …
                log.warning(
                    "%s: refused a peer without keys, or with another run's (%d so far)", self._address, self.count
                )

    def close(self) -> None:
        """Stop; before the socket is closed. Idempotent."""
        if not self._events.closed:
            self._watching.cancel()
            self._socket.disable_monitor()
            self._events.close()


class Reception:
    """Whether a socket that connects was let in, when last it knew."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._denied = self._greeting = False
        self._socket = socket
        shakes = _FAILED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._events = _events(socket, shakes, socket.context, socket_class=zmq.Socket)

    @property
    def denied(self) -> bool:
        """Whether the last handshake that ended was refused."""
        with contextlib.suppress(zmq.Again):
            while not self._events.closed:
                self._take(_kind(self._events.recv_multipart(zmq.NOBLOCK)))
        return self._denied

    def _take(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._greeting = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greeting = self._denied = False
        elif event & _FAILED or self._greeting:  # a peer that closes at once may say nothing else
            self._greeting, self._denied = False, True

    def close(self) -> None:
        """Stop; before the socket is closed. Idempotent."""
        if not self._events.closed:
            self._socket.disable_monitor()
            self._events.close()


def _events(socket: zmq.Socket[Any], which: int, context: zmq.Context[Any], **kind: Any) -> Any:
    """A socket of `socket`'s events, without a bound: libzmq's thread would wait for whoever does not read them. Each
    is a few bytes, and they come as often as a peer tries to connect."""
    where = f"inproc://gyre-events-{next(_numbers)}"
    socket.monitor(where, which)
    events = context.socket(zmq.PAIR, **kind)
    events.setsockopt(zmq.RCVHWM, 0)
    events.setsockopt(zmq.LINGER, 0)
    events.connect(where)
    return events


def _kind(frames: list[bytes]) -> int:
    return int(parse_monitor_message(frames)["event"])
