"""From call logs to rows: who is in E, with which advantage, weight and cost."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_train.feed.buffer import Group
from gyre_train.feed.config import FeedConfig
from gyre_train.feed.packer import Packer
from gyre_train.feed.prepare import Fated, PreparedExecution, prepare_group
from gyre_traj.intake import Ending, Outcome, Submit
from gyre_traj.log import LogWriter
from gyre_traj.packed import Packed
from gyre_traj.records import Call, Delivered, Header, Span, pack_ids, pack_logprobs
from gyre_traj.rows import Row

SYSTEM, ASK = [1, 2, 3, 4], [5, 6]
OUTPUT = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def scored(score: float) -> Outcome:
    return Outcome(ending=Ending.SCORED, score=score)


def write(path: Path, execution: str, outputs: list[list[int]], *, logprobs: bool = True, version: int = 0) -> str:
    """A log of sibling calls: one prompt of 6 tokens, answered once for each of `outputs`."""
    with LogWriter(path / f"{execution}.gtraj") as log:
        log.append(Header(execution=execution))
        for i, output in enumerate(outputs):
            log.append(
                Call(
                    call=f"c{i}",
                    execution=execution,
                    prompt=pack_ids(SYSTEM + ASK),
                    output=pack_ids(output),
                    logprobs=pack_logprobs([-0.5] * len(output)) if logprobs else b"",
                    versions=(Span(version, 0, len(output)),),
                    started=float(i),
                )
            )
            log.append(Delivered(call=f"c{i}"))
    return str(path / f"{execution}.gtraj")


def group(path: Path, members: dict[str, tuple[Outcome, list[list[int]]]], size: int | None = None) -> Group:
    out = Group("g", "t", size or len(members), 0.0)
    for execution, (outcome, outputs) in members.items():
        log = write(path, execution, outputs) if outputs else str(path / "missing.gtraj")
        out.members.append(
            Submit(execution=execution, task="t", group="g", group_size=out.size, log=log, outcome=outcome)
        )
    return out


def by_id(executions: tuple[PreparedExecution, ...]) -> dict[str, PreparedExecution]:
    return {e.execution: e for e in executions}


def test_exclusions_leave_the_baseline_and_placeholders_stay_in_it(tmp_path: Path) -> None:
    members = {
        "d": (Outcome(ending=Ending.ABORTED, detail="no disk"), [[9]]),
        "a": (scored(1.0), [[10, 11]]),
        "b": (scored(0.5), [[12, 13, 14]]),
        "c": (Outcome(ending=Ending.NOTHING_TO_SCORE), []),
        "e": (Outcome(ending=Ending.EVALUATOR_FAILED), [[9]]),
    }
    g = group(tmp_path, members)
    prepared, rows = prepare_group(g, FeedConfig(advantage="mean"), seed=0)
    assert [(e.execution, e.fated) for e in prepared.executions] == [
        ("a", Fated.TRAINED),
        ("b", Fated.TRAINED),
        ("c", Fated.PLACEHOLDER),
        ("d", Fated.EXCLUDED),
        ("e", Fated.EXCLUDED),
    ]
    assert [e.advantage for e in prepared.executions[:3]] == [0.5, 0.0, -0.5]  # mean of 1, 0.5 and the placeholder's 0
    assert "no disk" in prepared.executions[3].reason
    assert {r.execution for r in rows} == {"a"}  # b's advantage is exactly 0: it counts, but is not computed
    _, all_rows = prepare_group(g, FeedConfig(skip_zero_advantage=False), seed=0)
    assert {r.execution for r in all_rows} == {"a", "b"}


def test_one_or_three_trajectories_weigh_the_same(tmp_path: Path) -> None:
    members = {
        "a": (scored(1.0), [[10, 11, 12, 13]]),
        "b": (scored(0.0), [[20, 21], [30, 31, 32], [40]]),
    }
    _, rows = prepare_group(group(tmp_path, members), FeedConfig(), seed=0)
    total = {e: sum(r.weight * r.target.sum() for r in rows if r.execution == e) for e in members}
    assert total == pytest.approx({"a": 1.0, "b": 1.0})
    assert {r.execution: r.advantage for r in rows} == pytest.approx({"a": 0.5**0.5, "b": -(0.5**0.5)}, abs=1e-5)


def test_j_max_and_what_it_leaves_out(tmp_path: Path) -> None:
    members = {"a": (scored(1.0), [[10, 11], [20, 21], [30, 31]]), "b": (scored(0.0), [[10]])}
    prepared, _ = prepare_group(group(tmp_path, members), FeedConfig(j_max=2), seed=0)
    a = prepared.executions[0]
    assert (a.trajectories, a.targets, a.left_out) == (2, 4, {"main": 2})
    assert (a.tokens_total, a.tokens_unique) == (16, 10)


def test_staleness_is_counted_over_targets(tmp_path: Path) -> None:
    members = {"a": (scored(1.0), [[10, 11]]), "b": (scored(0.0), [[10]])}
    g = group(tmp_path, members)
    (tmp_path / "a.gtraj").unlink()
    write(tmp_path, "a", [[10, 11]], version=3)
    a = prepare_group(g, FeedConfig(), seed=0)[0].executions[0]
    assert (a.version_sum, a.versioned) == (6.0, 2)


@pytest.mark.parametrize("fault", ["missing", "torn header", "garbage", "another's", "no calls", "no logprobs"])
def test_a_log_that_cannot_be_used_costs_its_execution_only(tmp_path: Path, fault: str) -> None:
    g = group(tmp_path, {"a": (scored(1.0), [[10]]), "b": (scored(0.5), [[11]]), "c": (scored(0.0), [[12]])})
    path = tmp_path / "a.gtraj"
    content = path.read_bytes()
    path.unlink()
    if fault == "torn header":
        path.write_bytes(content[:10])
    elif fault == "garbage":
        path.write_bytes(b"not a log at all")
    elif fault == "another's":
        path.write_bytes((tmp_path / "b.gtraj").read_bytes())
    elif fault == "no calls":
        write(tmp_path, "a", [])
    elif fault == "no logprobs":
        write(tmp_path, "a", [[10]], logprobs=False)
    prepared, rows = prepare_group(g, FeedConfig(advantage="mean"), seed=0)
    executions = by_id(prepared.executions)
    assert executions["a"].fated is Fated.EXCLUDED
    assert "call log cannot be used" in executions["a"].reason
    assert (executions["b"].advantage, executions["c"].advantage) == (0.25, -0.25)
    assert {r.execution for r in rows} == {"b", "c"}


def test_members_that_never_came_are_counted(tmp_path: Path) -> None:
    prepared, _ = prepare_group(group(tmp_path, {"a": (scored(1.0), [[10]])}, size=3), FeedConfig(), seed=0)
    assert prepared.missing == 2


def test_the_same_group_gives_the_same_rows_in_any_order_of_arrival(tmp_path: Path) -> None:
    members = {f"e{i}": (scored(i / 4), [[10 + i, 11], [20, i], [30, 31], [40, i]]) for i in range(5)}
    g = group(tmp_path, members)
    first = prepare_group(g, FeedConfig(j_max=2), seed=7)
    g.members.reverse()
    again = prepare_group(g, FeedConfig(j_max=2), seed=7)
    assert first[0] == again[0]
    assert [r.ids.tolist() for r in first[1]] == [r.ids.tolist() for r in again[1]]


def row(n: int, execution: str = "e") -> Row:
    target = np.ones(n, dtype=np.bool_)
    target[0] = False
    return Row(execution, 0, np.arange(n, dtype=np.uint32), target, np.zeros(n, dtype=np.float32), 1.0 / n, 1.0)


def test_less_than_a_budget_waits_and_what_fits_leaves_together() -> None:
    packer = Packer(100)
    assert packer.push([row(40)], last=False) == []
    assert packer.push([row(40)], last=False) == []
    assert packer.pending == 80
    (full,) = packer.push([row(40)], last=False)
    assert (full.tokens, packer.pending) == (80, 40)
    (rest,) = packer.push([row(10)], last=True)
    assert (rest.tokens, rest.targets) == (50, 48)
    assert packer.pending == 0
    assert packer.push([], last=True) == []


def test_a_trajectory_over_the_budget_is_packed_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    (alone,) = Packer(100).push([row(130)], last=False)
    assert alone.tokens == 130
    assert "a micro-step has 130 tokens: one trajectory of 'e' is longer than feed.tokens = 100" in caplog.text


def test_trajectories_are_numbered_through_the_batch() -> None:
    packer = Packer(10)
    due = [s for last in (False, True) for s in packer.push([row(10), row(10)], last=last)]
    numbers = [set(msgspec.msgpack.decode(s.data, type=Packed).arrays().trajectory.tolist()) for s in due]
    assert sorted(n for s in numbers for n in s) == [0, 1, 2, 3]


def test_forests_compute_a_shared_prefix_once(tmp_path: Path) -> None:
    members = {"a": (scored(1.0), [[10], [20], [30]]), "b": (scored(0.0), [[40]])}
    prepared, rows = prepare_group(group(tmp_path, members), FeedConfig(), seed=0)
    tokens = {
        layout: sum(s.tokens for s in Packer(1000, layout).push(rows, last=True))  # type: ignore[arg-type]
        for layout in ("rows", "forests")
    }
    assert tokens["rows"] == sum(e.tokens_total for e in prepared.executions)
    alone = sum(e.tokens_unique for e in prepared.executions)
    assert tokens["forests"] < alone  # the group's prompt is computed once for both executions


@given(
    executions=st.lists(
        st.tuples(
            st.floats(0, 1), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5)
        ),
        min_size=2,
        max_size=5,
    ),
    budget=st.integers(8, 64),
    j_max=st.integers(1, 4),
    layout=st.sampled_from(["rows", "forests"]),
    counting=st.sampled_from(["once", "per_trajectory"]),
)
@settings(max_examples=60, deadline=None)
def test_equal_executions_however_the_batch_is_cut(
    executions: list[tuple[float, list[list[int]]]],
    budget: int,
    j_max: int,
    layout: Literal["rows", "forests"],
    counting: Literal["once", "per_trajectory"],
) -> None:
    config = FeedConfig(j_max=j_max, counting=counting, skip_zero_advantage=False)
    with tempfile.TemporaryDirectory() as folder:
        members = {f"e{i}": (scored(score), outputs) for i, (score, outputs) in enumerate(executions)}
        prepared, rows = prepare_group(group(Path(folder), members), config, seed=0)
    packer = Packer(budget, layout)
    steps = [s for i, r in enumerate(rows) for s in packer.push([r], last=i == len(rows) - 1)]
    weight: Counter[str] = Counter()
    advantages: dict[str, set[float]] = {}
    for step in steps:
        packed = msgspec.msgpack.decode(step.data, type=Packed)
        arrays = packed.arrays()
        assert (step.tokens, step.targets) == (len(arrays.ids), len(arrays.target))
        for index, w, a in zip(arrays.execution, arrays.weight, arrays.advantage, strict=True):
            weight[packed.executions[index]] += w
            advantages.setdefault(packed.executions[index], set()).add(float(a))
    assert weight == pytest.approx(dict.fromkeys(members, 1.0), abs=1e-5)
    assert advantages == {e.execution: {float(np.float32(e.advantage))} for e in prepared.executions}
    assert sum(s.targets for s in steps) == sum(e.targets for e in prepared.executions)
