"""What is coming: when the burst will have ended, and whether those who train will be done by then.

The backlog-deadline rule: by the water level the next cell may leave rollout; it need not as long as the cells in
training finish what there is to train, which counts only data that exists, before the predicted end of the burst.
Engines that stay are less full, so they answer faster, and executions are moved less.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_sched.config import SchedConfig
from gyre_sched.protocol import Role
from gyre_sched.state import State


@dataclass(frozen=True, slots=True)
class Outlook:
    """None where nothing is known yet: then the water level alone decides."""

    work_left: float  # in the feed's unit
    pace: float | None  # of it, a second and cell
    trainers: int
    train_seconds: float | None  # until those in training have done it
    burst_seconds: float | None  # until the last execution has ended
    known: int  # past durations that this was taken from

    def keeps_up(self, within: float) -> bool:
        """Whether the cells in training are done within this share of the time left."""
        if self.train_seconds is None or self.burst_seconds is None:
            return False
        return self.train_seconds <= self.burst_seconds * within

    def numbers(self) -> dict[str, float | int | str | None]:
        """For the journal."""
        return {
            "work_left": self.work_left,
            "pace": self.pace,
            "trainers": self.trainers,
            "train_seconds": self.train_seconds,
            "burst_seconds": self.burst_seconds,
            "durations": self.known,
        }


def outlook(state: State, at: float, config: SchedConfig) -> Outlook:
    """As seen at `at`."""
    left = state.backlog.work_left if state.backlog else 0.0
    trainers, pace = len(state.by_role[Role.TRAINING]), state.pace.rate
    seconds = left / (pace * trainers) if pace and trainers else None
    return Outlook(left, pace, trainers, seconds, burst_seconds(state, at, config), len(state.durations))


def burst_seconds(state: State, at: float, config: SchedConfig) -> float | None:
    """Until the last unfinished execution has ended: each that runs lasts for its quantile given its age, those that
    wait start when slots fall free, a whole round later the more rounds they make. None without past durations."""
    whole = state.durations.quantile(config.leave_quantile)
    if whole is None:
        return None
    if not state.water:
        return 0.0
    end = state.durations.longest_remaining(state.running, at, config.leave_quantile)
    waiting = state.queued
    if waiting:
        end = max(end, whole * -(-waiting // max(1, state.capacity)))
    return end
