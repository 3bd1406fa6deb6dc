"""The owner's end of the tcp backend: one thread a process serves every region, large reads without copies of its own.

    accept ─▶ HELLO / WELCOME ─▶ request … ─▶ answer …        (see `wire` and `session`)
                                    │ malformed: closed          │ revoked before its first byte: refused
                                    │ wrong proof: refused       │ revoked meanwhile: closed, unsealed

Bytes go from the registered memory to the kernel by `send`, which copies them at once. `sendfile` from a memfd would
not: its pages would leave later, perhaps with the next version's bytes in them, after the seal vouched for this one's.

Bounds: `max_connections`; MAX_WAITING requests a connection, then its socket is not read; connections that neither send
nor take anything for `_IDLE` seconds are closed, and so is a peer that does not speak the protocol.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time

from gyre_transport.backends import wire
from gyre_transport.backends.mooncake.owner import Lender
from gyre_transport.backends.session import Malformed, Revoked, Session
from gyre_transport.backends.verbs.owner import Exposures
from gyre_transport.backends.wire import Status
from gyre_transport.control import Export, Record
from gyre_transport.descriptor import Endpoint, network
from gyre_transport.run import TransportConfig

log = logging.getLogger(__name__)

_IDLE = 30.0  # seconds
_STOP = 5.0  # seconds for the thread to end


class Server:
    """Serves a record's exports until it is closed. Raises `OSError` when it cannot listen."""

    def __init__(self, record: Record, config: TransportConfig) -> None:
        family = socket.AF_INET6 if ":" in config.listen else socket.AF_INET
        self._listener = socket.create_server((config.listen, config.port), family=family, backlog=128)
        self._listener.setblocking(False)
        host = advertised(config)
        self._exposures = Exposures(config)
        self._lender = Lender(config, host)
        self.endpoint = Endpoint(
            host=host,
            port=self._listener.getsockname()[1],
            network=network(),
            rdma=self._exposures.links,
            mooncake=self._lender.lends,
        )
        self._record = record
        self._most = config.max_connections
        self._sessions: set[Session] = set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lock = threading.RLock()  # between `_closing` and the use of `_wake`
        self._closing = False
        self._swept = 0.0  # when idle connections were last looked for
        self._thread = threading.Thread(target=self._loop, name="gyre-transport tcp", daemon=True)
        self._thread.start()

    def revoked(self, export: Export) -> None:
        """Close it to RDMA and to Mooncake, and have the connections that send what is no longer there closed."""
        self._exposures.withdraw(export)
        self._lender.withdraw(export)
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
        for session in self._sessions:
            session.socket.close()
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
            for session in list(self._sessions):
                self._drop(session)
            self._exposures.close()
            self._lender.close()
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
        if len(self._sessions) >= self._most:
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
        session = Session(peer, self._record, self._exposures, self._lender)
        self._sessions.add(session)
        self._selector.register(peer, selectors.EVENT_READ, session)

    def _turn(self, session: Session, events: int) -> None:
        if session not in self._sessions:  # dropped since the look that found it ready
            return
        try:
            if events & selectors.EVENT_READ:
                session.receive()
            session.send()
            if (wanted := session.events) != session.awaited:
                self._selector.modify(session.socket, wanted, session)
                session.awaited = wanted
        except Malformed as e:
            log.warning("closed a connection that does not speak the protocol: %s", e)
            self._drop(session)
        except (Revoked, EOFError, OSError):
            self._drop(session)
        except Exception:  # the others are served on
            log.exception("closed a connection of %s: a fault of its server", self.endpoint)
            self._drop(session)

    def _woken(self) -> None:
        os.eventfd_read(self._wake)
        for session in [s for s in self._sessions if s.serves_revoked]:
            self._drop(session)

    def _drop_idle(self) -> None:
        now = time.monotonic()
        if now - self._swept < _IDLE / 4:
            return
        self._swept, before = now, now - _IDLE
        for session in [s for s in self._sessions if s.idle_since < before]:
            self._drop(session)

    def _drop(self, session: Session) -> None:
        self._sessions.discard(session)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(session.socket)
        session.close()


def tune(peer: socket.socket) -> None:
    """Options both ends set: no delay for small answers; a machine that is gone is noticed in about two seconds.

    Not TCP_USER_TIMEOUT: it would also end the connection of a reader that takes nothing for a while.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)  # seconds
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)


def advertised(config: TransportConfig) -> str:
    """The address others reach this machine at, as far as `config` wants them to."""
    listen = config.listen
    if config.advertise or listen not in ("0.0.0.0", "::"):  # noqa: S104  (compared, not bound)
        return config.advertise or listen or "127.0.0.1"
    return outward(6 if ":" in listen else 4) or ("::1" if ":" in listen else "127.0.0.1")


def outward(version: int = 4) -> str | None:
    """This machine's address towards others; None when no route leads to any. Its name may well mean loopback."""
    family, other = (socket.AF_INET, "192.0.2.1") if version == 4 else (socket.AF_INET6, "2001:db8::1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # nothing is sent: the kernel says which address it would be sent from
        return str(probe.getsockname()[0])
    return None
