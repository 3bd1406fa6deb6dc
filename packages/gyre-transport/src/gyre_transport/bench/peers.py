"""What Gyre is measured against: the same bytes, served by others. Loopback only; nothing here is safe."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq


def raw_server(memory: memoryview) -> int:
    """Plain sockets: (offset, length) in, bytes out. Returns the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(peer: socket.socket) -> None:
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while asked := peer.recv(16, socket.MSG_WAITALL):
                offset, length = int.from_bytes(asked[:8], "big"), int.from_bytes(asked[8:], "big")
                peer.sendall(memory[offset : offset + length])

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def zmq_server(memory: memoryview) -> str:
    """ZeroMQ: the same, without copies where it can. Returns the address."""
    reply: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    reply.bind("tcp://127.0.0.1:0")

    def serve() -> None:
        while True:
            offset, length = msgspec.msgpack.decode(reply.recv(), type=tuple[int, int])
            reply.send(memory[offset : offset + length], copy=False)

    threading.Thread(target=serve, daemon=True).start()
    return str(reply.getsockopt_string(zmq.LAST_ENDPOINT))


def mooncake_engine() -> Any:
    """Return a tcp engine of Mooncake's, or None where it is not installed (mooncake-transfer-engine-non-cuda)."""
    try:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    with _stdout_to_stderr():
        engine = TransferEngine()
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    return engine


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Mooncake logs to file 1, which is where results go."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
