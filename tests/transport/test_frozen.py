"""Memory that is written once."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from gyre_transport import frozen
from gyre_transport.errors import DataError
from gyre_transport.frozen import Draft, attach, is_frozen
from gyre_transport.memory import publish
from gyre_transport.reads import read
from gyre_transport.snapshot import SnapshotSource, pull

LONG = 60.0


def frozen_bytes(data: bytes) -> int:
    with Draft(len(data)) as draft:
        draft.array()[:] = np.frombuffer(data, np.uint8)
        return draft.freeze()


@pytest.mark.parametrize("data", [b"", b"x", b"abc" * 5_000])
def test_what_is_frozen_stays(data):
    fd = frozen_bytes(data)
    try:
        assert is_frozen(fd)
        one, other = attach(fd), attach(fd, writable=False)
        one[:] = bytes(len(data))
        assert bytes(other) == bytes(attach(fd)) == data
        for change in (lambda: os.pwrite(fd, b"!", 0), lambda: os.ftruncate(fd, 1 << 20), lambda: os.ftruncate(fd, 0)):
            if data:
                with pytest.raises(PermissionError):
                    change()
    finally:
        os.close(fd)


def test_the_memory_outlives_its_file_and_its_region():
    with publish(frozen_bytes(b"abc")) as region:
        memory = attach(region.descriptor.location.fd)
        into = bytearray(3)
        read(region.descriptor, into, deadline=LONG)
        assert into == b"abc"
    assert bytes(memory) == b"abc"


def test_not_while_somebody_may_write():
    with Draft(3) as draft:
        array = draft.array()
        with pytest.raises(DataError, match="let go of the arrays"):
            draft.freeze()
        array[:] = 7
        del array
        fd = draft.freeze()
    assert bytes(attach(fd)) == b"\x07\x07\x07"
    os.close(fd)


def test_a_second_mapping_that_may_write_keeps_it_from_being_frozen():
    with Draft(3) as draft:
        draft.array()[:] = 7
        held = mmap.mmap(draft._fd, 3)
        with pytest.raises(DataError, match="cannot be frozen"):
            draft.freeze()
        assert bytes(draft.take()) == b"\x07\x07\x07"
        held.close()


def test_what_was_never_frozen_is_not():
    with Draft(3) as draft:
        assert not is_frozen(draft._fd)
    read_end, write_end = os.pipe()
    assert not is_frozen(read_end)
    os.close(read_end)
    os.close(write_end)


def test_more_memory_than_there_is():
    with pytest.raises(DataError, match="free memory"):
        Draft(1 << 60)


def test_a_copy_that_cannot_be_frozen_is_the_readers_alone(monkeypatch):
    def refuse(self):
        raise DataError("it cannot")

    with SnapshotSource("policy") as source:
        manifest = source.publish(1, {"w": ("U8", (3,), b"abc")})
        with monkeypatch.context() as patch:
            patch.setattr(frozen.Draft, "freeze", refuse)
            snapshot = pull(manifest, deadline=LONG, via="tcp")
        assert bytes(snapshot["w"][2]) == b"abc"
        assert not snapshot.serves
        assert source.copies == 0
        assert source.readers == 0
