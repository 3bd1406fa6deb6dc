"""Batches open, fill, close, are given up and replayed; nothing needs a clock, a socket or a model."""

from __future__ import annotations

import pytest

from gyre_train import protocol as p
from gyre_train.errors import FeedError
from gyre_train.feed.batch import Batch
from gyre_train.feed.config import FeedConfig
from gyre_train.feed.feed import Feed
from gyre_train.feed.packer import PackedStep
from gyre_train.feed.prepare import Fated, PreparedExecution, PreparedGroup
from gyre_traj.intake import Ending, Outcome, Submit

SCORED = Outcome(ending=Ending.SCORED, score=0.5)
FAILED = Outcome(ending=Ending.EVALUATOR_FAILED)


def submit(feed: Feed, group: str, outcomes: tuple[Outcome, ...] = (SCORED, SCORED), now: float = 0.0) -> None:
    for i, outcome in enumerate(outcomes):
        feed.submit(
            Submit(
                execution=f"{group}{i}", task="t", group=group, group_size=len(outcomes), log="unused", outcome=outcome
            ),
            now,
        )


def prepare(feed: Feed) -> None:
    """What the service's worker does, without files: one micro-step a group that admits anybody."""
    while (todo := feed.to_prepare()) is not None:
        number, group = todo
        executions = tuple(
            PreparedExecution(m.execution, Fated.EXCLUDED, reason="evaluator failed")
            if m.outcome.ending is Ending.EVALUATOR_FAILED
            else PreparedExecution(m.execution, Fated.TRAINED, score=m.outcome.score or 0.0, targets=4, versioned=4)
            for m in group.members
        )
        feed.prepared(number, PreparedGroup(group.name, group.size - len(group.members), executions), [])


def fill(feed: Feed) -> None:
    prepare(feed)
    while (todo := feed.to_pack()) is not None:
        batch, group, _ = todo
        admits = any(e.fated is not Fated.EXCLUDED for e in group.executions)
        feed.packed(batch, group, [PackedStep(group.name.encode(), 10, 4)] if admits else [])
        prepare(feed)


def opened(feed: Feed, version: int, now: float = 0.0) -> p.Reply:
    return feed.answer(p.OpenBatch(cell=0, version=version, manifest=b"m%d" % version), now)


def work(feed: Feed, batch: int, cell: int = 0, now: float = 0.0) -> list[bytes]:
    """Claim and complete until the feed has nothing; returns the micro-steps' data."""
    done = []
    while isinstance(step := feed.answer(p.Claim(cell=cell, batch=batch), now), p.MicroStep):
        done.append(step.packed)
        reply = feed.answer(
            p.Complete(
                cell=cell,
                batch=batch,
                micro_step=step.micro_step,
                attempt=step.attempt,
                loss=1.0,
                seconds=0.1,
                metrics={"clipped": 1.0, "targets": 4.0},
            ),
            now,
        )
        assert reply == p.Ok()
    return done


def close(batch: int, version: int) -> p.CloseBatch:
    return p.CloseBatch(cell=0, batch=batch, version=version, loss=0.5, grad_norm=1.5, learning_rate=1e-5, seconds=0.2)


def finish(feed: Feed, request: p.CloseBatch) -> dict[str, object]:
    closing = feed.closing(request, 7.0)
    assert closing is not None
    feed.commit(closing[0], request)
    return closing[1]


def train(feed: Feed, index: int, version: int | None = None) -> dict[str, object]:
    version = index if version is None else version
    assert opened(feed, version) == p.Opened(batch=index, version=version)
    fill(feed)
    work(feed, index)
    assert isinstance(feed.answer(p.Collect(cell=0, batch=index), 0.0), p.Handed)
    feed.answer(p.Collected(cell=0, batch=index, cells=()), 0.0)
    return finish(feed, close(index, version + 1))


@pytest.fixture
def feed() -> Feed:
    return Feed(FeedConfig(lease_s=10.0, group_timeout=100.0), size=2)


