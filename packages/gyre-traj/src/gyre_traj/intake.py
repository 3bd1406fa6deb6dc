"""The intake protocol: finished executions in, their fates out. Any feed serves it, any runner calls it.

Submissions are idempotent by execution id: a second one is answered `Accepted(duplicate=True)` and changes nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec


class Ending(StrEnum):
    """How an execution ended, as far as training is concerned."""

    SCORED = "scored"
    EVALUATOR_FAILED = "evaluator_failed"  # excluded from batch and baseline
    NOTHING_TO_SCORE = "nothing_to_score"  # reward-0 placeholder: in batch and baseline, no target tokens
    ABORTED = "aborted"  # stopped by an operator or an infrastructure failure: excluded


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner says of a terminated execution."""

    ending: Ending
    score: float | None = None  # in [0, 1]; set exactly when ending is SCORED
    detail: str = ""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A finished execution. Reply: `Accepted`."""

    execution: str
    task: str
    group: str
    group_size: int  # the group is complete when so many were submitted, replaced ones not counted
    log: str  # path of its call log
    outcome: Outcome
    seconds: float = 0.0  # wall-clock from dispatch to termination
    burst: int = 0
    # The execution dispatched in this one's place, in the same group; empty: none. Only an execution that no batch may
    # take is replaced (ABORTED, EVALUATOR_FAILED). It is excluded and does not count towards the group's completion.
    replaced_by: str = ""


class Fates(msgspec.Struct, frozen=True, kw_only=True, tag="fates"):
    """Ask for the fates decided after the first `since`. Reply: `FateList`."""

    since: int = 0


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    execution: str
    duplicate: bool = False


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an execution: trained in `step`, or excluded (`step` None) for `reason`."""

    execution: str
    step: int | None = None
    reason: str = ""


class FateList(msgspec.Struct, frozen=True, kw_only=True, tag="fate_list"):
    fates: tuple[Fate, ...]
    total: int  # pass as the next `since`


PROTOCOL = ("intake", 1)  # raised when a message of an older version would be misread
Request = Annotated[Submit | Fates, PROTOCOL]
Reply = Annotated[Accepted | FateList, PROTOCOL]
