"""The feed as its peers see it: real sockets, real call logs, scripted trainers, runner and scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre_sched import protocol as sched
from gyre_train import protocol as p
from gyre_train.feed import service as service_module
from gyre_train.feed.service import FeedService
from gyre_traj import intake
from gyre_traj.intake import Accepted, Ending, Outcome, Submit
from gyre_traj.log import LogWriter
from gyre_traj.packing import Packed
from gyre_traj.records import Call, Delivered, Header, Span, pack_ids, pack_logprobs
from gyre_transport.bus import Client, Server
from gyre_transport.errors import RemoteError
from gyre_transport.process import Child
from gyre_transport.run import Context

DEADLINE = 60.0  # seconds until a test gives up
FAILED = Outcome(ending=Ending.EVALUATOR_FAILED, detail="timed out")
EMPTY = Outcome(ending=Ending.NOTHING_TO_SCORE)


def scored(score: float) -> Outcome:
    return Outcome(ending=Ending.SCORED, score=score)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    with tempfile.TemporaryDirectory(prefix="feed") as sockets:
        (tmp_path / "calls").mkdir()
        (tmp_path / "config.toml").write_text(
            f"""
            [run]
            dir = "{tmp_path}"
            [batch]
            groups = 2
            group_size = 4
            [bus]
            dir = "{sockets}"
            [feed]
            layout = "rows"
            tokens = 30
            j_max = 3
            lease_s = 30.0
            """
        )
        yield Context(tmp_path / "config.toml")


class Peers:
    """A runner and trainers on the feed's bus."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.trainer = Client(context.bus.address("feed"), p.Reply)
        self.runner = Client(context.bus.address("feed.intake"), intake.Reply)

    async def ask(self, request: p.Request) -> Any:
        return await self.trainer.call(request, deadline=DEADLINE)

    async def until(self, request: p.Request, *kinds: type[Any]) -> Any:
        """Ask again while the feed says wait, as trainers do."""
        async with asyncio.timeout(DEADLINE):
            while not isinstance(reply := await self.ask(request), kinds):
                assert isinstance(reply, p.Wait), reply
                await asyncio.sleep(min(reply.retry, 0.02))
        return reply

    async def submit(self, group: str, outcomes: list[Outcome], size: int | None = None) -> list[Accepted]:
        return [
            await self.runner.call(
                Submit(
                    execution=f"{group}-{i}",
                    task=group,
                    group=group,
                    group_size=size or len(outcomes),
                    log=str(self.context.dir.log(f"{group}-{i}")),
                    outcome=outcome,
                ),
                deadline=DEADLINE,
            )
            for i, outcome in enumerate(outcomes)
        ]

    async def work(self, cell: int, batch: int, most: int = 1000) -> list[tuple[p.MicroStep, Packed]]:
        """Claim and complete up to `most` micro-steps, or until exhausted."""
        done = []
        while len(done) < most:
            step = await self.until(p.Claim(cell=cell, batch=batch), p.MicroStep, p.Exhausted)
            if isinstance(step, p.Exhausted):
                break
            packed = msgspec.msgpack.decode(step.packed, type=Packed)
            done.append((step, packed))
            complete = p.Complete(
                cell=cell,
                batch=batch,
                micro_step=step.micro_step,
                attempt=step.attempt,
                loss=float(packed.arrays().weight.sum()),
                seconds=0.01,
                metrics={"clipped": 1.0, "targets": float(packed.targets)},
            )
            assert (await self.ask(complete)).kept
        return done

    async def close(self, batch: int, version: int, loss: float = 0.25) -> p.Ok:
        request = p.CloseBatch(
            cell=0, batch=batch, version=version, loss=loss, grad_norm=2.0, learning_rate=1e-5, seconds=0.1
        )
        reply: p.Ok = await self.ask(request)
        return reply

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.context.dir.metrics / "steps.jsonl").read_text().splitlines()]


