"""A complete group becomes rows: logs read, trees built, trajectories selected, advantages and weights given.

Everything here is a function of the group, the config and the run's seed, so a replayed batch is the same batch. It
reads files and takes time: the service calls it in a thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum

from gyre_train.errors import FeedError
from gyre_train.feed.buffer import Group
from gyre_train.feed.config import FeedConfig
from gyre_traj.admission import admit
from gyre_traj.advantage import group_advantages
from gyre_traj.errors import TrajError
from gyre_traj.forest import unique_tokens
from gyre_traj.intake import Ending, Submit
from gyre_traj.log import read_log
from gyre_traj.rows import Row
from gyre_traj.selection import Selection, select
from gyre_traj.tree import Tree
from gyre_traj.weights import Counting, weigh

log = logging.getLogger(__name__)

_COUNTING = {"once": Counting.EXECUTION, "per_trajectory": Counting.TRAJECTORY}


class Fated(StrEnum):
    """What an execution is to its batch."""

    TRAINED = "trained"  # in E
    PLACEHOLDER = "placeholder"  # in E, without targets
    EXCLUDED = "excluded"  # in neither E nor the baseline


@dataclass(frozen=True, slots=True)
class PreparedExecution:
    """What an execution brings to its batch, in numbers."""

    execution: str
    fated: Fated
    reason: str = ""  # why it was excluded
    score: float = 0.0
    advantage: float = 0.0
    trajectories: int = 0  # selected
    tokens_total: int = 0  # over the selected trajectories, shared prefixes counted in each
    tokens_unique: int = 0  # over the same trajectories, shared prefixes counted once
    targets: int = 0
    version_sum: float = 0.0  # Σ version over the targets whose version is known
    versioned: int = 0  # number of those
    left_out: dict[str, int] = field(default_factory=dict)  # trainable tokens not selected, by role
    untrainable_calls: int = 0  # calls without usable log-probabilities, or never seen by the harness


@dataclass(frozen=True, slots=True)
class _Chosen:
    selection: Selection
    untrainable_calls: int


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """A group on its way into a batch."""

    name: str
    missing: int  # members that never came
    executions: tuple[PreparedExecution, ...]  # in order of execution id


def prepare_group(group: Group, config: FeedConfig, seed: int) -> tuple[PreparedGroup, list[Row]]:
    """Return the group in numbers and the rows to compute.

    A member whose call log cannot be used is excluded with the reason, from the baseline too; it does not cost the
    group its other members.
    """
    members = {m.execution: m for m in sorted(group.members, key=lambda m: m.execution)}
    chosen: dict[str, _Chosen] = {}
    broken: dict[str, str] = {}
    for execution, member in members.items():
        if member.outcome.ending is not Ending.SCORED:
            continue
        try:
            chosen[execution] = _read(member, config, seed)
        except (TrajError, FeedError) as e:
            broken[execution] = f"its call log cannot be used: {e}"
            log.error("execution %r is excluded: %s", execution, broken[execution])
    admission = admit({e: m.outcome for e, m in members.items() if e not in broken})
    values = group_advantages(list(admission.rewards.values()), std=config.advantage == "mean_std")
    advantages = dict(zip(admission.rewards, values.tolist(), strict=True))
    excluded = {**admission.excluded, **broken}

    executions: list[PreparedExecution] = []
    rows: list[Row] = []
    for execution in members:
        if execution in excluded:
            executions.append(PreparedExecution(execution, Fated.EXCLUDED, reason=excluded[execution]))
        elif execution in admission.placeholders:
            executions.append(PreparedExecution(execution, Fated.PLACEHOLDER, advantage=advantages[execution]))
        else:
            advantage = advantages[execution]
            mine = weigh(chosen[execution].selection, advantage=advantage, counting=_COUNTING[config.counting]).rows
            executions.append(_numbers(chosen[execution], mine, admission.rewards[execution], advantage))
            if advantage != 0.0 or not config.skip_zero_advantage:
                rows.extend(mine)
    return PreparedGroup(group.name, group.size - len(members), tuple(executions)), rows


def _read(member: Submit, config: FeedConfig, seed: int) -> _Chosen:
    """Read an execution's calls and choose its trajectories. Raises `TrajError`, `FeedError`."""
    calls = read_log(member.log)
    if calls.header is not None and calls.header.execution != member.execution:
        raise FeedError(f"{member.log!r} is the log of {calls.header.execution!r}")
    if calls.torn:
        log.warning("execution %r: its call log ends in %d bytes of a torn record", member.execution, calls.torn)
    tree = Tree.from_log(calls)
    selection = select(tree, config.j_max, seed)
    if not selection.targets:
        raise FeedError(f"none of its {len(tree.calls)} calls holds a token that can be trained on")
    return _Chosen(selection, len(tree.untrainable))


def _numbers(chosen: _Chosen, rows: tuple[Row, ...], score: float, advantage: float) -> PreparedExecution:
    selection = chosen.selection
    version_sum, versioned = 0, 0
    for trajectory in selection.trajectories:
        for span in (span for segment in trajectory.segments if segment.target for span in segment.versions):
            version_sum += span.version * (span.end - span.start)
            versioned += span.end - span.start
    return PreparedExecution(
        selection.execution,
        Fated.TRAINED,
        score=score,
        advantage=advantage,
        trajectories=len(selection.trajectories),
        tokens_total=sum(len(t) for t in selection.trajectories),
        tokens_unique=unique_tokens(selection.trajectories),
        targets=sum(r.targets for r in rows),
        version_sum=float(version_sum),
        versioned=versioned,
        left_out=dict(selection.left_out),
        untrainable_calls=chosen.untrainable_calls,
    )
