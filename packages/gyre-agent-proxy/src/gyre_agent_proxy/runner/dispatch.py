"""What a burst dispatches: groups of executions, each group on one task."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from gyre_transport.run import BatchConfig


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One execution to dispatch."""

    execution: str  # b<burst>-g<group>-e<index>
    task: str
    group: str  # b<burst>-g<group>


def order(tasks: Sequence[str], seed: int | None) -> list[str]:
    """The order in which groups take tasks: shuffled by `seed`, or as listed (None)."""
    names = list(tasks)
    if seed is not None:
        random.Random(seed).shuffle(names)  # noqa: S311
    return names


def in_order(planned: Sequence[Planned], groups: Sequence[int], size: int) -> list[Planned]:
    """`planned`, whose groups have `size` members, with its groups in the order given by their indices; none given:
    as it is."""
    return [p for g in groups for p in planned[g * size : (g + 1) * size]] if groups else list(planned)


def burst(index: int, batch: BatchConfig, names: Sequence[str]) -> list[Planned]:
    """The executions of burst `index`, group after group.

    Groups cycle over `names` and go on where the burst before ended, so a burst covers all tasks when it has as many
    groups, and over a run the tasks' numbers of groups differ by one at most.
    """
    groups = batch.groups * batch.per_burst
    planned = []
    for g in range(groups):
        task = names[(index * groups + g) % len(names)]
        group = f"b{index}-g{g:02d}"
        planned += [Planned(execution=f"{group}-e{e}", task=task, group=group) for e in range(batch.group_size)]
    return planned