def write(context: Context, execution: str, turns: int, siblings: int = 1, version: int = 0) -> None:
    """A chain of `turns` calls; the last turn is answered `siblings` times."""
    with LogWriter(context.dir.log(execution)) as log:
        log.append(Header(execution=execution))
        parent, length = None, 0
        for turn in range(turns):
            prompt = [10 + turn, 11, 12]
            for sibling in range(siblings if turn == turns - 1 else 1):
                output = [100 + turn, 200 + sibling]
                log.append(
                    Call(
                        call=f"{turn}.{sibling}",
                        execution=execution,
                        parent=parent,
                        prefix=length,
                        prompt=pack_ids(prompt),
                        output=pack_ids(output),
                        logprobs=pack_logprobs([-0.5, -0.25]),
                        versions=(Span(version, 0, 2),),
                        started=float(turn),
                    )
                )
                log.append(Delivered(call=f"{turn}.{sibling}"))
            parent, length = f"{turn}.0", length + 5


@pytest.fixture
def clock() -> list[float]:
    """What must be added to the real clock, in a list of one."""
    return [0.0]


@pytest.fixture
async def feed(context: Context, clock: list[float]) -> AsyncIterator[FeedService]:
    async with FeedService(context, clock=lambda: time.monotonic() + clock[0]) as service:
        working = asyncio.create_task(service.work())
        yield service
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


@pytest.fixture
async def peers(context: Context, feed: FeedService) -> AsyncIterator[Peers]:
    peers = Peers(context)
    yield peers
    await peers.trainer.close()
    await peers.runner.close()


async def test_a_batch_trained_by_core_and_satellite(context: Context, peers: Peers) -> None:
    # Group a: 3 turns with 2 siblings against short ones, a failed evaluator, a placeholder. Group b: two scores alike.
    for execution, turns, siblings in (("a-0", 3, 2), ("a-1", 1, 1), ("a-2", 2, 1), ("b-0", 2, 1), ("b-1", 4, 3)):
        write(context, execution, turns, siblings)
    assert isinstance(await peers.ask(p.OpenBatch(cell=0, version=0, manifest=b"m")), p.Wait)
    await peers.submit("a", [scored(1.0), scored(0.5), FAILED, EMPTY])
    assert await peers.ask(p.OpenBatch(cell=0, version=0, manifest=b"m")) == p.Opened(batch=0, version=0)
    core = await peers.work(0, 0, most=1)  # group b is not there yet: streaming
    await peers.submit("b", [scored(0.5), scored(0.25)])
    joined = await peers.until(p.Join(cell=1), p.Joined)
    assert joined == p.Joined(batch=0, version=0, manifest=b"m")
    satellite = await peers.work(1, 0, most=1)
    core += await peers.work(0, 0)
    assert isinstance(await peers.ask(p.Claim(cell=1, batch=0)), p.Exhausted)
    offer = p.HandOver(
        cell=1, batch=0, micro_steps=tuple((s.micro_step, s.attempt) for s, _ in satellite), gradients=b"g"
    )
    assert isinstance(await peers.ask(offer), p.Wait)
    handed = await peers.until(p.Collect(cell=0, batch=0), p.Handed)
    assert (handed.cells, handed.gradients, handed.executions) == ((1,), (b"g",), 5)
    assert await peers.ask(p.Collected(cell=0, batch=0, cells=(1,))) == p.Ok()
    assert await peers.ask(offer) == p.Taken()

    weights: Counter[str] = Counter()
    for _, packed in core + satellite:
        arrays = packed.arrays()
        for i, weight in zip(arrays.execution, arrays.weight, strict=True):
            weights[packed.executions[i]] += weight
    # a-1 sits exactly on the baseline mean(1, 0.5, 0): it counts in E but is not computed. The others weigh 1 each.
    assert weights == pytest.approx({"a-0": 1.0, "b-0": 1.0, "b-1": 1.0}, abs=1e-5)
    assert handed.loss == pytest.approx(3.0, abs=1e-5)

    assert await peers.close(0, 1) == p.Ok()
    assert await peers.close(0, 1) == p.Ok()
    (step,) = peers.steps()
    assert (step["step"], step["version"], step["new_version"]) == (1, 0, 1)
    assert (step["executions"], step["excluded"], step["placeholders"]) == (5, 1, 1)
    assert step["mean_score"] == pytest.approx((1.0 + 0.5 + 0.0 + 0.5 + 0.25) / 5)
    assert step["micro_steps"] == {"0": len(core), "1": 1}
    assert (step["trajectories"], step["zero_advantage_executions"]) == (2 + 1 + 1 + 3, 1)
    # a-0: 15 + 15, shared 13 + the first sampled token; b-1: 3 times 20, likewise; a-1: 5; b-0: 10.
    assert (step["tokens_total"], step["tokens_unique"]) == (30 + 5 + 10 + 60, 16 + 5 + 10 + 22)
    assert step["tokens_computed"] == sum(packed.tokens for _, packed in core + satellite)
    assert step["targets"] == 8 + 2 + 4 + 12
    assert step["targets_computed"] == 24
    assert (step["staleness"], step["loss"], step["grad_norm"], step["checkpoint"]) == (0.0, 0.25, 2.0, "")
    assert step["means"]["clipped"] == pytest.approx((len(core) + 1) / 24)

    fates = await peers.runner.call(intake.Fates(), deadline=DEADLINE)
    assert {f.execution: (f.step, f.reason) for f in fates.fates} == {
        "a-0": (1, ""),
        "a-1": (1, ""),
        "a-2": (None, "evaluator failed: timed out"),
        "a-3": (1, "placeholder"),
        "b-0": (1, ""),
        "b-1": (1, ""),
    }


