"""The trajectory buffer: submissions in, complete groups out, in the order in which they became complete.

    Submit ──▶ group collecting ──all members, or group_timeout──▶ complete: number n
                                                                   batch k is made of groups [k·G, (k+1)·G)

Membership of a batch is therefore decided by arrival alone, whenever the batch is opened, and again the same when it is
replayed. A group none of whose members may be trained keeps its place: a run of N batches needs N·G groups, no more.
An execution that another one replaces is excluded at once and is no member: its group waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_train.errors import FeedError
from gyre_traj.admission import admit, check_outcome
from gyre_traj.errors import BadOutcome
from gyre_traj.intake import Accepted, Ending, Fate, FateList, Submit


@dataclass(slots=True)
class Group:
    """The executions of one task that are compared with each other."""

    name: str
    task: str
    size: int  # members dispatched
    since: float  # arrival of its first member
    members: list[Submit] = field(default_factory=list)  # in order of arrival
    complete: bool = False


class Buffer:
    """What was submitted and what became of it. `now` is seconds on any monotonic clock."""

    def __init__(self, *, group_timeout: float | None = None, max_groups: int = 4096) -> None:
        self.complete: list[Group] = []  # in order of completion; entry n is group number n
        self.retired = 0  # groups [0, retired) were in a batch that was closed
        self._timeout = group_timeout
        self._max_groups = max_groups
        self._groups: dict[str, Group] = {}
        self._seen: set[str] = set()
        self._fates: list[Fate] = []
        self._fated: set[str] = set()
        self.trained = 0
        self.excluded = 0

    def submit(self, message: Submit, now: float) -> Accepted:
        """Take a finished execution in; a second submission changes nothing. Raises `FeedError`."""
        if message.execution in self._seen:
            return Accepted(execution=message.execution, duplicate=True)
        check(message)
        group = self._groups.get(message.group)
        if group is not None and message.group_size != group.size:
            raise FeedError(
                f"execution {message.execution!r} says its group {group.name!r} has {message.group_size!r} members, "
                f"an earlier one said {group.size!r}; a group's size may not change"
            )
        if message.replaced_by:
            self._seen.add(message.execution)
            (reason,) = admit({message.execution: message.outcome}).excluded.values()
            self.exclude(message.execution, f"replaced by {message.replaced_by!r}: {reason}")
            return Accepted(execution=message.execution)
        if group is None:
            if len(self._groups) - self.retired >= self._max_groups:
                raise FeedError(
                    f"{self._max_groups} groups wait to be trained already; submit {message.execution!r} again later, "
                    "or raise feed.max_groups"
                )
            group = Group(message.group, message.task, message.group_size, now)
        self._groups[group.name] = group
        self._seen.add(message.execution)
        if group.complete:
            self.exclude(message.execution, f"it came after its group {group.name!r} was closed")
            return Accepted(execution=message.execution)
        group.members.append(message)
        if len(group.members) == group.size:
            self._close(group)
        return Accepted(execution=message.execution)

    def expire(self, now: float) -> tuple[Group, ...]:
        """Close groups whose members have not all come within the timeout; returns those that were."""
        if self._timeout is None:
            return ()
        late = tuple(g for g in self._groups.values() if not g.complete and now > g.since + self._timeout)
        for group in late:
            self._close(group)
        return late

    def _close(self, group: Group) -> None:
        group.complete = True
        self.complete.append(group)

    def retire(self, number: int) -> None:
        """The batches of the groups below `number` are closed; their members are kept for a replay."""
        self.retired = max(self.retired, number)

    # --- fates -----------------------------------------------------------------------------------------------------

    def exclude(self, execution: str, reason: str) -> None:
        """The execution is in no batch and no baseline."""
        if self._decide(Fate(execution=execution, reason=reason)):
            self.excluded += 1

    def train(self, execution: str, step: int, reason: str = "") -> None:
        """The execution was part of E in optimizer step `step` (the first is 1)."""
        if self._decide(Fate(execution=execution, step=step, reason=reason)):
            self.trained += 1

    def _decide(self, fate: Fate) -> bool:
        """Every execution ends once: a replayed batch says again what is known already."""
        if fate.execution in self._fated:
            return False
        self._fated.add(fate.execution)
        self._fates.append(fate)
        return True

    def fates(self, since: int) -> FateList:
        """The fates decided after the first `since`."""
        if since < 0:
            raise FeedError(f"fates are counted from 0, got since={since!r}")
        return FateList(fates=tuple(self._fates[since:]), total=len(self._fates))


def admitted(message: Submit) -> bool:
    """Whether the ending lets an execution into its batch: scored, or a placeholder."""
    return message.outcome.ending in (Ending.SCORED, Ending.NOTHING_TO_SCORE)


def check(message: Submit) -> None:
    """Refuse a submission that contradicts itself. Raises `FeedError`."""
    try:
        check_outcome(message.outcome)
    except BadOutcome as e:
        raise FeedError(f"execution {message.execution!r}: {e}") from e
    if message.group_size < 1:
        raise FeedError(f"execution {message.execution!r} has group_size {message.group_size!r}; it is at least 1")
    if message.replaced_by and admitted(message):
        raise FeedError(
            f"execution {message.execution!r} ended as {message.outcome.ending.value!r} and is replaced by "
            f"{message.replaced_by!r}; only one that no batch may take can be replaced"
        )
    if not (message.execution and message.group):
        raise FeedError("a submission names its execution and its group; one of them is empty")
