"""The process plan: which processes a run has, in the order they start.

scheduler, feed, proxy ─▶ cell agents (all at once; each brings up an engine and a trainer) ─▶ runner

A standalone engine is a cell without a trainer, numbered after the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from gyre_launch.config import Resolved


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One process the launcher starts."""

    name: str
    argv: tuple[str, ...]
    stage: int  # a stage starts when all processes of the one before are ready
    ready_within: float  # seconds


_MARGIN = 30.0  # seconds an agent has to say what its own deadlines found


def plan(resolved: Resolved) -> tuple[Planned, ...]:
    """The processes of a run. An agent is ready when engine and trainer are, each within its own time."""
    config = Path(resolved.run.dir) / "config.toml"
    engine, sched = resolved.engine, resolved.sched
    cell_timeout = max(engine.start_timeout + engine.warm_timeout, sched.start_timeout) + _MARGIN

    def ours(name: str, module: str, *arguments: str, stage: int, within: float) -> Planned:
        argv = (sys.executable, "-m", module, *arguments, "--config", str(config))
        return Planned(name=name, argv=argv, stage=stage, ready_within=within)

    agents = [
        Planned(
            name=f"cell-{cell}",
            argv=(sys.executable, "-m", "gyre_sched.cli", "agent", "--config", str(config), "--cell", str(cell)),
            stage=1,
            ready_within=cell_timeout,
        )
        for cell in range(sched.cells + sched.standalone)
    ]
    return (
        ours("scheduler", "gyre_sched.cli", "serve", stage=0, within=60),
        ours("feed", "gyre_train.cli", "feed", stage=0, within=60),
        ours("proxy", "gyre_agent_proxy.cli", "serve", stage=0, within=60),
        *agents,
        ours("runner", "gyre_agent_proxy.cli", "runner", stage=2, within=60),
    )
