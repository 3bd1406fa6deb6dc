"""Groups complete by arrival; every execution ends once."""

from __future__ import annotations

import math

import msgspec
import pytest

from gyre_train.errors import FeedError
from gyre_train.feed.buffer import Buffer
from gyre_traj.intake import Ending, Fate, Outcome, Submit


def submission(execution: str, group: str = "g", size: int = 2, outcome: Outcome | None = None) -> Submit:
    return Submit(
        execution=execution,
        task="t",
        group=group,
        group_size=size,
        log=f"{execution}.gtraj",
        outcome=outcome or Outcome(ending=Ending.SCORED, score=0.5),
    )


def names(buffer: Buffer) -> list[str]:
    return [g.name for g in buffer.complete]


def test_groups_complete_in_order_of_their_last_member() -> None:
    buffer = Buffer()
    for execution, group in (("a0", "a"), ("b0", "b"), ("b1", "b"), ("a1", "a")):
        assert not buffer.submit(submission(execution, group), 0.0).duplicate
    assert names(buffer) == ["b", "a"]


def test_a_repeated_submission_changes_nothing() -> None:
    buffer = Buffer()
    buffer.submit(submission("a0"), 0.0)
    assert buffer.submit(submission("a0"), 1.0).duplicate
    assert buffer.complete == []
    buffer.submit(submission("a1"), 2.0)
    assert names(buffer) == ["g"]
    assert buffer.submit(submission("a1"), 3.0).duplicate
    assert [m.execution for m in buffer.complete[0].members] == ["a0", "a1"]


@pytest.mark.parametrize("ending", [Ending.EVALUATOR_FAILED, Ending.ABORTED, Ending.NOTHING_TO_SCORE])
def test_a_member_without_a_score_still_completes_its_group(ending: Ending) -> None:
    buffer = Buffer()
    buffer.submit(submission("a0"), 0.0)
    buffer.submit(submission("a1", outcome=Outcome(ending=ending)), 0.0)
    assert names(buffer) == ["g"]


def test_a_group_goes_on_without_members_that_never_come() -> None:
    buffer = Buffer(group_timeout=5.0)
    buffer.submit(submission("a0", size=128), 0.0)
    assert buffer.expire(5.0) == ()
    assert [g.name for g in buffer.expire(5.1)] == ["g"]
    assert buffer.expire(9.0) == ()
    assert not buffer.submit(submission("a1", size=128), 9.0).duplicate
    (fate,) = buffer.fates(0).fates
    assert fate.execution == "a1"
    assert "after its group" in fate.reason
    assert len(buffer.complete[0].members) == 1


def test_without_a_timeout_a_group_waits() -> None:
    buffer = Buffer()
    buffer.submit(submission("a0"), 0.0)
    assert buffer.expire(1e9) == ()


def test_fates_are_told_once_and_in_order() -> None:
    buffer = Buffer()
    buffer.exclude("a", "aborted")
    buffer.train("b", 1)
    buffer.train("b", 1)  # the batch was replayed
    buffer.exclude("b", "never")
    assert buffer.fates(0).fates == (Fate(execution="a", reason="aborted"), Fate(execution="b", step=1))
    assert buffer.fates(1).fates == (Fate(execution="b", step=1),)
    assert buffer.fates(2).fates == ()
    assert buffer.fates(0).total == 2
    assert (buffer.trained, buffer.excluded) == (1, 1)
    with pytest.raises(FeedError, match="-1"):
        buffer.fates(-1)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (submission("a", outcome=Outcome(ending=Ending.SCORED)), "got None"),
        (submission("a", outcome=Outcome(ending=Ending.EVALUATOR_FAILED, score=0.0)), "got 0.0"),
        (submission("a", outcome=Outcome(ending=Ending.SCORED, score=1.5)), "1.5"),
        (submission("a", outcome=Outcome(ending=Ending.SCORED, score=math.nan)), "nan"),
        (submission("a", size=0), "group_size 0"),
        (submission(""), "empty"),
    ],
)
def test_a_submission_that_contradicts_itself_is_refused_whole(message: Submit, said: str) -> None:
    buffer = Buffer()
    with pytest.raises(FeedError, match=said):
        buffer.submit(message, 0.0)
    assert not buffer.submit(submission("a"), 0.0).duplicate  # nothing of it was kept


def test_a_groups_size_may_not_change() -> None:
    buffer = Buffer()
    buffer.submit(submission("a0", size=2), 0.0)
    with pytest.raises(FeedError, match="'g' has 3 members, an earlier one said 2"):
        buffer.submit(submission("a1", size=3), 0.0)


def test_groups_held_are_bounded() -> None:
    buffer = Buffer(max_groups=1)
    buffer.submit(submission("a0", "a"), 0.0)
    with pytest.raises(FeedError, match="max_groups"):
        buffer.submit(submission("b0", "b"), 0.0)
    buffer.submit(submission("a1", "a"), 0.0)
    buffer.retire(1)
    assert not buffer.submit(submission("b0", "b"), 0.0).duplicate


def replaced(execution: str, by: str, ending: Ending = Ending.ABORTED) -> Submit:
    return msgspec.structs.replace(submission(execution, outcome=Outcome(ending=ending, detail="why")), replaced_by=by)


@pytest.mark.parametrize("ending", [Ending.EVALUATOR_FAILED, Ending.ABORTED])
def test_a_replaced_execution_is_excluded_and_its_group_waits_for_the_other(ending: Ending) -> None:
    buffer = Buffer()
    buffer.submit(replaced("a0", "a0-r1", ending), 0.0)
    buffer.submit(submission("a1"), 0.0)
    assert buffer.submit(replaced("a0", "a0-r1", ending), 0.0).duplicate
    assert names(buffer) == []
    buffer.submit(replaced("a0-r1", "a0-r2", ending), 0.0)
    assert names(buffer) == []
    buffer.submit(submission("a0-r2"), 0.0)
    assert [m.execution for m in buffer.complete[0].members] == ["a1", "a0-r2"]
    assert [f.execution for f in buffer.fates(0).fates] == ["a0", "a0-r1"]
    assert buffer.fates(0).fates[0].reason == f"replaced by 'a0-r1': {ending.value.replace('_', ' ')}: why"
    assert buffer.excluded == 2


def test_replaced_executions_make_no_group_by_themselves() -> None:
    """Nothing would be in it when it is closed for want of its members."""
    buffer = Buffer(group_timeout=5.0, max_groups=1)
    buffer.submit(replaced("a0", "a0-r1"), 0.0)
    assert buffer.expire(100.0) == ()
    buffer.submit(submission("b0", "b"), 0.0)
    with pytest.raises(FeedError, match="again later"):
        buffer.submit(submission("a0-r1"), 0.0)


@pytest.mark.parametrize("outcome", [Outcome(ending=Ending.SCORED, score=1.0), Outcome(ending=Ending.NOTHING_TO_SCORE)])
def test_what_a_batch_may_take_is_not_replaced(outcome: Outcome) -> None:
    buffer = Buffer()
    with pytest.raises(FeedError, match="only one that no batch may take"):
        buffer.submit(msgspec.structs.replace(submission("a0", outcome=outcome), replaced_by="a0-r1"), 0.0)
    assert not buffer.submit(submission("a0", outcome=outcome), 0.0).duplicate
