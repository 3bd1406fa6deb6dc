"""The schedules that are compared, by name."""

from __future__ import annotations

from typing import Any

import msgspec

from gyre_sched.config import SchedConfig


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """How cells are used. `settings` are keys of [sched]; without `policy` the idle-cells baseline runs."""

    says: str
    per_burst: int = 1
    settings: dict[str, Any] = {}
    training: dict[str, Any] = {}  # keys of [training] that go with it
    policy: bool = True
    tuned: bool = False  # the best number of trainers is searched for

    def config(self, cells: int, standalone: int, slots: int, trainers: int | None = None) -> SchedConfig:
        """[sched] of the simulated run; no time limit is ever reached. Raises `ValueError`."""
        never = 1e12
        settings = {**self.settings, **({} if trainers is None else {"trainers": trainers})}
        return SchedConfig(
            **{
                "cells": cells,
                "standalone": standalone,
                "capacity": slots,
                "lease": never,
                "start_timeout": never,
                "drain_timeout": never,
                "enter_timeout": never,
                "return_timeout": never,
                "settle_timeout": never,
                **settings,
            }
        )


def _elastic(says: str, per_burst: int, **settings: Any) -> Schedule:
    return Schedule(says=says, per_burst=per_burst, settings=settings)


def _asynchronous(says: str, *, tuned: bool, training: dict[str, Any], **settings: Any) -> Schedule:
    return Schedule(says=says, settings={"schedule": "async", **settings}, training=training, tuned=tuned)


_WHOLE = {"streaming": False, "membership": "dispatch"}
_BOUND = {"streaming": True, "membership": "dispatch"}  # staleness 1, as two batches a burst have
_FREE = {"streaming": True, "membership": "arrival"}  # stragglers go into later batches, however stale

SCHEDULES: dict[str, Schedule] = {
    "colocate": Schedule(says="Colocate", settings={"schedule": "colocate"}),
    "colocate-idle": Schedule(says="Colocate, idle cells train, nothing moves", policy=False),
    "async-half": _asynchronous("Async one-step-off, half split", tuned=False, training=_WHOLE),
    "async-best": _asynchronous("Async one-step-off, best split", tuned=True, training=_WHOLE),
    "async-continuous-half": _asynchronous(
        "Async continuous, half split", tuned=False, training=_BOUND, admission="continuous"
    ),
    "async-continuous-best": _asynchronous(
        "Async continuous, best split", tuned=True, training=_BOUND, admission="continuous"
    ),
    "async-free-best": _asynchronous(
        "Async continuous, best split, no bound", tuned=True, training=_FREE, admission="continuous"
    ),
    "elastic-1": _elastic("Elastic E1, water level", 1, core_stays=False),
    "elastic-1-deadline": _elastic("Elastic E1, + backlog deadline", 1, core_stays=False, leave="deadline"),
    "elastic-2": _elastic("Elastic E2, water level", 2, core_stays=False),
    "elastic-2-deadline": _elastic("Elastic E2, + backlog deadline", 2, core_stays=False, leave="deadline"),
    "elastic-2-longest": _elastic("Elastic E2, + longest group first", 2, core_stays=False, order="longest"),
}
