"""How fast cells train, where a scenario gives it as a share of the time in which they sample."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gyre_sched.simulate.clock import Clock
from gyre_sched.simulate.engine import Job
from gyre_sched.simulate.rollout import Rollout
from gyre_sched.simulate.scenario import Scenario
from gyre_sched.simulate.trace import Run
from gyre_sched.simulate.workload import Workload

_BATCHES = 8


def calibrated(scenario: Scenario, runs: Sequence[Run]) -> Scenario:
    """`scenario` with a training rate: given, or such that all cells train a batch in `training.share` of the time that
    all engines take to sample it, one batch at a time."""
    if scenario.training.rate is not None:
        return scenario
    workload, seconds, tokens = Workload(scenario, runs), 0.0, 0.0
    for index in range(_BATCHES):
        clock = Clock()
        ended: list[Job] = []

        def end(job: Job, ended: list[Job] = ended) -> None:
            ended.append(job)

        rollout = Rollout(scenario, clock, lambda job: None, end)
        rollout.route(list(range(len(rollout.engines))))
        jobs = workload.batch(index)
        rollout.dispatch(jobs, len(rollout.engines) * scenario.fleet.slots)
        while len(ended) < len(jobs) and clock.next():
            pass
        seconds += clock.now
        tokens += sum(job.tokens for job in ended)
    rate = tokens / (seconds * scenario.training.share * scenario.fleet.cells)
    return msgspec.structs.replace(scenario, training=msgspec.structs.replace(scenario.training, rate=rate))
