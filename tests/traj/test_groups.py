"""Outcomes, admission, advantages and weights of a group, against closed forms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gyre_traj import Aggregation, Counting, Ending, Outcome, admit, group_advantages, select, target_weights, weigh
from gyre_traj.errors import BadChoice, BadOutcome

ORACLE = json.loads((Path(__file__).parents[1] / "fixtures" / "losses.json").read_text())


def scored(score: float) -> Outcome:
    return Outcome(ending=Ending.SCORED, score=score)


# --- advantages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: f"seed{case['seed']}")
@pytest.mark.parametrize(("std", "key"), [(True, "grpo_advantage"), (False, "grpo_advantage_mean_only")])
def test_advantages_agree_with_verl(case, std: bool, key: str) -> None:
    group, reward = np.array(case["group"]), np.array(case["reward"], dtype=float)
    got = np.concatenate([group_advantages(reward[group == g], std=std) for g in (0, 1)])
    assert got == pytest.approx(case[key], abs=1e-6)


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1 / 3] * 7, [0.0, 0.0], [0.4], []])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(rewards: list[float], std: bool) -> None:
    assert group_advantages(rewards, std=std).tolist() == [0.0] * len(rewards)


def test_advantages_come_from_executions_not_rows() -> None:
    """A: reward 1, three rows; B: reward 0, one row."""
    published = ORACLE["two_level_published"][1]
    advantage = dict(zip("AB", group_advantages([published["reward"][e] for e in "AB"], std=False), strict=True))
    assert [advantage[e] for e in published["rows"]] == published["mean_only_advantage"] == [0.5, 0.5, 0.5, -0.5]


def test_rewards_must_be_finite() -> None:
    with pytest.raises(BadOutcome, match="finite"):
        group_advantages([0.0, float("nan")], std=False)


# --- admission ----------------------------------------------------------------------------------------------------


def test_who_is_in_the_batch_and_who_in_the_baseline() -> None:
    admission = admit(
        {
            "good": scored(0.75),
            "bad": scored(0.0),
            "nothing": Outcome(ending=Ending.NOTHING_TO_SCORE),
            "broken": Outcome(ending=Ending.EVALUATOR_FAILED, detail="exit status 3"),
            "stopped": Outcome(ending=Ending.ABORTED),
        }
    )
    assert admission.rewards == {"good": 0.75, "bad": 0.0, "nothing": 0.0}
    assert admission.placeholders == ("nothing",)
    assert admission.excluded == {"broken": "evaluator failed: exit status 3", "stopped": "aborted"}
    assert group_advantages(list(admission.rewards.values()), std=False).tolist() == [0.5, -0.25, -0.25]


def test_an_evaluator_failure_is_not_a_zero() -> None:
    failed = Outcome(ending=Ending.EVALUATOR_FAILED)
    with_failure = admit({"a": scored(1.0), "b": failed, "c": scored(0.5)})
    assert group_advantages(list(with_failure.rewards.values()), std=False).tolist() == [0.25, -0.25]


def test_too_old_executions_are_excluded_with_their_age() -> None:
    admission = admit(
        {"old": scored(1.0), "new": scored(0.0), "none": Outcome(ending=Ending.NOTHING_TO_SCORE)},
        oldest={"old": 1, "new": 2},
        version=4,
        max_staleness=2,
    )
    assert list(admission.rewards) == ["new", "none"]
    assert admission.excluded == {"old": "too old: sampled 3 versions ago, allowed 2"}


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(ending=Ending.SCORED),
        scored(1.5),
        scored(-0.1),
        scored(float("nan")),
        Outcome(ending=Ending.EVALUATOR_FAILED, score=0.0),
    ],
)
def test_contradictory_outcomes_are_refused(outcome: Outcome) -> None:
    with pytest.raises(BadOutcome, match="score"):
        admit({"fine": scored(1.0), "e": outcome})


# --- weights ------------------------------------------------------------------------------------------------------


def batch_loss(executions: dict[str, list[int]], aggregation: str, norm: float = 1.0) -> float:
    """The batch's loss when every token's loss is 1, from rows of so many targets."""
    total, units = 0.0, 0.0
    for counts in executions.values():
        weights, unit = target_weights(counts, aggregation, norm)
        total += float((weights * counts).sum())
        units += unit
    return total / units


def test_published_case_of_unequal_rows() -> None:
    published = ORACLE["two_level_published"][0]
    executions: dict[str, list[int]] = {}
    for execution, size in published["rows"]:
        executions.setdefault(execution, []).append(size)
    assert executions == {"A": [50, 100], "B": [30, 30, 30], "C": [40]}
    assert batch_loss(executions, "two-level") == pytest.approx(published["loss"], abs=1e-12)


def test_one_row_against_three_weighs_one_to_one() -> None:
    """Executions weigh the same, however many rows each has."""
    sums = [float((target_weights(counts)[0] * counts).sum()) for counts in ([90], [10, 20, 60])]
    assert sums == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("aggregation", "weights", "units"),
    [
        ("two-level", [1 / 8, 1 / 8, 0], 1),
        ("token-mean", [1, 1, 0], 8),
        ("seq-mean-token-mean", [1 / 2, 1 / 6, 0], 2),
        ("seq-mean-token-sum", [1, 1, 0], 2),
        ("seq-mean-token-sum-norm", [1 / 100, 1 / 100, 0], 2),
    ],
)
def test_the_table_of_aggregations(aggregation: str, weights: list[float], units: float) -> None:
    got, got_units = target_weights([2, 6, 0], aggregation, norm=100)
    assert (got.tolist(), got_units) == (weights, units)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_placeholder_counts_as_an_execution_only(aggregation: Aggregation) -> None:
    weights, units = target_weights([], aggregation)
    assert (len(weights), units) == (0, 1.0 if aggregation is Aggregation.TWO_LEVEL else 0.0)


@pytest.mark.parametrize("counting", list(Counting))
def test_both_ways_of_counting_a_shared_token(story, counting: Counting) -> None:
    story.call("a", "sys task", "one two")
    story.call("b", "left", "l", parent="a")
    story.call("c", "right", "r", parent="a")
    weighted = weigh(select(story.tree(), None, 0), advantage=0.5, counting=counting, first_trajectory=10)
    targets = [int(row.target.sum()) for row in weighted.rows]
    assert targets == ([3, 1] if counting is Counting.EXECUTION else [3, 3])
    assert sum(row.weight * n for row, n in zip(weighted.rows, targets, strict=True)) == pytest.approx(1.0)
    assert [row.trajectory for row in weighted.rows] == [10, 11]
    assert {row.advantage for row in weighted.rows} == {0.5}
    assert weighted.units == 1.0


def test_unknown_names_are_refused_with_the_choices(story) -> None:
    story.call("a", "sys task", "one")
    selection = select(story.tree(), None, 0)
    with pytest.raises(BadChoice, match="two-level"):
        weigh(selection, advantage=0.0, aggregation="mean")
    with pytest.raises(BadChoice, match="per_trajectory"):
        weigh(selection, advantage=0.0, counting="twice")
    for norm in (0, float("nan"), float("inf")):
        with pytest.raises(BadChoice, match="positive norm"):
            target_weights([1], "seq-mean-token-sum-norm", norm=norm)
