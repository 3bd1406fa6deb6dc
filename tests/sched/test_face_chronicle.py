"""The fold of a journal: what it shows follows from the events alone, and it stays small."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sched.errors import JournalError
from gyre_sched.face import chronicle as c
from gyre_sched.face import follow
from gyre_sched.face.chronicle import Chronicle
from gyre_sched.face.follow import Follower
from gyre_sched.journal import encode, read_journal
from gyre_sched.protocol import Event

RUN = Path(__file__).parents[1] / "fixtures" / "sched" / "run"  # a recorded run of the quickstart


def told(*events):
    story = Chronicle()
    for seq, (at, kind, cell, numbers) in enumerate(events):
        story.take(Event(seq=seq, at=at, kind=kind, cell=cell, numbers=numbers))
    return story


def role(at, cell, before, to):
    return (at, "role", cell, {"from": before, "to": to, "seconds": 0.0, "epoch": 1})


def test_water_and_capacity_follow_the_events():
    story = told(
        (0.0, "scheduler_started", None, {"cells": 2}),
        (1.0, "cell_hello", 0, {"engine": "cell-0", "C_e": 8, "version": 0}),
        role(1.0, 0, "starting", "rollout"),
        (1.5, "cell_hello", 1, {"engine": "cell-1", "C_e": 8, "version": 0}),
        role(1.5, 1, "starting", "rollout"),
        (2.0, "burst_granted", None, {"burst": 0, "executions": 12, "d": 12, "p": 0, "f": 0}),
        (3.0, "started", None, {"execution": "a", "p": 1}),
        (4.0, "terminated", None, {"execution": "a", "f": 1, "w": 11}),
        (5.0, "transfer", 0, {"w": 8, "C_R": 16, "C_e": 8, "d": 12, "p": 12, "f": 4}),
        role(5.0, 0, "rollout", "draining"),
    )
    assert [tuple(getattr(level, f) for f in level.__struct_fields__) for level in story.levels] == [
        (0.0, 0, 0, 0, 0),
        (1.0, 0, 8, 0, 0),
        (1.5, 0, 16, 0, 0),
        (2.0, 12, 16, 12, 0),
        (3.0, 12, 16, 11, 0),
        (4.0, 11, 16, 11, 0),
        (5.0, 8, 8, 0, 0),
    ]
    assert [(m.value, m.water, m.capacity) for m in story.transfers] == [(0, 8, 16)]
    assert [(s.role, s.began, s.ended) for s in story.cells[0].spans] == [
        ("starting", 0.0, 1.0),
        ("rollout", 1.0, 5.0),
        ("draining", 5.0, None),
    ]
    assert story.seconds == {0: {"starting": 1.0, "rollout": 4.0}, 1: {"starting": 1.5}}


def test_failures_are_counted_and_told_in_red():
    story = told(
        (0.0, "engine_failed", 1, {"role": "rollout", "detail": "exit code -9"}),
        (1.0, "lease_expired", 1, {"silent": 31.0}),
        (2.0, "engine_failed", 1, {"role": "failed", "detail": "exit code 1"}),
        (3.0, "entered", 0, {"seconds": 1.25}),
    )
    assert story.failures == {"engine_failed": 2, "lease_expired": 1}
    assert [(n.kind, n.failure) for n in story.notes] == [
        ("engine_failed", True),
        ("lease_expired", True),
        ("engine_failed", True),
        ("entered", False),
    ]
    assert story.notes[0].text == "role: rollout; detail: exit code -9"


def test_an_event_of_a_later_version_is_told_not_lost():
    story = told((0.0, "teleported", 3, {"to": "mars"}))
    assert story.kinds == {"teleported": 1}
    assert story.notes[0].text == "to: mars"


@given(st.lists(st.tuples(st.floats(0.001, 100), st.integers(0, 50)), min_size=1, max_size=60))
def test_thinning_keeps_the_end_and_the_order(steps):
    limit, c.POINTS = c.POINTS, 16
    try:
        story, at = Chronicle(), 0.0
        for seq, (after, water) in enumerate(steps):
            at += after
            story.take(Event(seq=seq, at=at, kind="terminated", numbers={"d": 50, "f": 50 - water}))
        assert len(story.levels) <= 16
        assert story.levels[-1].water == story.water == steps[-1][1]
        assert [level.at for level in story.levels] == sorted({level.at for level in story.levels})
    finally:
        c.POINTS = limit


def test_a_long_run_stays_small(monkeypatch):
    monkeypatch.setattr(c, "SPANS", 10)
    story = Chronicle()
    roles = ["rollout", "draining", "entering", "training", "leaving", "refreshing"]
    for i in range(6_000):
        numbers = {"from": roles[i % 6], "to": roles[(i + 1) % 6]}
        story.take(Event(seq=i, at=float(i), kind="role", cell=0, numbers=numbers))
    cell = story.cells[0]
    assert (len(cell.spans), cell.dropped) == (10, 5_991)
    assert sum(story.seconds[0].values()) == 5_999  # nothing of the whole is lost with the detail
    assert len(story.levels) <= c.POINTS


def test_a_recorded_run_is_shown_as_it_was():
    p = Follower(RUN).look()
    assert (p.name, p.ended, p.steps_total, len(p.steps)) == ("quickstart", True, 6, 6)
    assert (p.dispatched, p.started, p.terminated, p.water) == (192, 192, 192, 0)
    assert (p.version, p.burst, p.moved) == (6, 2, 32)
    assert [(m.value, m.water) for m in p.transfers] == [(0, 22), (1, 0), (0, 28), (1, 0), (0, 27), (1, 0)]
    assert all(m.water <= m.capacity - 32 for m in p.transfers)
    assert p.proxy["calls"] == 716
    whole = read_journal(RUN / "sched" / "journal").events
    assert p.seq == whole[-1].seq
    assert p.at == whole[-1].at


@pytest.fixture
def growing(tmp_path):
    (tmp_path / "sched").mkdir()
    (tmp_path / "config.toml").write_text(f'[run]\ndir = "{tmp_path}"\n')
    return tmp_path


def test_a_journal_is_followed_as_it_grows(growing):
    lines = (RUN / "sched" / "journal").read_bytes().splitlines(keepends=True)
    follower = Follower(growing)
    assert follower.look().seq == -1  # not even begun
    for n in range(0, len(lines), 7):
        with (growing / "sched" / "journal").open("ab") as f:
            f.write(b"".join(lines[n : n + 7]))
        follower.look()
    live, whole = follower.look(), Follower(RUN).look()
    for field in ("levels", "cells", "notes", "seconds", "failures", "transfers"):
        assert getattr(live, field) == getattr(whole, field)


def test_a_line_half_written_is_read_when_it_is_whole(growing):
    line = encode(Event(seq=0, at=1.0, kind="published", numbers={"version": 3}))
    follower = Follower(growing)
    (growing / "sched" / "journal").write_bytes(line[:20])
    assert (follower.look().version, follower.look().damage) == (0, "")
    (growing / "sched" / "journal").write_bytes(line)
    assert follower.look().version == 3


def test_a_torn_tail_that_the_next_writer_cuts(growing):
    journal = growing / "sched" / "journal"
    first = encode(Event(seq=0, at=1.0, kind="published", numbers={"version": 1}))
    second = encode(Event(seq=1, at=2.0, kind="published", numbers={"version": 2}))
    follower = Follower(growing)
    journal.write_bytes(first + b'{"crc": 1, "eve\n')
    assert "byte" in follower.look().damage
    journal.write_bytes(first + second)
    p = follower.look()
    assert (p.version, p.damage) == (2, "")


def test_another_journal_in_its_place_begins_anew(growing):
    journal = growing / "sched" / "journal"
    journal.write_bytes(encode(Event(seq=0, at=1.0, kind="published", numbers={"version": 9})))
    follower = Follower(growing)
    assert follower.look().version == 9
    other = growing / "other"
    other.write_bytes(encode(Event(seq=0, at=5.0, kind="published", numbers={"version": 1})))
    other.rename(journal)
    p = follower.look()
    assert (p.version, p.began) == (1, 5.0)


def test_pieces_smaller_than_a_journal(monkeypatch):
    whole = Follower(RUN).look()
    monkeypatch.setattr(follow, "_CHUNK", 700)
    assert Follower(RUN).look() == whole


def test_a_step_that_was_trained_again_counts_once(growing):
    (growing / "metrics").mkdir()
    steps = growing / "metrics" / "steps.jsonl"
    steps.write_text('{"step":1,"mean_score":0.1}\n{"step":2,"mean_score":0.2}\n{"step":2,"mean_score":0.3}\n{"st')
    assert [(s["step"], s["mean_score"]) for s in Follower(growing).look().steps] == [(1, 0.1), (2, 0.3)]


def test_what_is_no_run_directory(tmp_path):
    with pytest.raises(JournalError, match=r"config\.toml"):
        Follower(tmp_path)
