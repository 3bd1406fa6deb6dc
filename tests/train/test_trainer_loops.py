"""The loops of core and satellite against a scripted feed and agent that speak the real messages. No Megatron."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gyre_sched import protocol as sched
from gyre_train import protocol
from gyre_train.claims import Claims, Ending
from gyre_train.config import TrainConfig
from gyre_train.core import Core
from gyre_train.errors import PeerLost
from gyre_train.links import Agent, LeaseKeeper, Link, Stopped
from gyre_train.protocol import (
    Claim,
    CloseBatch,
    Collect,
    Collected,
    Complete,
    Exhausted,
    Handed,
    HandOver,
    Join,
    Joined,
    MicroStep,
    Ok,
    OpenBatch,
    Opened,
    Renew,
    Reopened,
    Taken,
    Wait,
)
from gyre_train.satellite import Satellite
from gyre_traj.packing import Row, pack_rows
from gyre_transport.bus import Server
from gyre_transport.memory import Descriptor, read, register
from gyre_transport.run import RunDir
from gyre_transport.snapshot import SnapshotSource
from gyre_transport.torch import describe


class FakeReplica:
    """Two gradient buffers; every micro-step adds 1 to both."""

    def __init__(self) -> None:
        self.config = TrainConfig(checkpoint_every=0)
        self.version = 0
        self.steps = 9
        self.learning_rate = 0.0
        self.sums = [torch.zeros(4), torch.zeros(3)]
        self.loaded: list[int] = []
        self.stepped: list[tuple[list[float], int]] = []

    def zero(self) -> None:
        for buffer in self.sums:
            buffer.zero_()

    def accumulate(self, packed: Any) -> tuple[float, dict[str, float]]:
        for buffer in self.sums:
            buffer.add_(1.0)
        return 1.0, {"targets": 1.0}

    def gradient_buffers(self) -> list[torch.Tensor]:
        return self.sums

    def add_gradients(self, index: int, sums: torch.Tensor) -> None:
        self.sums[index].add_(sums)

    def load_weights(self, tensors: Any, *, version: int) -> None:
        self.version = version
        self.loaded.append(version)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.full((2,), float(self.version))}

    def step(self, denominator: int) -> float:
        self.stepped.append(([float(b[0]) for b in self.sums], denominator))
        self.version += 1
        return 0.5


class Script:
    """Answers each kind of request with the next of its replies, the last one for ever; keeps what was asked."""

    def __init__(self, address: str, requests: Any, **replies: list[Any]) -> None:
        self.asked: list[Any] = []
        self._replies = {name: list(values) for name, values in replies.items()}
        self._server = Server(address, requests, self._answer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(10)

    async def _answer(self, request: Any) -> Any:
        self.asked.append(request)
        replies = self._replies[type(request).__name__]
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        return reply(request) if callable(reply) else reply

    def of(self, kind: type) -> list[Any]:
        return [r for r in self.asked if isinstance(r, kind)]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class Stage:
    """A feed and an agent that follow scripts, and a trainer's connections to them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: list[Any] = []
        self.replica = FakeReplica()

    def feed(self, **replies: list[Any]) -> Script:
        replies.setdefault("Renew", [Ok()])
        return self._kept(Script(f"ipc://{self._folder}/feed", protocol.Request, **replies))

    def agent(self, *wants: str) -> Script:
        orders = [sched.TrainerOrder(want=want) for want in wants]
        return self._kept(Script(f"ipc://{self._folder}/agent", sched.AgentRequest, TrainerReport=orders))

    def link(self) -> Link:
        return self._kept(Link("feed", f"ipc://{self._folder}/feed", protocol.Reply, patience=60.0))

    def orders(self, patience: float = 60.0) -> Agent:
        return self._kept(Agent(f"ipc://{self._folder}/agent", 1, patience=patience))

    def keeper(self) -> LeaseKeeper:
        keeper = LeaseKeeper(f"ipc://{self._folder}/feed", 1)
        keeper.start()
        self._open.append(keeper)
        return keeper

    def satellite(self) -> Satellite:
        return Satellite(self.replica, self.orders(), self.link(), self.keeper(), cell=1)  # type: ignore[arg-type]

    def core(self, source: SnapshotSource, directory: Path) -> Core:
        return Core(
            self.replica,  # type: ignore[arg-type]
            self.orders(),
            self.link(),
            self.keeper(),
            source,
            lambda version, manifest: None,
            cell=0,
            directory=RunDir(directory),
            model=directory,
        )

    def _kept(self, part: Any) -> Any:
        self._open.append(part)
        return part

    def close(self) -> None:
        for part in self._open:
            if isinstance(part, LeaseKeeper):
                part.end()
        for part in reversed(self._open):
            if not isinstance(part, LeaseKeeper):
                part.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="gyre-") as folder:
        made = Stage(folder)
        yield made
        made.close()


