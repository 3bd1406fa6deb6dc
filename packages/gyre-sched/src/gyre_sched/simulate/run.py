"""One simulation: a scenario, a trace, a schedule; and what is measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import fmean

import msgspec

from gyre_sched.errors import ScenarioError
from gyre_sched.protocol import Role
from gyre_sched.simulate.bound import lower_bound
from gyre_sched.simulate.calibrate import calibrated
from gyre_sched.simulate.clock import Clock
from gyre_sched.simulate.elastic import PolicyDriver
from gyre_sched.simulate.idle import IdleDriver
from gyre_sched.simulate.scenario import Scenario
from gyre_sched.simulate.schedules import SCHEDULES, Schedule
from gyre_sched.simulate.trace import Run
from gyre_sched.simulate.workload import Workload


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a schedule did, in the steps measured. Times in seconds; shares are of the time of all cells and engines."""

    schedule: str
    says: str
    steps: int
    step_seconds: float
    bound_seconds: float  # the work-conserving bound
    distance: float  # step_seconds / bound_seconds - 1
    sampling: float  # share: slots of engines in rollout with an execution
    sampling_idle: float  # share: slots of engines in rollout without
    training: float  # share: cells that compute, join or step
    training_idle: float  # share: cells in training that wait
    switching: float  # share: cells between the two
    staleness_mean: float  # versions between an execution's start and its training
    staleness_max: int
    moves: float  # executions moved to another engine, a step
    switches: float  # cells that went into training, a step
    tokens: float  # unique ones an execution
    capped: float  # share of executions that a cap ended
    trainers: int | None = None  # of an async schedule
    events: int = 0


def run(
    scenario: Scenario,
    runs: Sequence[Run],
    schedule: str | Schedule,
    *,
    trainers: int | None = None,
    past: Sequence[tuple[str, float]] = (),
) -> Result:
    """Simulate `schedule`, a name in `SCHEDULES` or one of your own.

    trainers: of an async schedule; None: half of the cells, or the best number for one that is tuned. past: what
    the predictor knows beforehand, tasks and seconds. The same arguments give the same result. Raises `ScenarioError`.
    """
    scenario = calibrated(scenario, runs)
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise ScenarioError(f"expected one of the schedules {', '.join(SCHEDULES)}, got {schedule!r}")
    name, plan = (schedule, SCHEDULES[schedule]) if isinstance(schedule, str) else ("own", schedule)
    if plan.settings.get("schedule") == "async" and trainers is None:
        cells, standalone = scenario.fleet.cells, scenario.fleet.standalone
        most = cells if standalone else cells - 1
        if most < 1:
            raise ScenarioError("an async schedule needs at least two cells, got 1; or add standalone engines")
        if plan.tuned:
            tried = [_run(name, plan, scenario, runs, n, past) for n in range(1, most + 1)]
            return min(tried, key=lambda r: r.step_seconds)
        trainers = min(most, max(1, cells // 2))
    return _run(name, plan, scenario, runs, trainers, past)


def _run(
    name: str,
    plan: Schedule,
    scenario: Scenario,
    runs: Sequence[Run],
    trainers: int | None,
    past: Sequence[tuple[str, float]],
) -> Result:
    model = msgspec.structs.replace(scenario.training, **plan.training)
    scenario = msgspec.structs.replace(scenario, training=model)
    length, fleet, size = scenario.length, scenario.fleet, plan.per_burst
    first = ceil(length.warmup / size) * size
    last = first + ceil(length.steps / size) * size
    clock, workload = Clock(), Workload(scenario, runs)
    steps = last + 4 * size  # work goes on beyond what is measured, or the end would be measured too
    driver: PolicyDriver | IdleDriver
    if plan.policy:
        config = plan.config(fleet.cells, fleet.standalone, fleet.slots, trainers)
        driver = PolicyDriver(scenario, workload, clock, config, per_burst=size, steps=steps, past=past)
    else:
        driver = IdleDriver(scenario, workload, clock, per_burst=size, steps=steps)
    driver.start()
    closed = driver.training.closed
    began = _read(driver, clock) if first == 0 else None
    while len(closed) < last:
        if not clock.next() or clock.now > length.max_days * 86400:
            raise ScenarioError(
                f"schedule {name!r} came to a stop after {len(closed)} of {last} steps, "
                f"{clock.now / 86400:.1f} simulated days; is a cell large enough for what is asked of it?"
            )
        if began is None and len(closed) == first:
            began = _read(driver, clock)
    assert began is not None  # noqa: S101
    ended = _read(driver, clock)
    taken = [end - start for start, end in zip(began, ended, strict=True)]
    seconds, alive, sampling, computing, training, moves, switches = taken
    total = seconds * (fleet.cells + fleet.standalone)
    jobs = [job for batch in closed[first:last] for job in batch.jobs]
    late = [batch.version - job.version for batch in closed[first:last] for job in batch.jobs]
    measured = last - first
    bound = lower_bound(scenario, jobs)
    return Result(
        schedule=name,
        says=plan.says,
        steps=measured,
        step_seconds=seconds / measured,
        bound_seconds=bound,
        distance=seconds / measured / bound - 1.0,
        sampling=alive / fleet.slots / total,
        sampling_idle=(sampling - alive / fleet.slots) / total,
        training=computing / total,
        training_idle=(training - computing) / total,
        switching=1.0 - (sampling + training) / total,
        staleness_mean=fmean(late),
        staleness_max=max(late),
        moves=moves / measured,
        switches=switches / measured,
        tokens=fmean(job.tokens for job in jobs),
        capped=fmean(job.capped for job in jobs),
        trainers=trainers,
        events=clock.events,
    )


def _read(driver: PolicyDriver | IdleDriver, clock: Clock) -> tuple[float, ...]:
    return (
        clock.now,
        driver.rollout.busy.total,
        driver.roles.total(Role.ROLLOUT),
        driver.training.busy.total,
        driver.roles.total(Role.TRAINING),
        driver.rollout.moves,
        driver.switches,
    )
