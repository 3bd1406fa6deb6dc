"""Trainer processes at work: feed, core and satellite are real; only what would order them about is scripted.

One scenario of four batches runs once, and each test looks at one of them:
    0  the satellite joins in the middle; each cell takes a part
    1  the core stands still until the satellite has computed everything
    2  the satellite is killed after it has completed micro-steps
    3  the core is killed, comes back from its checkpoint, and the batch starts over
Whatever happened, the parameters must be those that one replica gets which computes the whole batch alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gyre_sched import protocol as sched
from gyre_train import architecture, protocol
from gyre_train.config import ModelConfig, TrainConfig
from gyre_train.feed.buffer import Group
from gyre_train.feed.config import FeedConfig
from gyre_train.feed.packer import PackedStep, Packer
from gyre_train.feed.prepare import Fated, prepare_group
from gyre_traj import intake
from gyre_traj.log import LogWriter
from gyre_traj.packing import Packed, Row
from gyre_traj.records import Call, Delivered, Header, Span, pack_ids, pack_logprobs
from gyre_transport.bus import Client, Server
from gyre_transport.config import section
from gyre_transport.process import Child
from gyre_transport.run import Context
from gyre_transport.snapshot import Manifest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

BATCHES, GROUPS, MEMBERS, VOCAB = 4, 5, 2, 128
TOKENS = 64  # of a micro-step
START = 300.0  # seconds a trainer may take to import Megatron on a busy machine
CONFIG = """
[run]
dir = "{dir}"
steps = {steps}
[batch]
groups = {groups}
group_size = {members}
per_burst = 1
[bus]
dir = "{bus}"
[model]
path = "{model}"
name = "tiny"
[train]
dtype = "fp32"
keep_checkpoints = 10
[train.optimizer]
lr = 1e-3
eps = 1e-7  # Adam makes a whole step of a gradient that is rounding alone, unless eps is above the rounding
weight_decay = 0.01
warmup_steps = 2
[feed]
tokens = {tokens}
layout = "forests"
lease_s = 8.0
"""


# --- executions -----------------------------------------------------------------------------------------------------


def write_log(path: Path, execution: str, rng: np.random.Generator) -> None:
    """Two turns, a second answer to the first prompt, and a sub-agent."""

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(3, VOCAB, size=n)]

    def call(name: str, prompt: list[int], n: int, **more: Any) -> tuple[Call, int]:
        record = Call(
            call=name,
            execution=execution,
            prompt=pack_ids(prompt),
            output=pack_ids(ids(n)),
            logprobs=pack_logprobs(rng.normal(-4.8, 0.3, size=n)),
            versions=(Span(0, 0, n),),
            **more,
        )
        return record, more.get("prefix", 0) + len(prompt) + n

    first, end = call("c1", ids(8), 9)
    second, _ = call("c2", ids(3), 7, parent="c1", prefix=end)
    again, _ = call("c3", ids(4), 6, parent="c1", prefix=end)
    aside, _ = call("c4", ids(6), 5, role="sub-agent")
    with LogWriter(path) as log:
        log.append(Header(execution=execution))
        for record in (first, second, again, aside):
            log.append(record)
            log.append(Delivered(call=record.call))


def submission(directory: Path, batch: int, group: int, member: int) -> intake.Submit:
    """Group 0 of a batch has equal scores: it opens the batch and counts in it, but there is nothing to compute."""
    execution = f"b{batch}g{group}m{member}"
    score = random.Random(execution).random() if group else 0.5
    return intake.Submit(
        execution=execution,
        task=f"t{group}",
        group=f"b{batch}g{group}",
        group_size=MEMBERS,
        log=str(directory / "calls" / f"{execution}.gtraj"),
        outcome=intake.Outcome(ending=intake.Ending.SCORED, score=score),
    )


# --- who orders trainers about --------------------------------------------------------------------------------------


class Orders:
    """A scheduler that takes note, and the agents of two cells that want what `want` says."""

    def __init__(self, context: Context) -> None:
        self.want = {0: "idle", 1: "idle"}
        self.published: list[sched.Published] = []
        self._changed = asyncio.Condition()
        self._servers = [Server(context.bus.address("scheduler"), sched.Request, self._scheduler)]
        self._servers += [Server(context.bus.address(f"agent-{c}"), sched.AgentRequest, self._agent) for c in self.want]

    async def __aenter__(self) -> Orders:
        for server in self._servers:
            await server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for server in self._servers:
            await server.close()

    async def order(self, cell: int, want: str) -> None:
        async with self._changed:
            self.want[cell] = want
            self._changed.notify_all()

    async def _scheduler(self, request: sched.Request) -> sched.Reply:
        if isinstance(request, sched.Published):
            self.published.append(request)
        return sched.Ack()

    async def _agent(self, request: sched.AgentRequest) -> sched.AgentReply:
        assert isinstance(request, sched.TrainerReport)
        try:
            async with asyncio.timeout(request.wait), self._changed:
                await self._changed.wait_for(lambda: self.want[request.cell] != request.state)
        except TimeoutError:
            pass
        return sched.TrainerOrder(want=self.want[request.cell])


class Feeding:
    """The runner's side of the feed, and its numbers."""

    def __init__(self, context: Context) -> None:
        self._dir = context.dir.path
        self._feed = Client(context.bus.address("feed"), protocol.Reply)
        self._intake = Client(context.bus.address("feed.intake"), intake.Reply)

    async def submit(self, batch: int, *groups: int) -> None:
        for group in groups:
            for member in range(MEMBERS):
                await self._intake.call(submission(self._dir, batch, group, member), deadline=30)

    async def stats(self) -> protocol.Stats:
        stats = await self._feed.call(protocol.FeedStatus(), deadline=30)
        assert isinstance(stats, protocol.Stats)
        return stats

    async def until(self, what: str, true: Callable[[protocol.Stats], bool], alive: list[Child]) -> None:
        """Wait for the feed to say so, while the processes that must bring it about live."""
        async with asyncio.timeout(120):
            while not true(await self.stats()):
                for child in alive:
                    assert child.returncode is None, f"{child.name} ended while waiting for {what}; {child.tail()}"
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._feed.close()
        await self._intake.close()


