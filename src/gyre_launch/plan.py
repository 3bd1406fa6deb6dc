"""The process plan: which processes a run has, in the order they start.

scheduler, feed, proxy ─▶ cell agents (all at once; each brings up an engine and a trainer) ─▶ runner
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One process the launcher starts."""

    name: str
    argv: tuple[str, ...]
    stage: int  # a stage starts when all processes of the one before are ready
    ready_within: float  # seconds


def plan(config: Path, cells: int, cell_timeout: float) -> tuple[Planned, ...]:
    """The processes of a run with `cells` cells whose resolved config is the file `config`."""

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
        for cell in range(cells)
    ]
    return (
        ours("scheduler", "gyre_sched.cli", "serve", stage=0, within=60),
        ours("feed", "gyre_train.cli", "feed", stage=0, within=60),
        ours("proxy", "gyre_agent_proxy.cli", "serve", stage=0, within=60),
        *agents,
        ours("runner", "gyre_agent_proxy.cli", "runner", stage=2, within=60),
    )
