"""The [sched] section of a run's config."""

from __future__ import annotations

from typing import Literal

import msgspec

from gyre_sched.face.config import WebConfig

_MAY_BE_ZERO = {"dwell"}


class SchedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sched]: all durations in seconds. Invalid values raise `ConfigError` when the section is read."""

    cells: int = 2
    standalone: int = 0  # engines that never train, beside the cells and numbered after them
    schedule: Literal["elastic", "colocate", "async"] = "elastic"
    trainers: int = 1  # async: the first so many cells always train, the others never
    admission: Literal["burst", "continuous"] = "burst"  # continuous: a burst may be granted before the last one ended
    max_staleness: int | None = None  # versions; None: what the schedule brings by itself (README)
    leave: Literal["water", "deadline"] = "water"  # deadline: and only if the trainers cannot keep up without the cell
    leave_quantile: float = 0.9  # of past durations, given the age: when a running execution is taken to end
    leave_within: float = 0.4  # share of the time left in which those who train must be done, or the next cell leaves
    dwell: float = 0.0  # a cell stays in rollout this long before it may leave again
    order: Literal["planned", "longest"] = "planned"  # which groups start first when not all can: longest predicted
    past: str = ""  # path of a journal or trace of earlier executions, to predict from; empty: it learns in the run
    capacity: int = 32  # executions an engine may host at once; agents report it as C_e
    heartbeat: float = 1.0  # agents beat, the scheduler ticks and repeats its routes this often
    lease: float = 30.0  # a cell whose agent is silent for longer has failed
    start_timeout: float = 900.0  # the first burst waits this long for cells that never said hello
    drain_timeout: float = 60.0  # proxies that have not acked a drain by then count as gone
    enter_timeout: float = 180.0  # engine released and trainer entered
    return_timeout: float = 300.0  # trainer left, engine resumed, refreshed and probed
    settle_timeout: float = 1800.0  # a burst that has ended but whose data never makes its batches is given up
    floor_grace: float = 60.0  # work without any routable engine: a training cell is recalled after this
    attempts: int = 3  # consecutive failures of one edge before the cell is no longer sent over it
    retry_delay: float = 1.0  # before the second attempt; doubles
    core_stays: bool = True  # the core may train on while a burst that fits the other cells is granted
    stay_behind: int = 1  # batches of earlier bursts that may be untrained then; adds as much to the staleness
    refresh_in_rollout: bool = False  # refresh engines during a burst whenever a version is published
    trainer: tuple[str, ...] = ()  # command of a cell's trainer; empty: gyre-train's replica
    web: WebConfig = WebConfig()

    @property
    def with_trainer(self) -> int:
        """The first so many cells have a trainer; what follows only samples."""
        return self.trainers if self.schedule == "async" else self.cells

    def __post_init__(self) -> None:
        for name in ("cells", "capacity", "attempts", "stay_behind", "trainers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in ("standalone", *_MAY_BE_ZERO):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not value > 0 and field.name not in _MAY_BE_ZERO:
                raise ValueError(f"{field.name} must be positive, got {value!r}")
        if not self.leave_quantile < 1:
            raise ValueError(f"leave_quantile must be less than 1, got {self.leave_quantile!r}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(
                f"max_staleness must not be negative, got {self.max_staleness!r}; leave it out for no bound"
            )
        if self.schedule == "async" and self.trainers >= self.cells + self.standalone:
            raise ValueError(
                f"an async schedule needs an engine: trainers ({self.trainers!r}) must be less than cells + standalone "
                f"({self.cells + self.standalone!r})"
            )
        if self.schedule == "async" and self.trainers > self.cells:
            raise ValueError(f"trainers ({self.trainers!r}) must not exceed cells ({self.cells!r})")
        if self.admission == "continuous" and self.schedule != "async":
            raise ValueError("continuous admission needs schedule = 'async': the others move cells between bursts")
        if self.lease < 2 * self.heartbeat:
            raise ValueError(f"lease ({self.lease!r}) must be at least two heartbeats ({self.heartbeat!r})")
