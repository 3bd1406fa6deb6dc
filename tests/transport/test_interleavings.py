"""Random interleavings of publishing, pulling and crashing: a reader has one whole version, or an error.

A pull is stopped after each of its pieces, and the schedule's next steps are taken there: the source (a real process)
publishes, closes, is killed and started again, and readers begin pulls of their own or crash in the middle.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from gyre_transport import reads
from gyre_transport.backends.shm import ShmChannel
from gyre_transport.backends.tcp import TcpChannel
from gyre_transport.errors import StaleDescriptor, StaleVersion
from gyre_transport.snapshot import Manifest, Snapshot, pull

LONG = 60.0
SCHEDULES = 200
_BLOCKS = 20


class Crash(Exception):
    """A reader ends in the middle of its pull."""


class World:
    """One source and its readers, driven by one random sequence."""

    def __init__(self, start: Callable[..., object]) -> None:
        self._start = start
        self._source = start("owner.py")
        self.version = 0
        self.accepted = self.stale = self.crashed = self.killed = 0
        self.rng = random.Random(0)
        self._depth = 0
        self._known: list[Manifest] = []
        self._snapshots: list[Snapshot] = []

    def begin(self, seed: int) -> None:
        self._snapshots = []
        self.rng = random.Random(seed)
        self._known = self._known[-1:]  # a manifest of an earlier schedule must not be served either
        self.publish()

    def publish(self) -> None:
        self.version += 1
        answer = self._source.ask(
            "publish",
            model="policy",
            version=self.version,
            count=3,
            size=self.rng.choice((1_000, 3_000, 9_000)),
            wait=self.rng.choice((0.0, 0.0, 0.001)),  # the readers that hold a lease stand still meanwhile
            fan_out=8,
        )
        self._known.append(msgspec.msgpack.decode(bytes.fromhex(answer), type=Manifest))

    def kill(self) -> None:
        self._source.close()
        self._source = self._start("owner.py")
        self.killed += 1

    def close(self) -> None:
        """The source ends in order, and another takes its place."""
        self._source.ask("publish", model="policy", version=self.version + 1, count=1, size=10)
        self._source.ask("forget", model="policy")
        self.version += 1

    def pull(self) -> None:
        manifest = self.rng.choice(self._known[-3:])
        self._depth += 1
        try:
            snapshot = pull(
                manifest,
                deadline=LONG,
                verify=self.rng.random() < 0.5,
                share=self._depth == 1,  # a pull inside another would wait for that one's copy
                via=self.rng.choice(("shm", "tcp", "tcp")),
            )
        except (StaleVersion, StaleDescriptor):
            self.stale += 1
        except Crash:
            self.crashed += 1
        else:
            self.accepted += 1
            if self.rng.random() < 0.2:  # it goes on serving its copy
                self._snapshots = [*self._snapshots[-2:], snapshot]
            found = {float(v) for _, _, data in snapshot.values() for v in np.unique(np.frombuffer(data, np.float32))}
            assert found == {float(manifest.version)}, "a mixture was accepted"
        finally:
            self._depth -= 1

    def step(self) -> None:
        """Called after every piece of every pull, and between pulls."""
        chance = self.rng.random()
        if chance < 0.12:
            self.publish()
        elif chance < 0.15:
            self.close()
        elif chance < 0.155:
            self.kill()
        elif chance < 0.22 and self._depth:
            raise Crash
        elif chance < 0.30 and self._depth < 3:
            self.pull()


@pytest.mark.parametrize("block", range(_BLOCKS))
def test_no_reader_ever_accepts_a_mixture(block, script, monkeypatch):
    monkeypatch.setattr(reads, "_CHUNK", 1 << 12)
    monkeypatch.setattr(ShmChannel, "window", 0)
    monkeypatch.setattr(TcpChannel, "window", 1 << 13)
    world = World(script)
    for channel in (ShmChannel, TcpChannel):

        def complete(self, plain=channel.complete) -> None:
            plain(self)
            world.step()

        monkeypatch.setattr(channel, "complete", complete)
    for seed in range(block, SCHEDULES, _BLOCKS):
        world.begin(seed)
        for _ in range(6):
            world.pull()
            with contextlib.suppress(Crash):
                world.step()
    assert world.accepted
    assert world.stale
    assert world.crashed
