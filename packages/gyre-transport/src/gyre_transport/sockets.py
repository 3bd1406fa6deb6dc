"""ZeroMQ sockets as the bus uses them: options, addresses that are taken and given back reliably, and who may connect.

ipc               no keys: the folder's permissions
tcp, loopback     the process's keys (`gyre_transport.keys`) if it has any
tcp, beyond       the process's keys; without them neither bound nor connected
"""

from __future__ import annotations

import ipaddress
import socket as socketlib
from typing import Any

import zmq
import zmq.asyncio

from gyre_transport import keys as runs
from gyre_transport.admission import Reception, Refusals, gate
from gyre_transport.errors import AccessDenied, BusError, DeadlineExceeded
from gyre_transport.keys import Keys

HIGH_WATER = 10_000  # messages
MAX_BYTES = 1 << 30  # a message
_RELEASE = 2_000  # ms


def prepare(socket: zmq.Socket[Any], address: str) -> None:
    """Set the options every socket of the bus has."""
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.LINGER, 500)  # ms: let a last reply leave, never hang an exit
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    # A machine that is gone is noticed by the kernel. Not by libzmq's heartbeats: they time out at a socket that is
    # behind by RCVHWM, too, and libzmq 4.3.5 then aborts the process when it is read again.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 4)  # seconds
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 10_000)  # ms that sent bytes may stay unacknowledged
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)  # ms: a peer that refuses is not asked ten times a second


class Listener:
    """A bound socket until it is closed, and the peers it refused."""

    def __init__(self, kind: int, address: str, keys: Keys | None = None) -> None:
        """keys: default: this process's. `address` then holds the real endpoint (tcp port 0 is resolved).

        Raises `BusError`; then nothing is open.
        """
        if _served(address):  # ZeroMQ would take a living server's ipc path away without a word
            raise BusError(f"cannot listen on {address!r}: a living process does; choose another address or stop it")
        keys = _needed(address, keys, "listen on")
        self.socket = zmq.asyncio.Context.instance().socket(kind)
        self._refusals = Refusals(self.socket, address) if address.startswith("tcp://") else None
        prepare(self.socket, address)
        if keys is not None:
            gate.guard(self.socket, keys)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as e:
            self._end()
            raise BusError(
                f"cannot listen on {address!r}: {e}; choose another address or stop the process that holds it"
            ) from e
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def refused(self) -> int:
        """Peers turned away: without keys, or with another run's. Each counts as often as it tries."""
        return 0 if self._refusals is None else self._refusals.count

    async def close(self) -> None:
        """Close; return when the address is free.

        Closing alone goes on in ZeroMQ's thread, which removes an ipc path at some later moment: a successor's, maybe.
        """
        if self._refusals is not None:
            self._refusals.close()
        monitor = self.socket.get_monitor_socket(zmq.EVENT_CLOSED)
        try:
            self.socket.unbind(self.address)
            await monitor.poll(_RELEASE)
        finally:
            self.socket.disable_monitor()
            monitor.close()
            self._end()

    def _end(self) -> None:
        if self._refusals is not None:
            self._refusals.close()
        self.socket.close()
        gate.forget(self.socket)


class Dialer:
    """A socket that connects, now or later, and what is known about why nobody answers."""

    def __init__(self, context: zmq.Context[Any], kind: int, address: str, keys: Keys | None = None) -> None:
        """keys: default: this process's. Raises `BusError`; then nothing is open."""
        self.address = address
        keys = _needed(address, keys, "connect to")
        self.socket: Any = context.socket(kind)
        self._reception = Reception(self.socket) if address.startswith("tcp://") else None
        prepare(self.socket, address)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
        try:
            self.socket.connect(address)
        except zmq.ZMQError as e:
            self.close()
            raise BusError(f"cannot connect to {address!r}: {e}; check the address") from e

    @property
    def denied(self) -> bool:
        """Whether the peer refuses this process's keys, or its lack of any."""
        return self._reception is not None and self._reception.denied

    @property
    def why(self) -> str:
        """What to look at when there was no answer."""
        if not self.denied:
            return "is the process up? see its log"
        return (
            "the handshake failed. Is it another run's port, or is this process without the run's keys (bus.keys)? The "
            "peer's log says whom it refused"
        )

    def late(self, what: str) -> DeadlineExceeded:
        """The error of an answer that did not come."""
        return (AccessDenied if self.denied else DeadlineExceeded)(f"{what}; {self.why}")

    def close(self) -> None:
        """Close. Idempotent."""
        if self._reception is not None:
            self._reception.close()
        self.socket.close()


def loopback(address: str) -> bool:
    """Whether only this machine can reach a ZeroMQ address."""
    transport, _, rest = address.partition("://")
    if transport != "tcp":
        return True
    return loopback_host(rest.rpartition(":")[0].rpartition(";")[2].strip("[]"))


def loopback_host(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # "*", the name of an interface or of a host


def _needed(address: str, keys: Keys | None, doing: str) -> Keys | None:
    if not address.startswith("tcp://"):
        return None
    keys = keys or runs.used()
    if keys is None and not loopback(address):
        raise BusError(
            f"will not {doing} {address!r} without keys: others can reach it. Name the run's key file in bus.keys "
            "(the launcher makes it), or use ipc or a loopback address"
        )
    return keys


def _served(address: str) -> bool:
    """Whether somebody answers at an ipc address; False for a path that a dead process left."""
    if not address.startswith("ipc:///"):
        return False
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.removeprefix("ipc://"))
        except OSError:
            return False
    return True
