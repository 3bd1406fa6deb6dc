"""The [sched] section of a run's config."""

from __future__ import annotations

import msgspec


class SchedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sched]: all durations in seconds. Invalid values raise `ConfigError` when the section is read."""

    cells: int = 2
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

    def __post_init__(self) -> None:
        for name in ("cells", "capacity", "attempts", "stay_behind"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not value > 0:
                raise ValueError(f"{field.name} must be a positive number of seconds, got {value!r}")
        if self.lease < 2 * self.heartbeat:
            raise ValueError(f"lease ({self.lease!r}) must be at least two heartbeats ({self.heartbeat!r})")
