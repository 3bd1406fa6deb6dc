"""Ports that are kept from the moment they are chosen until whoever is to serve there does."""

from __future__ import annotations

import socket


def hold(host: str, port: int = 0) -> socket.socket:
    """A socket that keeps `port` of the address `host`, or with 0 a free one, for a server, until it is closed.

    It is bound and does not listen: nobody else is given the port meanwhile, neither for a server nor for a connection,
    while a server whose socket shares addresses (asyncio's do) can still bind it, and after a restart again. Raises
    `OSError` when the port is taken.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held
