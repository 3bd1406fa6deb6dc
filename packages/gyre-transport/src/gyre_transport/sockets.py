"""ZeroMQ sockets as the bus uses them: options, and addresses that are taken and given back reliably."""

from __future__ import annotations

import socket as socketlib
from typing import Any

import zmq
import zmq.asyncio

from gyre_transport.errors import BusError

HIGH_WATER = 10_000  # messages
MAX_BYTES = 1 << 30  # a message
_RELEASE = 2_000  # ms


def prepare(socket: zmq.Socket[Any]) -> None:
    """Set the options every socket of the bus has."""
    socket.setsockopt(zmq.LINGER, 500)  # ms: let a last reply leave, never hang an exit
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)


def bound(kind: int, address: str) -> tuple[zmq.asyncio.Socket, str]:
    """Return a bound socket and its real endpoint (tcp port 0 is resolved). Raises `BusError`; then nothing is open."""
    if _served(address):  # ZeroMQ would take a living server's ipc path away without a word
        raise BusError(f"cannot listen on {address!r}: a living process does; choose another address or stop it")
    socket = zmq.asyncio.Context.instance().socket(kind)
    prepare(socket)
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        socket.close()
        raise BusError(
            f"cannot listen on {address!r}: {e}; choose another address or stop the process that holds it"
        ) from e
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


async def release(socket: zmq.asyncio.Socket, address: str) -> None:
    """Close a bound socket; return when the address is free.

    Closing alone goes on in ZeroMQ's thread, which removes an ipc path at some later moment: a successor's, perhaps.
    """
    try:
        monitor = socket.get_monitor_socket(zmq.EVENT_CLOSED)
        socket.unbind(address)
        await monitor.poll(_RELEASE)
    finally:
        socket.disable_monitor()
        socket.close()


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
