"""What simulations found, as a table and as numbers."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_sched.simulate.run import Result
from gyre_sched.simulate.scenario import Scenario


def table(results: Sequence[Result]) -> str:
    """One line a schedule; speedups are over the first, and the last line is the bound."""
    if not results:
        return ""
    base = results[0].step_seconds
    width = max(len(_name(r)) for r in results)
    lines = [
        f"{'schedule':<{width}}  {'step h':>7} {'speedup':>7} {'bound':>6} | {'sample':>6} {'idle':>5} {'train':>5} "
        f"{'idle':>5} {'switch':>6} | {'stale':>5} {'most':>4} {'moves':>5} {'cells':>5} | {'tokens':>8} {'capped':>6}"
    ]
    lines += [
        f"{_name(r):<{width}}  {r.step_seconds / 3600:7.2f} {base / r.step_seconds:7.2f} {r.distance:+6.1%} | "
        f"{r.sampling:6.1%} {r.sampling_idle:5.1%} {r.training:5.1%} {r.training_idle:5.1%} {r.switching:6.2%} | "
        f"{r.staleness_mean:5.2f} {r.staleness_max:4d} {r.moves:5.0f} {r.switches:5.1f} | {r.tokens:8.0f} "
        f"{r.capped:6.1%}"
        for r in results
    ]
    bound = results[0].bound_seconds
    lines.append(f"{'all work spread evenly':<{width}}  {bound / 3600:7.2f} {base / bound:7.2f}")
    return "\n".join(lines)


def legend(scenario: Scenario) -> str:
    """What the columns mean, and what was simulated."""
    w, f, t = scenario.workload, scenario.fleet, scenario.training
    cap = "no cap" if w.cap == "none" else f"{w.cap_hours:g} h {w.cap} cap"
    return (
        f"{f.cells} cells of {f.slots} slots, {f.standalone} standalone engines; batches of {w.executions} in groups "
        f"of {w.group_size}, {cap}; a cell trains {t.rate or 0:.0f} tokens a second\n"
        "bound: distance to all work spread evenly over all cells. Shares of all cells' time: slots sampling and idle, "
        "cells training and idle, switching. stale: versions between start and training, mean and most; moves: "
        "executions moved a step; cells: sent to training a step. A cap on wall time changes the data: compare tokens "
        "an execution and the share capped before speedups."
    )


def _name(result: Result) -> str:
    split = "" if result.trainers is None else f" ({result.trainers} train)"
    return result.says + split
