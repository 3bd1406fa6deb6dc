"""What Mooncake's engine gets wrong and the backend must not. What every backend promises is in test_conformance.

Most tests need the package: uv run --with mooncake-transfer-engine-non-cuda pytest tests/transport
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from gyre_transport import endpoint
from gyre_transport.backends.mooncake import engine as engines
from gyre_transport.backends.mooncake.channel import MooncakeChannel
from gyre_transport.backends.mooncake.owner import Lender
from gyre_transport.errors import DeadlineExceeded, StaleDescriptor, Unreachable
from gyre_transport.memory import Descriptor, allocate, read, register
from gyre_transport.run import TransportConfig

LONG = 60.0  # seconds: an error comes long before
HERE = "127.0.0.1"
NAMED = TransportConfig(backends=("shm", "tcp", "mooncake"))
installed = pytest.mark.skipif(not engines.installed(), reason=f"{engines.PACKAGE} is not installed")


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    """It lasts as long as its process: it is started before anything is counted."""
    if engines.installed():
        engines.engine(HERE)


@pytest.fixture
def named(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "_config", NAMED)


@pytest.fixture
def hold(script) -> Iterator[SimpleNamespace]:
    """Another process's memory."""
    process = script("owner.py")
    answer = process.ask("allocate", nbytes=48 << 20, seed=1)
    descriptor = msgspec.msgpack.decode(bytes.fromhex(answer["descriptor"]), type=Descriptor)
    return SimpleNamespace(process=process, region=answer["region"], descriptor=descriptor)


def test_it_is_used_only_where_it_is_named():
    assert "mooncake" not in TransportConfig().backends
    with allocate(100) as region:
        assert region.descriptor.endpoint is not None
        assert not region.descriptor.endpoint.mooncake
        with pytest.raises(Unreachable, match=r"transport\.backends"):
            read(region.descriptor, bytearray(100), deadline=LONG, via="mooncake")


def test_without_the_package_it_is_left_out(monkeypatch, named, caplog):
    monkeypatch.setattr(engines, "_engine", None)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with allocate(100) as region:
        assert "pip install 'gyre-transport[mooncake]'" in caplog.text
        assert not region.descriptor.endpoint.mooncake
        read(region.descriptor, bytearray(100), deadline=LONG)


def test_an_engine_that_was_started_for_another_address_lends_nothing(monkeypatch, caplog):
    monkeypatch.setattr(engines, "_engine", SimpleNamespace(host="192.0.2.1"))
    assert not Lender(NAMED, HERE).lends
    assert "192.0.2.1" in caplog.text


@installed
def test_what_another_process_sends_under_the_name_is_refused(hold, script, monkeypatch):
    other = script("owner.py").ask("allocate", nbytes=48 << 20, seed=2)
    foreign = msgspec.msgpack.decode(bytes.fromhex(other["descriptor"]), type=Descriptor)
    with MooncakeChannel(foreign, HERE, end=time.monotonic() + LONG, adopt=lambda interrupt: None) as channel:
        theirs = channel._place
    plain = MooncakeChannel._locate

    def misled(self) -> object:  # as by a name that the engine remembers, and whose port is another process's now
        return msgspec.structs.replace(theirs, token=plain(self).token)

    monkeypatch.setattr(MooncakeChannel, "_locate", misled)
    into = bytearray(1_000)
    with pytest.raises(Unreachable, match="another process"):
        read(hold.descriptor, into, offset=0, deadline=LONG, via="mooncake")
    assert into == bytes(1_000)


@installed
def test_an_owner_that_stands_still_in_the_middle(hold, monkeypatch, eventually):
    plain, stopped = MooncakeChannel._wait, []

    def stop(self, reading) -> None:
        os.kill(hold.process.pid, signal.SIGSTOP)
        stopped.append(reading)
        plain(self, reading)

    monkeypatch.setattr(MooncakeChannel, "_wait", stop)
    into = np.zeros(48 << 20, np.uint8)
    with pytest.raises(DeadlineExceeded):
        read(hold.descriptor, into, deadline=2.0, via="mooncake")
    monkeypatch.undo()
    os.kill(hold.process.pid, signal.SIGCONT)
    assert not into.any()
    eventually(lambda: all(reading.ended for reading in stopped))
    assert not into.any()  # what came late came elsewhere
    read(hold.descriptor, into, deadline=LONG, via="mooncake")
    assert into.any()


@installed
def test_memory_taken_back_while_the_engine_never_ends_a_read(hold, monkeypatch):
    monkeypatch.setattr(engines.Reading, "ended", property(lambda self: False))  # as it was seen to do

    def revoke(self, reading, plain=MooncakeChannel._wait) -> None:
        hold.process.ask("revoke", region=hold.region)
        plain(self, reading)

    monkeypatch.setattr(MooncakeChannel, "_wait", revoke)
    with pytest.raises(StaleDescriptor):
        read(hold.descriptor, np.zeros(48 << 20, np.uint8), deadline=LONG, via="mooncake")


@installed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", ["raises", "refuses"])
def test_a_read_that_does_not_begin_brings_nothing(hold, monkeypatch, fails):
    plain = engines.Engine.begin

    def begin(self, segment: str, address: int, remote: int, nbytes: int) -> int:
        if nbytes < 1_000:  # the owner's token
            return plain(self, segment, address, remote, nbytes)
        if fails == "raises":
            raise RuntimeError("of the engine's")
        return 0

    monkeypatch.setattr(engines.Engine, "begin", begin)
    into = bytearray(b"x" * 1_000)
    with pytest.raises(Unreachable, match="could not read"):
        read(hold.descriptor, into, offset=0, deadline=LONG, via="mooncake")
    assert into == b"x" * 1_000


@installed
def test_a_forked_child_ends():
    code = f"""
import os, sys
from gyre_transport.backends.mooncake import engine
engine.engine({HERE!r})
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=LONG).returncode == 7


@installed
def test_rooms_of_reads_that_were_given_up_are_bounded(hold, monkeypatch):
    monkeypatch.setattr(engines, "_MOST_GIVEN_UP", -1)
    with pytest.raises(Unreachable, match="given up"):
        read(hold.descriptor, np.zeros(48 << 20, np.uint8), deadline=LONG, via="mooncake")


@installed
def test_memory_that_is_registered_twice_goes_another_way(named):
    memory = bytearray(b"x" * 100)
    with register(memory) as one, register(memory) as two:
        read(one.descriptor, bytearray(100), deadline=LONG, via="mooncake")
        with pytest.raises(Unreachable, match="registered twice"):
            read(two.descriptor, bytearray(100), deadline=LONG, via="mooncake")
        one.revoke()
        into = bytearray(100)
        read(two.descriptor, into, deadline=LONG, via="mooncake")
        assert into == memory