def test_a_batch_opens_with_its_first_group_and_grows_while_it_is_trained(feed: Feed) -> None:
    assert isinstance(opened(feed, 0), p.Wait)
    submit(feed, "a")
    assert opened(feed, 0) == p.Opened(batch=0, version=0)
    assert isinstance(feed.answer(p.Claim(cell=0, batch=0), 0.0), p.Wait)
    fill(feed)
    assert work(feed, 0) == [b"a"]
    assert isinstance(feed.answer(p.Claim(cell=0, batch=0), 0.0), p.Wait)
    with pytest.raises(FeedError, match="not every micro-step"):
        feed.closing(close(0, 1), 0.0)
    submit(feed, "b")
    fill(feed)
    assert work(feed, 0) == [b"b"]
    assert isinstance(feed.answer(p.Claim(cell=0, batch=0), 0.0), p.Exhausted)
    assert feed.answer(p.Collect(cell=0, batch=0), 0.0) == p.Handed(cells=(), gradients=(), executions=4, loss=2.0)
    record = finish(feed, close(0, 1))
    assert record["step"] == 1
    assert record["micro_steps"] == {"0": 2}
    assert record["seconds"] == 7.0
    assert record["means"] == {"clipped": 2.0 / 8.0}
    assert [(f.execution, f.step) for f in feed.buffer.fates(0).fates] == [("a0", 1), ("a1", 1), ("b0", 1), ("b1", 1)]
    assert feed.closing(close(0, 1), 9.0) is None  # said again: the reply was lost


def test_batches_follow_the_order_of_completion(feed: Feed) -> None:
    for group in "dcba":
        submit(feed, group)
    assert train(feed, 0)["groups"] == ["d", "c"]
    assert train(feed, 1)["groups"] == ["b", "a"]
    assert isinstance(opened(feed, 2), p.Wait)


def test_a_batch_of_exclusions_closes_without_a_step(feed: Feed) -> None:
    submit(feed, "a", (FAILED, FAILED))
    submit(feed, "b", (FAILED, FAILED))
    assert feed.backlog().waiting == 2  # somebody has to take them through a batch
    assert feed.backlog().batches_ready == 1
    opened(feed, 0)
    fill(feed)
    assert isinstance(feed.answer(p.Claim(cell=0, batch=0), 0.0), p.Exhausted)
    assert feed.answer(p.Collect(cell=0, batch=0), 0.0) == p.Handed(cells=(), gradients=(), executions=0, loss=0.0)
    record = finish(feed, close(0, 0))
    assert (record["executions"], record["excluded"], record["mean_score"]) == (0, 4, None)
    assert record["excluded_reasons"] == {"evaluator failed": 4}
    assert [(f.step, f.reason) for f in feed.buffer.fates(0).fates] == [(None, "evaluator failed")] * 4
    submit(feed, "c")
    submit(feed, "d")
    assert train(feed, 1, version=0)["groups"] == ["c", "d"]


def test_a_satellite_joins_and_hands_over(feed: Feed) -> None:
    submit(feed, "a")
    submit(feed, "b")
    assert isinstance(feed.answer(p.Join(cell=1), 0.0), p.Wait)
    opened(feed, 0)
    fill(feed)
    assert feed.answer(p.Join(cell=1), 0.0) == p.Joined(batch=0, version=0, manifest=b"m0")
    assert work(feed, 0, cell=1) == [b"a", b"b"]
    offer = p.HandOver(cell=1, batch=0, micro_steps=((0, 0), (1, 0)), gradients=b"g")
    assert isinstance(feed.answer(offer, 0.0), p.Wait)
    handed = feed.answer(p.Collect(cell=0, batch=0), 0.0)
    assert handed == p.Handed(cells=(1,), gradients=(b"g",), executions=4, loss=2.0)
    assert feed.answer(p.Collected(cell=0, batch=0, cells=(1,)), 0.0) == p.Ok()
    record = finish(feed, close(0, 1))
    assert record["micro_steps"] == {"1": 2}
    assert feed.answer(offer, 0.0) == p.Taken()  # asked after the batch was closed
    assert feed.answer(p.Claim(cell=1, batch=0), 0.0) == p.Exhausted()


