"""Many call logs -> rows of a batch, one log in memory at a time.

    outcomes -> groups -> admission -> advantages              known before a log is read
    log -> tree -> selection -> weights -> rows                 log by log
    rows -> a file for another stack                           as they come; `units` is known from a first pass

Selection is a function of log and seed, so a second pass over the logs gives the same rows: that is how totals are
known before the first row is written, without keeping any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyre_traj.adapters import Example, examples, split
from gyre_traj.admission import admit, check_outcome
from gyre_traj.advantage import group_advantages
from gyre_traj.errors import BadLine, BadOutcome, LogError
from gyre_traj.intake import Ending, Outcome
from gyre_traj.jsonl import read_lines
from gyre_traj.log import read_log
from gyre_traj.roles import DEFAULT_PRIORITY, RolePriority
from gyre_traj.selection import select
from gyre_traj.tree import Tree
from gyre_traj.weights import Aggregation, Counting, target_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How rows are drawn and weighed."""

    j_max: int | None = 5
    seed: int = 0
    priority: RolePriority = DEFAULT_PRIORITY
    counting: str = Counting.EXECUTION.value
    aggregation: str = Aggregation.TWO_LEVEL.value
    norm: float = 1.0
    std: bool = False


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an outcomes file."""

    execution: str
    group: str
    score: float | None = None  # in [0, 1]
    ending: Ending | None = None  # None: scored
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of the executions before their logs are read."""

    group: Mapping[str, str]  # of each execution with an outcome
    reward: Mapping[str, float]  # members and placeholders
    advantage: Mapping[str, float]  # members and placeholders
    placeholders: frozenset[str]
    excluded: Mapping[str, str]  # execution -> reason


class Totals(msgspec.Struct, kw_only=True):
    """What came of a pass over the logs."""

    logs: int = 0
    executions: int = 0  # with rows
    rows: int = 0
    targets: int = 0
    tokens: int = 0  # of the rows
    longest_prompt: int = 0
    longest_response: int = 0
    units: float = 0.0  # the batch's denominator
    placeholders: list[str] = []
    excluded: dict[str, str] = {}  # execution -> reason
    without_rows: list[str] = []  # a log and an outcome, but nothing to train on: in the units all the same
    without_log: list[str] = []  # scored, in the baseline, but no log was given
    left_out: dict[str, int] = {}  # role -> trainable tokens that nobody drew


def read_outcomes(path: str | Path) -> dict[str, Scored]:
    """Read a JSONL file of `Scored`. Raises `BadLine`, `BadOutcome`."""
    found: dict[str, Scored] = {}
    for number, line in read_lines(path):
        where = f"{str(path)!r}, line {number}"
        try:
            scored = msgspec.convert(line, Scored)
        except msgspec.ValidationError as error:
            raise BadLine(f"{where}: {error}; expected execution, group, and score or ending") from error
        if scored.execution in found:
            raise BadLine(f"{where}: a second outcome of {scored.execution!r}; an execution ends once")
        try:
            check_outcome(_outcome(scored))
        except BadOutcome as error:
            raise BadOutcome(f"{where}: {error}") from error
        found[scored.execution] = scored
    return found


def plan(outcomes: Iterable[Scored], *, std: bool) -> Plan:
    """Form groups, admit their members and compute advantages. Raises `BadOutcome`."""
    groups: dict[str, dict[str, Outcome]] = {}
    for scored in outcomes:
        groups.setdefault(scored.group, {})[scored.execution] = _outcome(scored)
    group: dict[str, str] = {}
    rewards: dict[str, float] = {}
    advantages: dict[str, float] = {}
    placeholders: set[str] = set()
    excluded: dict[str, str] = {}
    for name, members in groups.items():
        admission = admit(members)
        group |= dict.fromkeys(members, name)
        rewards |= admission.rewards
        placeholders |= set(admission.placeholders)
        excluded |= admission.excluded
        values = group_advantages(list(admission.rewards.values()), std=std)
        advantages |= dict(zip(admission.rewards, map(float, values), strict=True))
    return Plan(group, rewards, advantages, frozenset(placeholders), excluded)


def rows(
    logs: Sequence[str | Path],
    known: Plan | None,
    choices: Choices,
    totals: Totals,
    progress: Callable[[int], None] = lambda logs: None,
) -> Iterator[Example]:
    """Yield the rows of the logs' executions and count them in `totals`; `progress` is told the logs done.

    Without a plan every execution has advantage 1 and no reward. An execution without an outcome is excluded. A
    placeholder counts in the units and brings no rows, with a log or without. A scored execution without a log keeps
    its place in the baseline, and counts nowhere else. Raises `LogError`, `NotALog`, `CorruptLog`, `BrokenCall`.
    """
    seen: dict[str, str] = {}
    totals.placeholders = sorted(known.placeholders) if known else []
    totals.excluded = dict(known.excluded) if known else {}
    totals.units += len(totals.placeholders) * target_weights([], choices.aggregation, choices.norm)[1]
    for done, path in enumerate(logs, 1):
        tree = Tree.from_log(read_log(path))
        execution = tree.execution
        if execution in seen:
            raise LogError(
                f"execution {execution!r} is in {seen[execution]!r} and in {str(path)!r}; give each log once"
            )
        seen[execution] = str(path)
        totals.logs += 1
        if known is None or (execution in known.advantage and execution not in known.placeholders):
            yield from _execution(tree, known, choices, totals)
        elif execution not in known.group:
            totals.excluded[execution] = "no outcome"
        progress(done)
    if known is not None:
        totals.without_log = sorted(set(known.reward) - known.placeholders - set(seen))


def _execution(tree: Tree, known: Plan | None, choices: Choices, totals: Totals) -> Iterator[Example]:
    selection = select(tree, choices.j_max, choices.seed, choices.priority)
    made, units = examples(
        selection,
        advantage=known.advantage[tree.execution] if known else 1.0,
        group=known.group[tree.execution] if known else tree.execution,
        reward=known.reward[tree.execution] if known else None,
        tree=tree,
        first_trajectory=totals.rows,
        counting=choices.counting,
        aggregation=choices.aggregation,
        norm=choices.norm,
    )
    totals.units += units
    totals.executions += bool(made)
    if not made:
        totals.without_rows.append(tree.execution)
    for role, count in selection.left_out.items():
        totals.left_out[role] = totals.left_out.get(role, 0) + count
    for example in made:
        part = split(example.row)
        totals.rows += 1
        totals.targets += int(part.mask.sum())
        totals.tokens += len(example.row.ids)
        totals.longest_prompt = max(totals.longest_prompt, len(part.prompt))
        totals.longest_response = max(totals.longest_response, len(part.response))
        yield example


def _outcome(scored: Scored) -> Outcome:
    return Outcome(ending=scored.ending or Ending.SCORED, score=scored.score, detail=scored.detail)
