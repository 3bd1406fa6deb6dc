"""Leases and copies with real processes: who holds a version back, who serves it on, and what their ends mean.

Processes that are told a name pretend to be on that machine: they reach each other over tcp only.
"""

from __future__ import annotations

import os
import random
import signal
import threading

import msgspec
import numpy as np
import pytest

from gyre_transport import reads
from gyre_transport.backends import tcp
from gyre_transport.backends.tcp import Line, TcpChannel
from gyre_transport.descriptor import Content
from gyre_transport.errors import DeadlineExceeded, StaleVersion
from gyre_transport.leases import Ask, Offer
from gyre_transport.memory import allocate
from gyre_transport.snapshot import Manifest, SnapshotSource, pull

LONG = 60.0
SIZE = 500_000  # floats of a tensor: more than is asked for ahead in all


@pytest.fixture
def source():
    with SnapshotSource("policy") as source:
        yield source


@pytest.fixture
def reader(script):
    """Start a process that pulls, on a machine of that name."""
    return lambda machine: script("owner.py", "0", machine)


def tensors(version: int) -> dict:
    return {f"t{i}": ("F32", (SIZE,), np.full(SIZE, version, np.float32)) for i in range(6)}


def told(manifest: Manifest) -> str:
    return msgspec.msgpack.encode(manifest).hex()


def values(snapshot) -> set[float]:
    return {float(v) for _, _, data in snapshot.values() for v in np.unique(np.frombuffer(data, np.float32))}


# --- leases ----------------------------------------------------------------------------------------------------------


class Advance(threading.Thread):
    """The source moves on to version 2."""

    def __init__(self, source: SnapshotSource, **options) -> None:
        super().__init__()
        self._source, self._options = source, options
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._source.advance(2, tensors(2), **self._options)
        except BaseException as e:
            self.error = e


@pytest.mark.parametrize("end", ["arrive", "leave", "time"])
def test_advance_waits_for_the_reader(source, reader, end):
    manifest = source.publish(1, tensors(1))
    one = reader("elsewhere")
    one.ask("stall_pull", manifest=told(manifest), deadline=6.0 if end == "time" else LONG)
    assert source.readers == 1
    advance = Advance(source, wait=LONG)
    advance.start()
    advance.join(0.3)
    assert advance.is_alive()
    assert source.manifest == manifest
    if end == "arrive":
        one.process.stdin.write(b"\n")
        one.process.stdin.flush()
        assert one.receive()["values"] == [1.0]
    elif end == "leave":
        one.kill()
    advance.join(LONG)
    assert not advance.is_alive()
    assert advance.error is None
    assert values(pull(source.manifest, deadline=LONG, via="tcp", share=False)) == {2.0}


def test_a_reader_that_takes_too_long_is_cut_off(source, reader):
    manifest = source.publish(1, tensors(1))
    one = reader("elsewhere")
    one.ask("stall_pull", manifest=told(manifest))
    source.advance(2, tensors(2), wait=0.1)
    one.process.stdin.write(b"\n")
    one.process.stdin.flush()
    assert one.receive()[0] == "StaleVersion"
    assert one.ask("pull", manifest=told(source.manifest))["values"] == [2.0]


def test_an_advance_that_must_not_cut_anybody_off(source, reader):
    manifest = source.publish(1, tensors(1))
    one = reader("elsewhere")
    one.ask("stall_pull", manifest=told(manifest))
    with pytest.raises(DeadlineExceeded, match="1 readers still hold version 1"):
        source.advance(2, tensors(2), wait=0.1, revoke=False)
    assert source.manifest == manifest
    assert reader("another").ask("pull", manifest=told(manifest))["values"] == [1.0]  # leases are granted again
    one.process.stdin.write(b"\n")
    one.process.stdin.flush()
    assert one.receive()["values"] == [1.0]


def test_no_lease_while_the_next_version_waits(source, reader, eventually):
    manifest = source.publish(1, tensors(1))
    one = reader("elsewhere")
    one.ask("stall_pull", manifest=told(manifest))
    advance = Advance(source, wait=LONG)
    advance.start()
    eventually(lambda: source._desk._leases._draining)
    with pytest.raises(StaleVersion, match="being replaced"):
        pull(manifest, deadline=LONG, via="tcp")
    one.kill()
    advance.join(LONG)
    assert advance.error is None