# --- the scenario ---------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """What is left to look at."""

    context: Context
    records: list[dict[str, Any]] = field(default_factory=list)
    published: list[sched.Published] = field(default_factory=list)
    exits: dict[str, int] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)


async def start(context: Context, name: str, *argv: str) -> Child:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "gyre_train.cli", *argv, "--config", str(context.config_path)]
    return await Child.start(name, command, log=context.dir.logs / f"{name}.log", env=env, ready_within=START)


async def play(context: Context, story: Story) -> None:
    trainers: dict[int, Child] = {}
    async with Orders(context) as orders:
        feed = await start(context, "feed", "feed")
        feeding = Feeding(context)
        try:
            await asyncio.gather(*(_trainer(context, trainers, cell) for cell in (0, 1)))
            await joined_in_the_middle(orders, feeding, trainers)
            await left_to_the_satellite(context, feeding, trainers)
            await satellite_killed(feeding, trainers)
            await core_killed(context, feeding, trainers)
            await orders.order(0, "stop")
            async with asyncio.timeout(60):
                story.exits["core, ordered to stop"] = await trainers[0].wait()
            story.exits["feed"] = await feed.stop()
        finally:
            await feeding.close()
            for child in (*trainers.values(), feed):
                if child.returncode is None:
                    os.kill(child.pid, signal.SIGCONT)
                await child.stop(grace=5)
    story.published = orders.published


async def _trainer(context: Context, trainers: dict[int, Child], cell: int) -> None:
    trainers[cell] = await start(context, f"trainer-{cell}", "replica", "--cell", str(cell))


async def joined_in_the_middle(orders: Orders, feeding: Feeding, trainers: dict[int, Child]) -> None:
    both = list(trainers.values())
    await feeding.submit(0, 0, 1)
    await orders.order(0, "training")
    await feeding.until("the core's first micro-step", lambda s: s.micro_steps_done > 0, both)
    await feeding.until("group 1", lambda s: s.micro_steps_done == s.micro_steps_total, both)
    before = (await feeding.stats()).micro_steps_done
    os.kill(trainers[0].pid, signal.SIGSTOP)  # it takes no part in what a satellite reads from it
    await orders.order(1, "training")
    await feeding.submit(0, 2)
    await feeding.until("the satellite's first micro-step", lambda s: s.micro_steps_done > before, both)
    os.kill(trainers[0].pid, signal.SIGCONT)
    await feeding.submit(0, 3, 4)
    await feeding.until("batch 0", lambda s: s.batches_closed == 1, both)


