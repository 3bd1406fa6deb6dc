"""The process that holds the memory.

python -m gyre_transport.bench.owner BYTES      says in one line of JSON how it is reached, ends at the end of stdin
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gyre_transport.backends.mooncake import engine
from gyre_transport.bench.peers import mooncake_engine, raw_server, zmq_server
from gyre_transport.buffers import aligned
from gyre_transport.endpoint import configure
from gyre_transport.errors import ProcessError
from gyre_transport.memory import allocate, register
from gyre_transport.run import TransportConfig

_WAIT = 300.0  # seconds


def open_every_way() -> None:
    """Have this process serve its memory every way there is; before it registers any."""
    if engine.installed():
        configure(TransportConfig(backends=("shm", "verbs", "tcp", "mooncake")))


def own(size: int, more: dict[str, Any] | None = None) -> None:
    """Hold `size` bytes, serve them every way, say how (and `more`), until stdin ends; never returns."""
    open_every_way()
    mooncake = mooncake_engine()
    region = allocate(size)
    region.array(np.uint32)[:] = np.arange(size // 4, dtype=np.uint32)
    local = aligned(size).view(np.uint32)
    local[:] = np.arange(size // 4, dtype=np.uint32)
    registered = register(local)
    if mooncake is not None:
        mooncake.register_memory(local.ctypes.data, local.nbytes)
    told = {
        "allocated": msgspec.msgpack.encode(region.descriptor).hex(),
        "registered": msgspec.msgpack.encode(registered.descriptor).hex(),
        "raw": raw_server(region.buffer),
        "zmq": zmq_server(region.buffer),
        "mooncake": None if mooncake is None else [f"127.0.0.1:{mooncake.get_rpc_port()}", local.ctypes.data],
        **(more or {}),
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # the servers' threads wait for ever


class Owner:
    """The owner as a process of its own; a context manager. `told`: how its memory is reached."""

    def __init__(self, size: int, argv: Sequence[str] = (sys.executable, "-m", "gyre_transport.bench.owner")) -> None:
        """argv: what calls `own`, given the size. Raises `ProcessError`."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
        self._process = subprocess.Popen(
            [*argv, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        try:
            self.told: dict[str, Any] = json.loads(self._line())
        except BaseException:
            self.close()
            raise

    def _line(self) -> str:
        assert self._process.stdout is not None  # noqa: S101  (a pipe was asked for)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(_WAIT) else ""
            while line and not line.startswith("{"):  # what a peer's library logs
                line = self._process.stdout.readline()
        if not line:
            raise ProcessError("the process that was to hold the memory ended or said nothing; is there room for it?")
        return line

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate(timeout=_WAIT)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


if __name__ == "__main__":
    own(int(sys.argv[1]))