async def test_submissions_are_idempotent(context: Context, peers: Peers) -> None:
    for i in range(2):
        write(context, f"a-{i}", 1)
        write(context, f"b-{i}", 1)
    for expected in (False, True):
        for group in "ab":
            accepted = await peers.submit(group, [scored(1.0), scored(0.0)])
            assert [a.duplicate for a in accepted] == [expected] * 2
    stats = await peers.ask(p.FeedStatus())
    assert (stats.groups_complete, stats.executions_waiting) == (2, 4)
    await peers.ask(p.OpenBatch(cell=0, version=0, manifest=b""))
    await peers.work(0, 0)
    await peers.until(p.Collect(cell=0, batch=0), p.Handed)
    await peers.close(0, 1)
    assert all(a.duplicate for a in await peers.submit("a", [scored(0.0), scored(1.0)]))
    assert isinstance(await peers.ask(p.OpenBatch(cell=0, version=1, manifest=b"")), p.Wait)
    assert (await peers.runner.call(intake.Fates(), deadline=DEADLINE)).total == 4


async def test_a_batch_that_excludes_everybody_closes(peers: Peers) -> None:
    await peers.submit("a", [FAILED, FAILED])
    await peers.submit("b", [scored(1.0), FAILED])  # scored, but there is no call log
    await peers.ask(p.OpenBatch(cell=0, version=0, manifest=b""))
    assert await peers.work(0, 0) == []
    handed = await peers.until(p.Collect(cell=0, batch=0), p.Handed)
    assert handed == p.Handed(cells=(), gradients=(), executions=0, loss=0.0)
    assert await peers.close(0, 0, loss=float("nan")) == p.Ok()
    (step,) = peers.steps()
    assert (step["executions"], step["excluded"], step["mean_score"], step["loss"]) == (0, 4, None, None)
    fates = await peers.runner.call(intake.Fates(), deadline=DEADLINE)
    assert [f.step for f in fates.fates] == [None] * 4


async def test_a_dead_satellites_work_is_done_by_the_core(
    context: Context, peers: Peers, feed: FeedService, clock: list[float]
) -> None:
    for group in "ab":
        for i in range(2):
            write(context, f"{group}-{i}", 3, 2)
        await peers.submit(group, [scored(1.0), scored(0.0)])
    await peers.ask(p.OpenBatch(cell=0, version=0, manifest=b""))
    await peers.until(p.Join(cell=1), p.Joined)
    lost = await peers.work(1, 0, most=2)
    clock[0] += 31.0  # its lease runs out, while the core renews
    await peers.ask(p.Renew(cell=0, batch=0))
    feed.feed.tick(time.monotonic() + clock[0])
    done = await peers.work(0, 0)
    assert {s.micro_step for s, _ in lost} < {s.micro_step for s, _ in done}
    assert {s.micro_step for s, _ in done} == set(range(len(done)))
    hand_over = p.HandOver(cell=1, batch=0, micro_steps=((0, 0), (1, 0)), gradients=b"")
    assert await peers.ask(hand_over) == p.Taken(kept=False)
    assert (await peers.until(p.Collect(cell=0, batch=0), p.Handed)).cells == ()
    await peers.close(0, 1)
    assert peers.steps()[0]["micro_steps_returned"] == 2