async def left_to_the_satellite(context: Context, feeding: Feeding, trainers: dict[int, Child]) -> None:
    both = list(trainers.values())
    await feeding.submit(1, 0)
    await feeding.until("batch 1 to open", lambda s: s.open_batch == 1, both)
    os.kill(trainers[0].pid, signal.SIGSTOP)
    await feeding.submit(1, *range(1, GROUPS))
    all_of_it = len(micro_steps(batch_rows(context, 1)[0]))
    await feeding.until("the satellite", lambda s: s.micro_steps_done == all_of_it, both)
    os.kill(trainers[0].pid, signal.SIGCONT)
    await feeding.until("batch 1", lambda s: s.batches_closed == 2, both)


async def satellite_killed(feeding: Feeding, trainers: dict[int, Child]) -> None:
    both = list(trainers.values())
    await feeding.submit(2, 0)
    await feeding.until("batch 2 to open", lambda s: s.open_batch == 2, both)
    os.kill(trainers[0].pid, signal.SIGSTOP)
    await feeding.submit(2, 1, 2)
    await feeding.until("a micro-step of the satellite", lambda s: s.micro_steps_done > 0, both)
    os.kill(trainers[1].pid, signal.SIGKILL)
    await trainers[1].wait()
    os.kill(trainers[0].pid, signal.SIGCONT)
    await feeding.submit(2, 3, 4)
    await feeding.until("batch 2", lambda s: s.batches_closed == 3, [trainers[0]])


async def core_killed(context: Context, feeding: Feeding, trainers: dict[int, Child]) -> None:
    await feeding.submit(3, 0, 1)
    await feeding.until("micro-steps of batch 3", lambda s: s.micro_steps_done > 0, [trainers[0]])
    os.kill(trainers[0].pid, signal.SIGKILL)
    await trainers[0].wait()
    await feeding.submit(3, 2, 3, 4)
    await _trainer(context, trainers, 0)
    await feeding.until("batch 3", lambda s: s.batches_closed == 4, [trainers[0]])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, policies: Callable[..., Path]) -> Story:
    directory = tmp_path_factory.mktemp("run")
    bus = tempfile.mkdtemp(prefix="gyre-")
    config = directory / "config.toml"
    config.write_text(
        CONFIG.format(
            dir=directory,
            bus=bus,
            model=policies("qwen3-tied"),
            steps=BATCHES,
            groups=GROUPS,
            members=MEMBERS,
            tokens=TOKENS,
        )
    )
    context = Context(config)
    context.dir.calls.mkdir()
    rng = np.random.default_rng(3)
    for batch in range(BATCHES):
        for group in range(GROUPS):
            for member in range(MEMBERS):
                name = f"b{batch}g{group}m{member}"
                write_log(context.dir.log(name), name, rng)
    told = Story(context)
    try:
        _run(play(context, told))
    finally:
        shutil.rmtree(bus, ignore_errors=True)
        told.logs = {path.stem: path.read_text() for path in context.dir.logs.glob("*.log")}
    lines = (context.dir.metrics / "steps.jsonl").read_text().splitlines()
    told.records = [json.loads(line) for line in lines]
    return told


def _run(scenario: Awaitable[None]) -> None:
    async def main() -> None:
        await scenario

    asyncio.run(main())


# --- the same batches, by one replica alone -------------------------------------------------------------------------


@dataclass
class Alone:
    """What one replica makes of each batch, starting from the weights and the optimizer state the core had."""

    norms: list[float]
    apart: list[float]  # largest parameter difference to the core's next checkpoint
    moved: list[float]  # largest parameter change of the step


@pytest.fixture(scope="module")
def alone(story: Story) -> Iterator[Alone]:
    from gyre_train import checkpoint
    from gyre_train.replica import Replica, leave_world
    from gyre_train.trainer import resume

    context = story.context
    model = section(context.data, "model", ModelConfig)
    found = Alone([], [], [])
    replica = Replica(
        section(context.data, "train", TrainConfig), architecture.read(model.path), optimizer=True, steps=BATCHES
    )
    for batch in range(BATCHES):
        if batch == 0:
            resume(replica, Path(model.path), context.dir.path / "none")
        else:
            before = context.dir.checkpoints / f"step-{batch}"
            meta = checkpoint.read_meta(before)
            replica.load_state(meta, {part: checkpoint.read_part(before, part) for part in meta.parts})
        start = {n: p.detach().clone() for n, p in replica.policy.named_parameters()}
        groups, executions = batch_rows(context, batch)
        replica.zero()
        for step in micro_steps(groups):
            replica.accumulate(msgspec.msgpack.decode(step.data, type=Packed))
        found.norms.append(replica.step(executions))
        core = checkpoint.read_part(context.dir.checkpoints / f"step-{batch + 1}", "main")
        after = dict(replica.policy.named_parameters())
        found.apart.append(max(float((after[n].detach() - core[n]).abs().max()) for n in core))
        found.moved.append(max(float((start[n] - core[n]).abs().max()) for n in core))
    yield found
    leave_world()


