"""The trainer process of a cell: `gyre-train replica --config F --cell I`.

The main thread trains; a second one renews leases; a third ends the process when its parent goes. SIGTERM interrupts
whatever is being done: sums are lost, which their leases know, and files are whole or absent.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any, NoReturn

from gyre_train.config import ModelConfig, TrainConfig
from gyre_train.errors import TrainError
from gyre_train.feed.config import FeedConfig
from gyre_traj.errors import TrajError
from gyre_transport import endpoint
from gyre_transport.config import section
from gyre_transport.errors import ConfigError, TransportError
from gyre_transport.process import follow_parent, ready
from gyre_transport.run import Context

log = logging.getLogger(__name__)

CORE = 0  # the core cell's index
_POLL = 2.0  # seconds an idle trainer's report may wait at the agent


def main(config: Path, cell: int) -> int:
    """Run the trainer of `cell` until ordered to stop; returns the exit code."""
    follow_parent()
    signal.signal(signal.SIGTERM, _terminated)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        _run(Context(config), cell)
    except (TrainError, TrajError, TransportError) as e:
        log.error("the trainer of cell %d ends: %s: %s", cell, type(e).__name__, e)
        return 1
    return 0


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(0)


def _run(context: Context, cell: int) -> None:
    endpoint.configure(context.transport)
    train = section(context.data, "train", TrainConfig)
    model = section(context.data, "model", ModelConfig)

    if train.loss.kl_coef and section(context.data, "feed", FeedConfig).skip_zero_advantage:
        raise ConfigError("train.loss.kl_coef pulls on every target: set feed.skip_zero_advantage = false beside it")

    from gyre_train import architecture, protocol
    from gyre_train.links import Agent, LeaseKeeper, Link, Stopped

    arch = architecture.read(model.path)

    from gyre_train.replica import Replica, leave_world  # torch and Megatron: tens of seconds

    bus = context.bus
    patience = train.agent_deadline
    agent = Agent(bus.address(f"agent-{cell}"), cell, patience=patience)
    feed = Link("feed", bus.address("feed"), protocol.Reply, patience=patience)
    keeper = LeaseKeeper(bus.address("feed"), cell)
    keeper.start()
    source = None
    try:
        replica = Replica(train, arch, optimizer=cell == CORE, steps=context.run.steps)
        loop: Any
        if cell == CORE:
            from gyre_train.core import Core
            from gyre_train.links import announce
            from gyre_transport.snapshot import SnapshotSource

            resume(replica, Path(model.path), context.dir.checkpoints)
            source = SnapshotSource(model.name)
            scheduler = bus.address("scheduler")
            loop = Core(
                replica,
                agent,
                feed,
                keeper,
                source,
                lambda version, manifest: announce(scheduler, version, manifest, patience=patience),
                cell=cell,
                directory=context.dir,
                model=Path(model.path),
            )
            loop.publish()
        else:
            from gyre_train.satellite import Satellite

            loop = Satellite(replica, agent, feed, keeper, cell=cell)
        ready(cell=cell, version=replica.version)
        log.info("cell %d is ready: version %d, %s, %d thread(s)", cell, replica.version, train.dtype, train.threads)
        try:
            while (want := agent.order("idle", wait=_POLL)) != "stop":
                if want == "training":
                    loop.train()
                    replica.release()
        except Stopped:
            log.info("stopped in the middle of a batch")
        loop.finish()
    finally:
        keeper.end()
        if source is not None:
            source.close()
        feed.close()
        agent.close()
        leave_world()


def resume(replica: Any, model: Path, checkpoints: Path) -> None:
    """Load the newest checkpoint of the run, else its model. Raises `CheckpointError`, `WeightsError`."""
    from gyre_train import checkpoint, hf

    if (path := checkpoint.latest(checkpoints)) is None:
        replica.load_weights(hf.read_folder(model), version=0)
        return
    meta = checkpoint.read_meta(path)
    replica.load_state(meta, {part: checkpoint.read_part(path, part) for part in meta.parts})
    log.info("resumed from %s", path)