async def test_a_core_that_stepped_and_died_has_its_batch_closed(context: Context, peers: Peers) -> None:
    for group in "abc":
        for i in range(2):
            write(context, f"{group}-{i}", 2)
        await peers.submit(group, [scored(1.0), scored(0.0)])
    await peers.ask(p.OpenBatch(cell=0, version=0, manifest=b""))
    await peers.work(0, 0)
    await peers.until(p.Collect(cell=0, batch=0), p.Handed)
    assert await peers.ask(p.OpenBatch(cell=0, version=1, manifest=b"")) == p.Opened(batch=1, version=1)
    (step,) = peers.steps()
    assert (step["step"], step["grad_norm"]) == (1, None)
    assert step["loss"] == pytest.approx(1.0)


async def test_a_full_disk_is_told_and_nothing_is_closed(context: Context, peers: Peers) -> None:
    for i in range(2):
        write(context, f"a-{i}", 1)
        write(context, f"b-{i}", 1)
    await peers.submit("a", [scored(1.0), scored(0.0)])
    await peers.submit("b", [scored(1.0), scored(0.0)])
    await peers.ask(p.OpenBatch(cell=0, version=0, manifest=b""))
    await peers.work(0, 0)
    await peers.until(p.Collect(cell=0, batch=0), p.Handed)
    context.dir.metrics.write_text("in the way")
    with pytest.raises(RemoteError, match=r"steps\.jsonl"):
        await peers.close(0, 1)
    assert (await peers.ask(p.FeedStatus())).open_batch == 0
    context.dir.metrics.unlink()
    assert await peers.close(0, 1) == p.Ok()
    assert len(peers.steps()) == 1


async def test_the_scheduler_hears_every_change_and_may_be_absent(
    context: Context, peers: Peers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: asyncio.Queue[sched.Backlog] = asyncio.Queue()

    async def listen(request: Any) -> sched.Ack:
        heard.put_nowait(request)
        return sched.Ack()

    async def until(condition: str) -> sched.Backlog:
        async with asyncio.timeout(DEADLINE):
            while True:
                backlog = await heard.get()
                if eval(condition, {"b": backlog}):  # noqa: S307
                    return backlog

    monkeypatch.setattr(service_module, "_SCHEDULER_DEADLINE", 0.2)
    await peers.submit("a", [FAILED, FAILED])  # the feed works on while nobody listens
    async with Server(context.bus.address("scheduler"), sched.Request, listen):
        monkeypatch.setattr(service_module, "_SCHEDULER_DEADLINE", 30.0)  # it is there, however long it takes
        assert (await until("b.waiting == 1")).batches_ready == 0
        await peers.submit("b", [scored(1.0), scored(0.0)])
        await until("b.waiting == 3 and b.batches_ready == 1")
        await peers.ask(p.OpenBatch(cell=0, version=0, manifest=b""))
        await until("b.open_batch == 0 and b.waiting == 0")
        await until("b == b")  # a heartbeat without a change
    assert sum("does not take the backlog" in r.message for r in caplog.records) <= 1


async def test_a_broken_worker_ends_the_process(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(service_module, "prepare_group", broken)
    async with FeedService(context) as service:
        working = asyncio.create_task(service.work())
        peers = Peers(context)
        await peers.submit("a", [FAILED])
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(working, DEADLINE)
        assert caught.group_contains(RuntimeError, match="a fault of ours")
        await peers.runner.close()


async def test_the_process_acks_readiness_and_ends_cleanly(context: Context) -> None:
    argv = [sys.executable, "-m", "gyre_train.cli", "feed", "--config", str(context.config_path)]
    child = await Child.start("feed", argv, log=context.dir.logs / "feed.log", ready_within=60.0)
    peers = Peers(context)
    assert (await peers.ask(p.FeedStatus())).groups_complete == 0
    await peers.trainer.close()
    assert await child.stop() == 0
    assert "stopped" in child.tail()


async def test_the_feed_needs_no_torch() -> None:
    code = "import sys, gyre_train.feed.service; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