def test_stale_batches_get_nothing(feed: Feed) -> None:
    assert feed.answer(p.Claim(cell=1, batch=9), 0.0) == p.Exhausted()
    assert feed.answer(p.Renew(cell=1, batch=9), 0.0) == p.Ok(kept=False)
    assert feed.answer(p.HandOver(cell=1, batch=9, micro_steps=((0, 0),), gradients=b""), 0.0) == p.Taken(kept=False)
    assert feed.answer(p.HandOver(cell=1, batch=9, micro_steps=(), gradients=b""), 0.0) == p.Taken()
    stale = p.Complete(cell=1, batch=9, micro_step=0, attempt=0, loss=0.0, seconds=0.0)
    assert feed.answer(stale, 0.0) == p.Ok(kept=False)


@pytest.mark.parametrize(
    "request_",
    [
        p.OpenBatch(cell=1, version=0, manifest=b""),
        p.Collect(cell=1, batch=0),
        p.Collect(cell=0, batch=3),
        p.Collected(cell=0, batch=3, cells=()),
    ],
)
def test_only_the_core_and_only_the_open_batch(feed: Feed, request_: p.Request) -> None:
    submit(feed, "a")
    opened(feed, 0)
    with pytest.raises(FeedError):
        feed.answer(request_, 0.0)


def test_a_silent_satellite_loses_its_work(feed: Feed) -> None:
    submit(feed, "a")
    submit(feed, "b")
    opened(feed, 0)
    fill(feed)
    feed.answer(p.Join(cell=1), 0.0)
    assert len(work(feed, 0, cell=1)) == 2
    feed.answer(p.Renew(cell=0, batch=0), 11.0)
    feed.tick(11.0)
    assert work(feed, 0, now=11.0) == [b"a", b"b"]
    assert isinstance(feed.answer(p.Collect(cell=0, batch=0), 11.0), p.Handed)
    assert finish(feed, close(0, 1))["micro_steps_returned"] == 2


def test_a_core_that_restarts_opens_the_same_batch_again(feed: Feed) -> None:
    submit(feed, "a")
    submit(feed, "b")
    opened(feed, 0)
    fill(feed)
    assert len(work(feed, 0)) == 2
    assert feed.answer(p.OpenBatch(cell=0, version=0, manifest=b"new"), 1.0) == p.Opened(batch=0, version=0)
    with pytest.raises(FeedError, match="not every micro-step"):
        feed.closing(close(0, 1), 0.0)
    assert feed.answer(p.Join(cell=1), 1.0) == p.Joined(batch=0, version=0, manifest=b"new")
    assert len(work(feed, 0)) == 2
    record = finish(feed, close(0, 1))
    assert (record["resets"], record["micro_steps"], record["loss"]) == (1, {"0": 2}, 0.5)


def test_a_core_restored_from_an_older_checkpoint_replays_the_same_batches(feed: Feed) -> None:
    for group in "abcdef":
        submit(feed, group)
    first = [train(feed, k)["groups"] for k in range(2)]
    opened(feed, 2)
    fill(feed)
    fates = feed.buffer.fates(0)
    assert opened(feed, 0) == p.Opened(batch=0, version=0)
    assert feed.backlog().batches_closed == 0
    fill(feed)
    work(feed, 0)
    assert finish(feed, close(0, 1))["groups"] == first[0]
    assert train(feed, 1)["groups"] == first[1]
    assert feed.buffer.fates(0) == fates  # every execution ends once
    assert train(feed, 2)["groups"] == ["e", "f"]


def test_a_core_that_died_between_its_step_and_the_close_does_not_train_the_batch_twice(feed: Feed) -> None:
    for group in "abcd":
        submit(feed, group)
    opened(feed, 0)
    fill(feed)
    request = p.OpenBatch(cell=0, version=1, manifest=b"")
    assert feed.implied_close(request) is None
    with pytest.raises(FeedError, match="version 1"):
        feed.answer(request, 0.0)
    work(feed, 0)
    implied = feed.implied_close(request)
    assert implied is not None
    assert finish(feed, implied)["step"] == 1
    assert feed.answer(request, 0.0) == p.Opened(batch=1, version=1)