def batch_rows(context: Context, batch: int) -> tuple[list[list[Row]], int]:
    """Rows of each group of a batch, and |E|."""
    groups: list[list[Row]] = []
    executions = 0
    for number in range(GROUPS):
        members = [submission(context.dir.path, batch, number, member) for member in range(MEMBERS)]
        group = Group(members[0].group, members[0].task, MEMBERS, 0.0, members)
        prepared, rows = prepare_group(group, section(context.data, "feed", FeedConfig), context.run.seed)
        groups.append(rows)
        executions += sum(e.fated is not Fated.EXCLUDED for e in prepared.executions)
    return groups, executions


def micro_steps(groups: list[list[Row]]) -> list[PackedStep]:
    """What the feed makes of a batch; it depends on the order of the groups alone."""
    packer = Packer(TOKENS, "forests")
    return [step for number, rows in enumerate(groups) for step in packer.push(rows, last=number == GROUPS - 1)]


# --- what must be so ------------------------------------------------------------------------------------------------


def right(story: Story, alone: Alone, batch: int) -> None:
    record = story.records[batch]
    assert record["step"] == batch + 1
    assert record["executions"] == GROUPS * MEMBERS
    assert record["grad_norm"] == pytest.approx(alone.norms[batch], rel=1e-4)
    assert alone.apart[batch] < 1e-5
    assert alone.moved[batch] > 1e-4


def test_core_and_a_satellite_that_joins_give_what_the_core_alone_gives(story: Story, alone: Alone) -> None:
    assert set(story.records[0]["micro_steps"]) == {"0", "1"}
    assert story.records[0]["micro_steps_returned"] == 0
    right(story, alone, 0)


def test_it_does_not_matter_who_takes_which_micro_step(story: Story, alone: Alone) -> None:
    assert story.records[1]["micro_steps"]["1"] > story.records[1]["micro_steps"].get("0", 0)
    right(story, alone, 1)


def test_a_satellite_killed_in_the_middle_costs_nothing(story: Story, alone: Alone) -> None:
    assert set(story.records[2]["micro_steps"]) == {"0"}
    assert story.records[2]["micro_steps_returned"] >= 1
    right(story, alone, 2)


def test_a_core_killed_in_the_middle_comes_back_from_its_checkpoint(story: Story, alone: Alone) -> None:
    assert "resumed from" in story.logs["trainer-0"]
    assert set(story.records[3]["micro_steps"]) == {"0"}
    right(story, alone, 3)


def test_every_version_was_published_in_order(story: Story) -> None:
    versions = [p.version for p in story.published]
    assert versions == [0, 1, 2, 3, 3, 4]  # 3 again by the core that came back
    for published in story.published:
        manifest = msgspec.msgpack.decode(published.manifest, type=Manifest)
        assert (manifest.model, manifest.version) == ("tiny", published.version)
        assert "model.embed_tokens.weight" in {e.name for e in manifest.entries}


def test_the_satellite_took_each_version_it_trained_on(story: Story) -> None:
    lines = story.logs["trainer-1"].splitlines()
    taken = [line.split("took version ")[1].split(":")[0] for line in lines if "took version" in line]
    assert taken == ["0", "1", "2"]


def test_the_learning_rate_counts_steps_and_survives_the_restart(story: Story) -> None:
    assert [r["learning_rate"] for r in story.records] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])


def test_the_policy_is_exported_and_everything_ends_cleanly(story: Story) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from gyre_train import checkpoint, hf

    assert story.exits == {"core, ordered to stop": 0, "feed": 0}
    model = section(story.context.data, "model", ModelConfig)
    trained = AutoModelForCausalLM.from_pretrained(story.context.dir.policy, dtype=torch.float32)
    started = hf.read_folder(model.path)
    last = checkpoint.read_part(story.context.dir.checkpoints / f"step-{BATCHES}", "main")
    weights = {n: p.detach() for n, p in trained.named_parameters()}
    assert torch.equal(weights["model.norm.weight"], last["decoder.final_layernorm.weight"])
    assert all(not torch.equal(weights[n], t) for n, t in started.items() if n != "lm_head.weight")