@pytest.fixture
def micro_step(rows: list[Row]) -> Callable[..., MicroStep]:
    packed = msgspec.msgpack.encode(pack_rows(rows, 512)[0])
    return lambda number=0, attempt=0: MicroStep(micro_step=number, attempt=attempt, lease=0.4, packed=packed)


@pytest.fixture
def joined() -> Iterator[Joined]:
    with SnapshotSource("policy") as source:
        manifest = source.publish(3, {"w": describe(torch.ones(2))})
        yield Joined(batch=7, version=3, manifest=msgspec.msgpack.encode(manifest))


# --- the satellite --------------------------------------------------------------------------------------------------


def test_a_satellite_takes_the_version_and_hands_over_what_it_computed(
    stage: Stage, micro_step: Callable[..., MicroStep], joined: Joined
) -> None:
    handed: list[list[float]] = []

    def take(request: HandOver) -> Taken:
        for descriptor in msgspec.msgpack.decode(request.gradients, type=tuple[Descriptor, ...]):
            room = torch.empty(descriptor.nbytes // 4)
            read(descriptor, room, deadline=60)
            handed.append(room.tolist())
        return Taken()

    feed = stage.feed(
        Join=[Wait(reason="not yet", retry=0.01), joined, Wait(reason="none", retry=0.01)],
        Claim=[micro_step(4), Wait(reason="not packed", retry=0.01), micro_step(5, 2), Exhausted()],
        Complete=[Ok()],
        HandOver=[Wait(reason="the core computes", retry=0.01), take],
    )
    stage.agent(*["training"] * 9, "idle")
    stage.satellite().train()
    assert stage.replica.loaded == [3]
    assert feed.of(HandOver)[-1].micro_steps == ((4, 0), (5, 2))
    assert handed == [[2.0] * 4, [2.0] * 3]


def test_a_version_made_a_second_time_is_taken_again(stage: Stage, micro_step: Callable[..., MicroStep]) -> None:
    with SnapshotSource("policy") as old, SnapshotSource("policy") as restored:
        first, second = (
            Joined(batch=7, version=3, manifest=msgspec.msgpack.encode(source.publish(3, {"w": describe(weight)})))
            for source, weight in ((old, torch.ones(2)), (restored, torch.zeros(2)))
        )
        stage.feed(
            Join=[first, second],
            Claim=[Exhausted()],
            HandOver=[Taken()],
        )
        stage.agent("training", "training", "training", "training", "idle")
        stage.satellite().train()
    assert stage.replica.loaded == [3, 3]


def test_a_lost_lease_voids_the_sums(stage: Stage, micro_step: Callable[..., MicroStep], joined: Joined) -> None:
    feed = stage.feed(
        Join=[joined],
        Claim=[micro_step(0), micro_step(1), micro_step(1, 1), Exhausted()],
        Complete=[Ok(), Ok(kept=False), Ok()],
        HandOver=[Taken()],
    )
    stage.agent(*["training"] * 6, "idle")
    stage.satellite().train()
    assert len(feed.of(Join)) >= 2
    assert feed.of(HandOver)[0].micro_steps == ((1, 1),)
    assert stage.replica.sums[0].tolist() == [1.0] * 4
    assert stage.replica.loaded == [3]  # it has the version already


def test_a_satellite_ordered_out_hands_over_what_it_has(
    stage: Stage, micro_step: Callable[..., MicroStep], joined: Joined
) -> None:
    feed = stage.feed(Join=[joined], Claim=[micro_step(0)], Complete=[Ok()], HandOver=[Taken()])
    stage.agent("training", "training", "idle")
    stage.satellite().train()
    assert [h.micro_steps for h in feed.of(HandOver)] == [((0, 0),)]


def test_a_snapshot_that_has_moved_on_is_asked_for_again(stage: Stage, micro_step: Callable[..., MicroStep]) -> None:
    with SnapshotSource("policy") as source:
        stale = msgspec.msgpack.encode(source.publish(1, {"w": describe(torch.ones(2))}))
        fresh = msgspec.msgpack.encode(source.publish(2, {"w": describe(torch.ones(2))}))
        stage.feed(
            Join=[Joined(batch=1, version=1, manifest=stale), Joined(batch=2, version=2, manifest=fresh)],
            Claim=[Exhausted()],
            HandOver=[Taken()],
        )
        stage.agent("training", "training", "training", "idle")
        stage.satellite().train()
    assert stage.replica.loaded == [2]


def test_a_stop_interrupts_a_hand_over(stage: Stage, joined: Joined) -> None:
    stage.feed(Join=[joined], Claim=[Exhausted()], HandOver=[Wait(reason="the core computes", retry=0.01)])
    stage.agent("training", "training", "stop")
    with pytest.raises(Stopped):
        stage.satellite().train()


# --- leases ---------------------------------------------------------------------------------------------------------


def test_leases_are_renewed_while_a_micro_step_computes(stage: Stage, micro_step: Callable[..., MicroStep]) -> None:
    renewed = threading.Event()

    def renew(request: Renew) -> Ok:
        if request.batch == 7:
            renewed.set()
        return Ok()

    stage.feed(Renew=[renew], Claim=[micro_step(0), Exhausted()], Complete=[Ok()])
    claims = Claims(stage.replica, stage.link(), stage.keeper(), cell=1, batch=7)  # type: ignore[arg-type]
    stage.replica.accumulate = lambda packed: (float(renewed.wait(10)), {})  # type: ignore[method-assign]
    assert claims.drain(lambda: False) is Ending.EXHAUSTED
    assert renewed.is_set()


def test_a_refused_renewal_ends_the_claiming(stage: Stage, micro_step: Callable[..., MicroStep]) -> None:
    stage.feed(Renew=[Ok(kept=False)], Claim=[Wait(reason="not packed", retry=0.01)])
    claims = Claims(stage.replica, stage.link(), stage.keeper(), cell=1, batch=7)  # type: ignore[arg-type]
    assert claims.drain(lambda: False) is Ending.LOST


def test_a_silent_agent_ends_the_trainer(stage: Stage) -> None:
    with pytest.raises(PeerLost, match="agent of cell 1"):
        stage.orders(patience=0.2).order("idle", wait=0.1)


# --- the core -------------------------------------------------------------------------------------------------------


def test_a_contribution_is_added_whole_or_not_at_all(
    stage: Stage, micro_step: Callable[..., MicroStep], tmp_path: Path
) -> None:
    """The second buffer of cell 1 cannot be read: nothing of it counts, its work is claimed again, cell 2's stays."""
    gone = register(torch.full((3,), 50.0))
    lost = (register(torch.full((4,), 50.0)), gone)
    kept = (register(torch.full((4,), 3.0)), register(torch.full((3,), 3.0)))
    offers = [msgspec.msgpack.encode(tuple(r.descriptor for r in regions)) for regions in (lost, kept)]
    gone.revoke()
    feed = stage.feed(
        OpenBatch=[Opened(batch=0, version=0), Wait(reason="none", retry=0.01)],
        Claim=[micro_step(0), Exhausted(), micro_step(1, 1), Exhausted()],
        Complete=[Ok()],
        Collect=[
            Wait(reason="cell 1 computes", retry=0.01),
            Handed(cells=(1, 2), gradients=tuple(offers), executions=8, loss=4.0),
            Handed(cells=(), gradients=(), executions=8, loss=4.0),
        ],
        Collected=[Reopened(), Ok()],
        CloseBatch=[Ok()],
    )
    stage.agent(*["training"] * 9, "idle")
    with SnapshotSource("policy") as source:
        core = stage.core(source, tmp_path)
        core.publish()
        core.train()
    assert [(c.cells, c.lost) for c in feed.of(Collected)] == [((2,), (1,)), ((), ())]
    assert stage.replica.stepped == [([5.0, 5.0], 8)]  # two micro-steps of its own and cell 2's
    (closed,) = feed.of(CloseBatch)
    assert (closed.version, closed.loss, closed.grad_norm) == (1, 0.5, 0.5)


def test_a_core_that_lost_its_leases_opens_the_batch_again(
    stage: Stage, micro_step: Callable[..., MicroStep], tmp_path: Path
) -> None:
    feed = stage.feed(
        OpenBatch=[Opened(batch=0, version=0), Opened(batch=0, version=0), Wait(reason="none", retry=0.01)],
        Claim=[micro_step(0), micro_step(0, 1), Exhausted()],
        Complete=[Ok(kept=False), Ok()],
        Collect=[Handed(cells=(), gradients=(), executions=2, loss=1.0)],
        Collected=[Ok()],
        CloseBatch=[Ok()],
    )
    stage.agent(*["training"] * 5, "idle")
    with SnapshotSource("policy") as source:
        core = stage.core(source, tmp_path)
        core.publish()
        core.train()
    assert len(feed.of(OpenBatch)) >= 2
    assert stage.replica.stepped == [([1.0, 1.0], 2)]


def test_a_core_ordered_out_finishes_its_batch(
    stage: Stage, micro_step: Callable[..., MicroStep], tmp_path: Path
) -> None:
    feed = stage.feed(
        OpenBatch=[Opened(batch=0, version=0)],
        Claim=[micro_step(0), micro_step(1), Exhausted()],
        Complete=[Ok()],
        Collect=[Handed(cells=(), gradients=(), executions=2, loss=1.0)],
        Collected=[Ok()],
        CloseBatch=[Ok()],
    )
    stage.agent("training", "idle")
    with SnapshotSource("policy") as source:
        core = stage.core(source, tmp_path)
        core.publish()
        core.train()
    assert len(feed.of(Complete)) == 2
    assert len(feed.of(CloseBatch)) == 1
    assert len(feed.of(Claim)) == 3
    assert len(feed.of(Collect)) == 1


def test_a_core_recalled_while_its_batch_still_grows_leaves_it(
    stage: Stage, micro_step: Callable[..., MicroStep], tmp_path: Path
) -> None:
    feed = stage.feed(
        OpenBatch=[Opened(batch=0, version=0)],
        Claim=[micro_step(0), Wait(reason="no micro-step is packed yet", retry=0.01)],
        Complete=[Ok()],
    )
    stage.agent("training", "training", "training", "idle")
    with SnapshotSource("policy") as source:
        core = stage.core(source, tmp_path)
        core.publish()
        core.train()
    assert stage.replica.stepped == []
    assert not feed.of(Collect)


def test_a_stop_interrupts_the_core_between_micro_steps(
    stage: Stage, micro_step: Callable[..., MicroStep], tmp_path: Path
) -> None:
    stage.feed(OpenBatch=[Opened(batch=0, version=0)], Claim=[micro_step(0)], Complete=[Ok()])
    stage.agent("training", "training", "stop")
    with SnapshotSource("policy") as source:
        core = stage.core(source, tmp_path)
        core.publish()
        with pytest.raises(Stopped):
            core.train()
    assert stage.replica.stepped == []
