"""The other of two hosts: pulls snapshots over verbs, from a source that is well, killed, restarted, and gone.

A module of tests, for the virtual machine alone: GYRE_SOURCE names the source's bus, GYRE_KEYS the file with its keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from source import Ask, Do, Told

from gyre_transport import endpoint, keys
from gyre_transport.backends.verbs.channel import VerbsChannel
from gyre_transport.bus import Client
from gyre_transport.errors import BusError, StaleDescriptor, Unreachable
from gyre_transport.run import TransportConfig
from gyre_transport.snapshot import Manifest, pull

LONG = 400.0  # seconds: an emulated machine's
ADDRESS = os.environ.get("GYRE_SOURCE", "")


@pytest.fixture(autouse=True)
def _patient(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "_config", TransportConfig(rdma_patience=10.0))


def ask(request: Ask | Do, within: float = LONG) -> Told:
    async def call() -> Told:
        mine = keys.load(Path(os.environ["GYRE_KEYS"]))
        async with Client(ADDRESS, Told, keys=mine) as client:
            return await client.call(request, deadline=within)

    return asyncio.run(call())


def published(version: int) -> Told:
    """What the source says once it has that version."""
    end = time.monotonic() + LONG
    while (told := ask(Ask(), end - time.monotonic())).manifest.version != version:
        time.sleep(0.1)
    return told


@pytest.fixture
def pieces(monkeypatch) -> list[int]:
    """Grows by one for every piece that came over verbs."""
    seen, plain = [], VerbsChannel.complete

    def complete(self: VerbsChannel) -> None:
        plain(self)
        seen.append(1)

    monkeypatch.setattr(VerbsChannel, "complete", complete)
    return seen


@contextmanager
def midway(monkeypatch, pieces: list[int], act: Callable[[], None]) -> Iterator[None]:
    """Call `act` when two pieces have come and most of the others have not been asked for."""
    counted = VerbsChannel.complete

    def complete(self: VerbsChannel) -> None:
        counted(self)
        if len(pieces) == 2:
            act()

    with monkeypatch.context() as patch:
        patch.setattr(VerbsChannel, "window", 4 << 20)
        patch.setattr(VerbsChannel, "complete", complete)
        yield


def same(manifest: Manifest, digests: dict[str, str], **options: object) -> None:
    with pull(manifest, deadline=LONG, **options) as snapshot:
        assert {n: hashlib.sha256(data).hexdigest() for n, (_, _, data) in snapshot.items()} == digests


def test_a_snapshot_comes_over_verbs_without_being_told_to(pieces):
    told = published(1)
    same(told.manifest, told.digests)
    assert len(pieces) > 4


def test_into_memory_that_is_there(pieces):
    told = published(1)
    into = np.zeros(told.manifest.nbytes, np.uint8)
    same(told.manifest, told.digests, into=into, via="verbs")
    assert pieces


def test_a_source_killed_in_the_middle_of_the_pull_and_restarted(monkeypatch, pieces):
    told = published(1)

    def die() -> None:
        with pytest.raises(BusError):
            ask(Do("die"), 5.0)

    with midway(monkeypatch, pieces, die), pytest.raises(StaleDescriptor):
        pull(told.manifest, deadline=LONG, via="verbs")
    again = published(2)
    assert again.manifest.descriptor.endpoint == told.manifest.descriptor.endpoint
    with pytest.raises(StaleDescriptor):
        pull(told.manifest, deadline=LONG, via="verbs")
    same(again.manifest, again.digests, via="verbs")


def test_a_source_whose_machine_is_gone_in_the_middle_of_the_pull(monkeypatch, pieces):
    told = published(2)

    def vanish() -> None:
        with pytest.raises(BusError):
            ask(Do("vanish"), 5.0)

    monkeypatch.setattr(endpoint, "_config", TransportConfig(rdma_patience=1.0))
    with midway(monkeypatch, pieces, vanish), pytest.raises(Unreachable):
        pull(told.manifest, deadline=LONG, via="verbs")
