"""The work-conserving bound: all work, spread evenly over all cells, each as efficient as a full one."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_sched.simulate.engine import Job
from gyre_sched.simulate.scenario import Scenario


def lower_bound(scenario: Scenario, jobs: Iterable[Job]) -> float:
    """Seconds a step of a calibrated scenario, on average over the batches that `jobs` are whole ones of.

    An engine is most efficient with all its slots taken: an execution then lasts longest, but costs least, a slot's
    share of the cell for as long. Its duration with full engines is a fixed point, since how many of an engine's
    executions decode at a time depends on how long decoding takes. Training is of the tokens that the jobs have: with a
    cap on wall time they depend on the schedule, and so does the bound.
    """
    fleet, training, work = scenario.fleet, scenario.training, scenario.workload
    output = prefill = pause = context = 0.0
    listed = list(jobs)
    if not listed or training.rate is None:
        return 0.0
    for job in listed:
        held = 0
        for t in job.turns:
            output += t.output
            prefill += t.fresh / fleet.prefill
            pause += t.pause
            held = min(fleet.context, held + t.fresh)
            context += held * t.output
            held = min(fleet.context, held + t.output)
    mean = context / output  # of a decoding request
    step = fleet.step(1, mean)
    for _ in range(100):
        decoding = fleet.slots * output * step / (output * step + prefill + pause)
        step = fleet.step(max(1.0, decoding), decoding * mean)
    cap = work.cap_hours * 3600.0 if work.cap == "wall" else float("inf")
    slot_seconds = tokens = 0.0
    for job in listed:
        whole = sum(t.output * step + t.fresh / fleet.prefill + t.pause for t in job.turns)
        share = min(1.0, cap / whole)
        slot_seconds += whole * share
        tokens += job.tokens
    batches = len(listed) / work.executions
    rollout = slot_seconds / fleet.slots / batches
    train = tokens / training.rate / batches
    return max((rollout + train) / (fleet.cells + fleet.standalone), train / fleet.cells)
