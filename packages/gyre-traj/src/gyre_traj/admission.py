"""Admission: which members of a group enter the batch and its baseline, and why the others do not.

scored             in the batch and the baseline
nothing to score   placeholder: reward 0, in the batch (its |E|) and the baseline, no target tokens
evaluator failed   excluded from both: a failure to score is not a zero
aborted            excluded from both
too old            excluded from both: sampled by weights further back than `max_staleness` versions
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gyre_traj.errors import BadOutcome
from gyre_traj.intake import Ending, Outcome


@dataclass(frozen=True, slots=True)
class Admission:
    """What a group brings to its batch. `rewards` holds members and placeholders, in the order they came."""

    rewards: dict[str, float]  # execution -> reward in [0, 1]
    excluded: dict[str, str]  # execution -> reason
    placeholders: tuple[str, ...]  # executions of `rewards` that bring no target tokens


def check_outcome(outcome: Outcome) -> None:
    """Raise `BadOutcome` unless a score is there exactly when the ending is SCORED, and is in [0, 1]."""
    if outcome.ending is not Ending.SCORED:
        if outcome.score is not None:
            raise BadOutcome(f"ending {outcome.ending.value!r} has no score, got {outcome.score!r}; send score=None")
        return
    if outcome.score is None or not math.isfinite(outcome.score) or not 0.0 <= outcome.score <= 1.0:
        raise BadOutcome(
            f"a scored outcome needs a score in [0, 1], got {outcome.score!r}; "
            f"send ending {Ending.EVALUATOR_FAILED.value!r} when the evaluator gave none"
        )


def admit(
    outcomes: Mapping[str, Outcome],
    *,
    oldest: Mapping[str, int] | None = None,
    version: int = 0,
    max_staleness: int | None = None,
) -> Admission:
    """Sort a group's outcomes by execution id into members, placeholders and exclusions.

    `oldest` gives the oldest weight version an execution was sampled by (`Tree.versions`); with `max_staleness` it is
    excluded when `version - oldest > max_staleness`. One that `oldest` does not name has no known age, and stays.
    Raises `BadOutcome`.
    """
    for outcome in outcomes.values():
        check_outcome(outcome)
    rewards: dict[str, float] = {}
    excluded: dict[str, str] = {}
    placeholders: list[str] = []
    for execution, outcome in outcomes.items():
        age = version - oldest[execution] if oldest is not None and execution in oldest else 0
        if outcome.ending is Ending.NOTHING_TO_SCORE:
            rewards[execution] = 0.0
            placeholders.append(execution)
        elif outcome.ending is not Ending.SCORED:
            excluded[execution] = outcome.ending.value.replace("_", " ") + (
                f": {outcome.detail}" if outcome.detail else ""
            )
        elif max_staleness is not None and age > max_staleness:
            excluded[execution] = f"too old: sampled {age} versions ago, allowed {max_staleness}"
        else:
            assert outcome.score is not None  # noqa: S101 - checked above
            rewards[execution] = outcome.score
    return Admission(rewards, excluded, tuple(placeholders))
