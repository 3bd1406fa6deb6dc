from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from gyre_transport.gpu import memory

_SCRIPTS = Path(__file__).parent / "scripts"
_WAIT = 60.0  # seconds until a test that waits has failed


class Script:
    """A second process that answers one line of JSON with one line of JSON."""

    def __init__(self, name: str, *arguments: str) -> None:
        argv = [sys.executable, str(_SCRIPTS / name), *arguments]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._rest = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        end = time.monotonic() + _WAIT
        fd = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            assert select.select([fd], [], [], end - time.monotonic())[0], "the second process said nothing"
            piece = os.read(fd, 1 << 20)
            assert piece, f"the second process ended with {self.process.wait(_WAIT)}"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.receive()

    def kill(self) -> None:
        """kill -9, and no return before it is dead and reaped."""
        self.process.kill()
        self.process.wait(_WAIT)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def owner() -> Iterator[Script]:
    """A process that holds memory for the tests of a module, which leave it alive."""
    started = Script("owner.py")
    yield started
    started.close()


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def start(name: str, *arguments: str) -> Script:
        started.append(Script(name, *arguments))
        return started[-1]

    yield start
    for s in started:
        s.close()


@pytest.fixture
def gpu(monkeypatch) -> Any:
    """A scripted GPU (`scripts/scripted_gpu.py`); its tensors are known to gyre_transport."""
    spec = importlib.util.spec_from_file_location("scripted_gpu", _SCRIPTS / "scripted_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.Gpu()
    monkeypatch.setitem(memory.KINDS, "scripted", made.memory)
    return made


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait for what another process does on its own and says to nobody (its end, its last file closed)."""

    def wait(condition: Callable[[], bool], within: float = _WAIT) -> None:
        end = time.monotonic() + within
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.01)

    return wait


@pytest.fixture
def alive() -> Callable[[int], bool]:
    def check(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    return check


def _held() -> tuple[int, int, int]:
    """Open files, mappings of registered memory, and threads of the data plane in this process."""
    maps = Path("/proc/self/maps").read_text()
    threads = sum(t.name.startswith("gyre-transport") for t in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:gyre-memory"), threads


@pytest.fixture(scope="session")
def _warm() -> None:
    """What stays open for the process's life is opened before files are counted."""
    for context in (zmq.Context.instance(), zmq.asyncio.Context.instance()):
        zmq.Socket(context, zmq.DEALER).close()
    gc.collect()
    gc.freeze()  # what is there before the first test is not gone through again after each


@pytest.fixture(autouse=True)
def _no_leak(_warm: None, eventually: Callable[..., None]) -> Iterator[None]:
    """No test leaves an open file, a mapping, a thread, or a file in /dev/shm, behind."""
    gc.collect()
    before, shared = _held(), set(os.listdir("/dev/shm"))
    yield

    def clean() -> bool:
        gc.collect()
        if (tcp := sys.modules.get("gyre_transport.backends.tcp")) is not None:
            tcp.disconnect()
        return all(now <= then for now, then in zip(_held(), before, strict=True))  # ZeroMQ closes sockets in a thread

    eventually(clean)
    new = set(os.listdir("/dev/shm")) - shared
    ours = {f for f in new if "gyre" in f and not f.startswith("gyre-cell-")}  # those are of a run beside the tests
    assert not ours