def test_a_reader_leaves_nothing_behind(source, eventually):
    manifest = source.publish(1, tensors(1))
    snapshot = pull(manifest, deadline=LONG, via="tcp")
    assert (source.readers, source.copies) == (0, 1)
    snapshot.close()
    eventually(lambda: source.copies == 0)
    pull(manifest, deadline=LONG, via="tcp", share=False)
    assert (source.readers, source.copies) == (0, 0)


def test_a_source_that_says_nonsense_of_leases_is_an_error(source):
    manifest = source.publish(1, tensors(1))
    with Line(manifest.descriptor, end=1e12) as line, pytest.raises(Exception, match="its log says more"):
        line.call(manifest.descriptor, b"\xc1nonsense", end=1e12)
    assert values(pull(manifest, deadline=LONG, via="tcp")) == {1.0}


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_machine_gets_a_version_once(source, reader):
    manifest = source.publish(1, tensors(1))
    readers = [reader("elsewhere") for _ in range(4)]
    for one in readers:
        one.send("pull", manifest=told(manifest))
    answers = [one.receive() for one in readers]
    assert [a["values"] for a in answers] == [[1.0]] * 4
    assert sorted(a["serves"] for a in answers) == [False, False, False, True]
    assert source.copies == 1


def test_another_reader_fetches_when_the_first_one_dies(source, reader, eventually):
    manifest = source.publish(1, tensors(1))
    first, second = reader("elsewhere"), reader("elsewhere")
    first.ask("stall_pull", manifest=told(manifest))
    second.send("pull", manifest=told(manifest))
    first.kill()
    assert second.receive() == {"values": [1.0], "serves": True}


def test_a_copy_outlives_the_version_at_the_source(source, reader):
    manifest = source.publish(1, tensors(1))
    one = reader("elsewhere")
    one.ask("pull", manifest=told(manifest))
    source.publish(2, tensors(2))
    assert one.ask("let_go") is None
    assert one.ask("pull", manifest=told(manifest))[0] == "StaleVersion"
    assert one.ask("pull", manifest=told(source.manifest))["values"] == [2.0]


class Machines:
    """A source that serves one machine at a time and is busy, and a copy in the hands of `holder`."""

    def __init__(self, reader) -> None:
        self.source = SnapshotSource("policy", fan_out=1)
        self.manifest = self.source.publish(1, tensors(1))
        self.holder = reader("first")
        assert self.holder.ask("pull", manifest=told(self.manifest))["serves"]
        self._busy = Line(self.manifest.descriptor, end=1e12)
        self.say(Ask(host="second", seconds=LONG, failed=b"?"))  # at the source

    def say(self, message) -> None:
        self._busy.call(self.manifest.descriptor, msgspec.msgpack.encode(message), end=1e12)

    def close(self) -> None:
        self._busy.close()
        self.source.close()


@pytest.fixture
def machines(reader):
    machines = Machines(reader)
    yield machines
    machines.close()


def served(monkeypatch, act) -> list[int]:
    """Pids of the owners that pieces came from; `act` is called after the first."""
    pids: list[int] = []
    plain = TcpChannel.complete

    def complete(self) -> None:
        plain(self)
        pids.append(self._descriptor.owner.pid)
        if len(pids) == 1:
            act()

    monkeypatch.setattr(TcpChannel, "complete", complete)
    return pids


def test_a_reader_elsewhere_is_served_by_a_copy(machines, monkeypatch):
    pids = served(monkeypatch, lambda: None)
    assert values(pull(machines.manifest, deadline=LONG, via="tcp")) == {1.0}
    assert set(pids) == {machines.holder.pid}


@pytest.mark.parametrize("end", ["kill", "let_go", "stop"])
def test_the_source_serves_when_the_copy_ends_in_the_middle(machines, monkeypatch, end):
    def act() -> None:
        if end == "kill":
            machines.holder.kill()
        elif end == "let_go":
            machines.holder.ask("let_go")
        else:
            os.kill(machines.holder.pid, signal.SIGSTOP)

    monkeypatch.setattr(reads, "_CHUNK", 1 << 16)
    monkeypatch.setattr(tcp, "_BATCH", 1 << 16)
    pids = served(monkeypatch, act)
    assert values(pull(machines.manifest, deadline=12.0 if end == "stop" else LONG, via="tcp")) == {1.0}
    assert set(pids) == {machines.holder.pid, os.getpid()}


