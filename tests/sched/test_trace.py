"""Traces: the shipped one, files, call logs, journals."""

import importlib.util

import pytest

from gyre_sched import protocol as p
from gyre_sched.actions import Received
from gyre_sched.config import SchedConfig
from gyre_sched.errors import TraceError
from gyre_sched.journal import Journal
from gyre_sched.policy import Policy
from gyre_sched.simulate.trace import Run, Turn, load_trace, past, turns, write_trace


def test_the_shipped_trace_is_five_hundred_runs():
    runs = load_trace()
    assert len(runs) == 500
    assert sum(len(r.turns) for r in runs) == 20_163
    assert all(t.output >= 0 and t.fresh >= 0 and t.pause >= 0 for r in runs for t in r.turns)
    assert 20_000 < sum(r.tokens for r in runs) / 500 < 30_000
    assert 200 < sum(s for _, s in past(runs)) / 500 < 300


def test_turns_are_what_is_new_and_the_time_between_calls():
    made = turns([0, 10, 30], [100, 160, 40], [50, 20, 5], [4.0, 6.0, 1.0])
    assert made == (
        Turn(100, 50, 6.0),
        Turn(10, 20, 14.0),
        Turn(40, 5, 0.0),  # less than half of the context before: compacted, so all of it is new
    )
    assert turns([0, 10], [100, 148], [50, 20])[1] == Turn(0, 20, 0.0), "two tokens fewer: the template, no compaction"
    assert turns([0, 10], [100, 150], [500, 20])[0].pause == pytest.approx(10 - 500 * 0.012)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_trace_that_was_written_reads_back(tmp_path, name):
    runs = [Run("a", (Turn(10, 20, 1.5), Turn(3, 4, 0.0))), Run("b", (Turn(7, 1, 0.0),))]
    write_trace(tmp_path / name, runs)
    read = load_trace(tmp_path / name)
    assert [(r.task, [(t.fresh, t.output) for t in r.turns]) for r in read] == [
        (r.task, [(t.fresh, t.output) for t in r.turns]) for r in runs
    ]
    assert read[0].turns[0].pause == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "at least one run"),
        (b"hello\n", "line 1 of"),
        (b'{"format":"gyre-trace/9"}\n', "expected the format 'gyre-trace/1', got 'gyre-trace/9'"),
        (b'{"format":"gyre-trace/1"}\n', "at least one run"),
        (b'{"format":"gyre-trace/1"}\n{"at":[0],"prompt":[1,2],"output":[1]}\n', "line 2 of .* as many starts"),
        (b"\x1f\x8bbroken", "cannot read the trace"),
        (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20, "cannot read the trace"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path, content, says):
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        load_trace(file)


def test_a_journal_gives_durations(tmp_path):
    policy = Policy(SchedConfig(cells=1), per_burst=1, steps=1)
    journal = Journal(tmp_path / "journal")
    hello = p.CellHello(cell=0, agent="a", engine="e", engine_url="u", capacity=4)
    none = p.Backlog(
        waiting=0, open_batch=None, micro_steps_left=0, batches_closed=0, executions_trained=0, executions_excluded=0
    )
    for at, request in (
        (0.0, hello),
        (0.0, none),
        (1.0, p.OpenBurst(burst=0, executions=2)),
        (1.0, p.Started(execution="x", task="t")),
        (2.0, p.Started(execution="y")),
        (61.0, p.Terminated(execution="x")),
    ):
        event = Received(at, request)
        journal.append(event, [a for a in policy.step(event) if hasattr(a, "kind")])
    journal.close()
    (only,) = load_trace(tmp_path / "journal")
    assert only.task == "t"
    assert only.seconds() == pytest.approx(60.0, rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("gyre_traj") is None, reason="gyre-traj is not installed")
def test_call_logs_of_gyre_traj_are_traces(tmp_path):
    from gyre_traj import Call, Header, LogWriter, pack_ids

    first = Call(
        call="1", execution="x", prompt=pack_ids([1] * 10), output=pack_ids([2] * 5), started=100.0, ended=103.0
    )
    second = Call(
        call="2", execution="x", parent="1", prefix=15, prompt=pack_ids([3] * 4), output=pack_ids([4] * 6),
        started=110.0, ended=111.0,
    )  # fmt: skip
    with LogWriter(tmp_path / "x.gtraj") as log:
        for record in (Header(execution="x"), first, second):
            log.append(record)
    assert load_trace(tmp_path) == [Run("x", (Turn(10, 5, 7.0), Turn(4, 6, 0.0)))]
