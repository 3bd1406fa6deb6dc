"""The cell state machine: which role may follow which, how long a role may last, how often an edge is tried.

STARTING ──▶ ROLLOUT ──▶ DRAINING ──▶ ENTERING ──▶ TRAINING ──▶ LEAVING ──▶ REFRESHING ──▶ ROLLOUT
                └─────────────────────────────────────────────────────────────▲   (new weights, no training)
every role ──▶ FAILED ──▶ REFRESHING | ROLLOUT
every role but STARTING ──▶ FENCED ──▶ FAILED   (its agent was silent for a lease; it is heard again)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

from gyre_sched.config import SchedConfig
from gyre_sched.errors import IllegalEdge
from gyre_sched.protocol import CellState, CellStatus, EnterRollout, EnterTraining, Refresh, Role

_LOST = frozenset({Role.FAILED, Role.FENCED})
EDGES: MappingProxyType[Role, frozenset[Role]] = MappingProxyType(
    {
        Role.STARTING: frozenset({Role.ROLLOUT, Role.REFRESHING, Role.FAILED}),
        Role.ROLLOUT: _LOST | {Role.DRAINING, Role.REFRESHING},
        Role.DRAINING: _LOST | {Role.ENTERING, Role.ROLLOUT},  # ROLLOUT: the drain was cancelled
        Role.ENTERING: _LOST | {Role.TRAINING},
        Role.TRAINING: _LOST | {Role.LEAVING},
        Role.LEAVING: _LOST | {Role.REFRESHING},
        Role.REFRESHING: _LOST | {Role.ROLLOUT},
        Role.FAILED: frozenset({Role.REFRESHING, Role.ROLLOUT, Role.FENCED}),
        Role.FENCED: frozenset({Role.FAILED}),  # heard again
    }
)

PASSING = (Role.STARTING, Role.DRAINING, Role.ENTERING, Role.LEAVING, Role.REFRESHING)  # roles that have a deadline
MOVING = (Role.DRAINING, Role.ENTERING)  # between rollout and training: at most one cell at a time


def time_limit(role: Role, config: SchedConfig) -> float | None:
    """Seconds a cell may stay in `role`; None for roles without a deadline."""
    return {
        Role.STARTING: config.start_timeout,
        Role.DRAINING: config.drain_timeout,
        Role.ENTERING: config.enter_timeout,
        Role.LEAVING: config.return_timeout,
        Role.REFRESHING: config.return_timeout,
    }.get(role)


@dataclass(slots=True)
class Pending:
    """A request to the cell's agent that is not answered yet."""

    call: int
    request: EnterTraining | EnterRollout | Refresh
    refused: bool = False  # the agent was fenced, or did not know its registration yet


@dataclass(slots=True)
class Cell:
    """One cell as the scheduler knows it. `since` and `retry_at` are times of the events' clock."""

    index: int
    role: Role = Role.STARTING
    since: float = 0.0
    engine: str = ""
    url: str = ""
    kv: tuple[str, ...] = ()  # where its KV pages are asked for
    agent: str = ""
    instance: str = ""  # of the agent's process
    registration: int = 0  # the last one given out
    capacity: int = 0  # C_e
    version: int = 0
    engine_alive: bool = False
    trainer_alive: bool = False
    trainer_lost: float | None = None  # when the trainer was last seen to die
    routable: bool = False  # the agent says that a failed engine is back, refreshed and probed
    suspect: bool = False  # a role change failed half-way: only one that succeeds makes the engine trusted again
    trainer: str = "idle"
    state: CellState | None = None  # as its agent told it last
    retry_at: float = 0.0
    enter_failures: int = 0  # consecutive
    return_failures: int = 0
    pending: Pending | None = field(default=None)

    def move(self, to: Role, at: float) -> float:
        """Take role `to`; returns the seconds spent in the role left. Raises `IllegalEdge`."""
        if to not in EDGES[self.role]:
            allowed = ", ".join(sorted(EDGES[self.role]))
            raise IllegalEdge(f"cell {self.index} is {self.role}: expected one of {allowed} next, got {to!r}")
        seconds, self.role, self.since = at - self.since, to, at
        return seconds

    def overdue(self, at: float, config: SchedConfig) -> bool:
        """Whether the present role has lasted too long. Roles that end with an agent's answer get two heartbeats more
        than the call itself, so that the answer, which says why, comes first."""
        limit = time_limit(self.role, config)
        if limit is None:
            return False
        slack = 0.0 if self.role in (Role.STARTING, Role.DRAINING) else 2 * config.heartbeat
        return at - self.since >= limit + slack

    def barred(self, config: SchedConfig) -> bool:
        """Entering training failed too often: the cell stays in rollout."""
        return self.enter_failures >= config.attempts

    def may_train(self, config: SchedConfig) -> bool:
        """It has a trainer, which is up, and entering did not fail too often."""
        return self.index < config.with_trainer and self.trainer_alive and not self.barred(config)

    def mending(self, at: float, config: SchedConfig) -> bool:
        """Failed, but its agent is there and may still bring it back: worth waiting for before a burst."""
        told = self.role is Role.FAILED and bool(self.agent)
        return told and not self.lost(config) and at - self.since < config.return_timeout

    def lost(self, config: SchedConfig) -> bool:
        """Returning to rollout failed too often: only a new agent brings the cell back."""
        return self.role is Role.FAILED and self.return_failures >= config.attempts

    def status(self, at: float, config: SchedConfig) -> CellStatus:
        """For an operator."""
        return CellStatus(
            cell=self.index,
            role=self.role,
            since=at - self.since,
            version=self.version,
            engine_alive=self.engine_alive,
            trainer_alive=self.trainer_alive,
            trains=self.index < config.with_trainer,
        )