def test_a_copy_with_other_bytes_is_found_out(machines, monkeypatch):
    content = Content(model="policy", version=1)
    with allocate(machines.manifest.nbytes, content=content) as wrong:
        machines.holder.ask("let_go")
        machines.say(Offer(host="second", descriptor=wrong.descriptor))
        blocker = Line(machines.manifest.descriptor, end=1e12)
        blocker.call(
            machines.manifest.descriptor, msgspec.msgpack.encode(Ask(host="third", seconds=LONG, failed=b"?")), end=1e12
        )
        snapshot = pull(machines.manifest, deadline=LONG, via="tcp")
        assert values(snapshot) == {1.0}
        blocker.close()


def test_a_copy_of_something_else_is_not_read(machines):
    with allocate(100, content=Content(model="policy", version=9)) as wrong:
        machines.holder.ask("let_go")
        machines.say(Offer(host="second", descriptor=wrong.descriptor))
        with Line(machines.manifest.descriptor, end=1e12) as blocker:
            ask = msgspec.msgpack.encode(Ask(host="third", seconds=LONG, failed=b"?"))
            blocker.call(machines.manifest.descriptor, ask, end=1e12)
            assert values(pull(machines.manifest, deadline=LONG, via="tcp")) == {1.0}


def test_what_readers_and_source_hold_is_back_where_it_was_after_every_end(owner, reader, eventually):
    one = reader("elsewhere")

    def manifest(version: int) -> str:
        return owner.ask("publish", model="leaks", version=version, count=6, size=SIZE)

    assert one.ask("pull", manifest=manifest(1))["serves"]
    one.ask("let_go")
    before = (owner.ask("count"), one.ask("count"))
    for version in range(2, 12):
        current = manifest(version)
        match version % 4:
            case 0:
                reader("elsewhere").ask("stall_pull", manifest=current)  # ends with the test
            case 1:
                assert one.ask("pull", manifest=current, deadline=0.0)[0] == "DeadlineExceeded"
            case 2:
                one.ask("stall_pull", manifest=current)
                manifest(version + 100 * version)
                one.process.stdin.write(b"\n")
                one.process.stdin.flush()
                assert one.receive()[0] == "StaleVersion"
                owner.ask("forget", model="leaks")
            case 3:
                assert one.ask("pull", manifest=current)["values"] == [float(version)]
        one.ask("let_go")
    eventually(lambda: all(one.ask("count")[k] <= n for k, n in before[1].items()), within=60.0)
    eventually(lambda: all(owner.ask("count")[k] <= n for k, n in before[0].items()), within=60.0)
    owner.ask("forget", model="leaks")


@pytest.mark.parametrize("seed", range(20 if os.environ.get("GYRE_TEST_MANY") else 2))
def test_many_readers_on_three_machines_while_versions_move_on(reader, seed):
    """Pulls at once, advances, readers that are killed or let go: one whole version, or an error, and no standstill."""
    rng, whole = random.Random(seed), 0
    machines = ["one", "one", "two", "two", "three"]
    with SnapshotSource("policy", fan_out=1) as source:
        source.publish(1, tensors(1))
        readers = [reader(m) for m in machines]
        for version in range(2, 10):
            manifest = source.manifest
            for one in readers:
                one.send("pull", manifest=told(manifest), deadline=LONG)
            killed = rng.randrange(len(readers)) if rng.random() < 0.4 else None
            if killed is not None:
                readers[killed].kill()
            if rng.random() < 0.6:
                source.advance(version, tensors(version), wait=rng.choice((0.0, 0.05, LONG)))
            for number, one in enumerate(readers):
                if number == killed:
                    readers[number] = reader(machines[number])
                elif isinstance(answer := one.receive(), dict):
                    assert answer["values"] == [float(manifest.version)]
                    whole += 1
                else:
                    assert answer[0] == "StaleVersion", answer
            if rng.random() < 0.5:
                readers[rng.randrange(len(readers))].ask("let_go")
    assert whole > 10