@pytest.mark.parametrize("version", [0, 2])
def test_a_step_makes_the_next_version(feed: Feed, version: int) -> None:
    submit(feed, "a")
    submit(feed, "b")
    opened(feed, 0)
    fill(feed)
    work(feed, 0)
    with pytest.raises(FeedError, match="makes version 1"):
        feed.closing(close(0, version), 0.0)


def test_an_unknown_version_is_refused(feed: Feed) -> None:
    for group in "abcd":
        submit(feed, group)
    assert opened(feed, 5) == p.Opened(batch=5, version=5)  # a feed that starts with a resumed core
    fill(feed)
    work(feed, 5)
    finish(feed, close(5, 6))
    with pytest.raises(FeedError, match="version 4"):
        opened(feed, 4)
    assert opened(feed, 6) == p.Opened(batch=6, version=6)


def test_a_replay_skips_a_batch_that_made_no_step(feed: Feed) -> None:
    for group in "ab":
        submit(feed, group, (FAILED, FAILED))
    for group in "cd":
        submit(feed, group)
    opened(feed, 0)
    fill(feed)
    finish(feed, close(0, 0))
    assert train(feed, 1, version=0)["groups"] == ["c", "d"]
    assert opened(feed, 0) == p.Opened(batch=1, version=0)


def test_packing_for_a_batch_that_was_given_up_is_ignored(feed: Feed) -> None:
    for group in "abcd":
        submit(feed, group)
    train(feed, 0)
    opened(feed, 1)
    prepare(feed)
    todo = feed.to_pack()
    assert todo is not None
    opened(feed, 0)
    feed.packed(todo[0], todo[1], [PackedStep(b"late", 1, 1)])
    assert isinstance(feed.batch, Batch)
    assert feed.batch.groups == []
    fill(feed)
    assert work(feed, 0) == [b"a", b"b"]


def test_backlog_says_what_is_left(feed: Feed) -> None:
    for group in "abc":
        submit(feed, group, (SCORED, FAILED))
    assert (feed.backlog().waiting, feed.backlog().batches_ready, feed.backlog().micro_steps_left) == (3, 1, 0)
    opened(feed, 0)
    backlog = feed.backlog()
    assert (backlog.open_batch, backlog.waiting, backlog.batches_ready, backlog.micro_steps_left) == (0, 1, 1, 1)
    fill(feed)
    assert feed.backlog().micro_steps_left == 2
    assert feed.backlog().executions_excluded == 3
    assert (feed.backlog().work_left, feed.backlog().work_done) == (3.0, 0.0)  # the third group counts as the others
    work(feed, 0)
    assert (feed.backlog().micro_steps_left, feed.backlog().batches_ready) == (0, 0)
    assert (feed.backlog().work_left, feed.backlog().work_done) == (1.0, 2.0)
    finish(feed, close(0, 1))
    backlog = feed.backlog()
    assert (backlog.work_left, backlog.work_done) == (1.0, 2.0)
    assert (backlog.open_batch, backlog.batches_closed, backlog.executions_trained, backlog.version) == (None, 1, 2, 1)
    stats = feed.answer(p.FeedStatus(), 0.0)
    assert isinstance(stats, p.Stats)
    assert (stats.groups_complete, stats.executions_waiting, stats.batches_closed, stats.version) == (3, 1, 1, 1)


def test_groups_are_prepared_one_batch_ahead(feed: Feed) -> None:
    for group in "abcdefgh":
        submit(feed, group)
    prepare(feed)
    assert sorted(feed._prepared) == [0, 1]
    opened(feed, 0)
    fill(feed)
    assert sorted(feed._prepared) == [2, 3]


def test_a_group_that_lost_members_goes_on_after_its_timeout(feed: Feed) -> None:
    feed.submit(Submit(execution="a0", task="t", group="a", group_size=8, log="", outcome=SCORED), 0.0)
    feed.tick(101.0)
    submit(feed, "b", now=101.0)
    assert train(feed, 0)["missing"] == 7
