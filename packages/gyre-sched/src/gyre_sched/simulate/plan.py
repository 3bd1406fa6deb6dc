"""Which cells, slots, burst and schedule a fleet should run with, and whether elasticity pays at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gyre_sched.simulate.calibrate import calibrated
from gyre_sched.simulate.run import Result, run
from gyre_sched.simulate.scenario import Scenario
from gyre_sched.simulate.schedules import SCHEDULES
from gyre_sched.simulate.trace import Run

WORTH = 0.03  # a gain below this is not worth moving cells for
_STALENESS = {
    "colocate": 0, "colocate-idle": 0, "elastic-1": 0, "elastic-1-deadline": 0, "elastic-2": 1, "elastic-2-deadline": 1,
    "elastic-2-longest": 1, "async-best": 1, "async-continuous-best": 1,
}  # fmt: skip


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A recommendation. `settings` are keys of the run's config, `advice` says why, one sentence each."""

    cells: int
    slots: int
    schedule: str
    settings: dict[str, int | str]
    elastic: bool
    step_seconds: float
    gain_over_async: float | None  # of the best elastic schedule; None: no async schedule keeps the staleness asked for
    gain_over_colocate: float
    advice: tuple[str, ...]
    tried: tuple[Result, ...]  # schedules on the fleet as given
    shapes: tuple[tuple[int, int, float], ...]  # cells, slots, seconds a step of the schedule chosen


def resized(scenario: Scenario, cells: int, slots: int) -> Scenario:
    """The same machines cut into `cells` cells, with `slots` slots each.

    A cell of half the size has half the cache, trains half as fast and takes twice as long for each request of a decode
    step; what a step costs in any case stays. Standalone engines are left as they are.
    """
    fleet, training = scenario.fleet, scenario.training
    part = cells / fleet.cells
    return msgspec.structs.replace(
        scenario,
        fleet=msgspec.structs.replace(
            fleet,
            cells=cells,
            slots=slots,
            kv_tokens=max(1, round(fleet.kv_tokens / part)),
            prefill=fleet.prefill / part,
            step_ms_request=fleet.step_ms_request * part,
            step_ms_kilotoken=fleet.step_ms_kilotoken * part,
        ),
        training=msgspec.structs.replace(training, rate=None if training.rate is None else training.rate / part),
    )


def plan(
    scenario: Scenario,
    runs: Sequence[Run],
    *,
    max_staleness: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Simulate the schedules that keep `max_staleness`, then the best one on cells and slots of other sizes.

    say: is told what is being simulated. Raises `ScenarioError`."""
    scenario = calibrated(scenario, runs)
    tried: dict[str, Result] = {}
    for name, staleness in _STALENESS.items():
        if staleness > max_staleness or (name.startswith("async") and scenario.fleet.cells < 2):
            continue
        say(name)
        tried[name] = run(scenario, runs, name)
    elastic = _best(tried, "elastic")
    fixed = _best(tried, "async")
    colocate = _best(tried, "colocate")
    assert elastic is not None  # noqa: S101
    assert colocate is not None  # noqa: S101
    over_async = None if fixed is None else fixed.step_seconds / elastic.step_seconds - 1.0
    over_colocate = colocate.step_seconds / elastic.step_seconds - 1.0
    rivals = [r for r in (fixed, colocate) if r is not None and r.step_seconds < elastic.step_seconds * (1 + WORTH)]
    chosen = min(rivals, key=lambda r: r.step_seconds) if rivals else elastic
    shapes = _shapes(scenario, runs, chosen, say)
    cells, slots, seconds = min(shapes, key=lambda shape: (round(shape[2] / shapes[0][2], 2), shape != shapes[0]))
    return Plan(
        cells=cells,
        slots=slots,
        schedule=chosen.schedule,
        settings=_settings(chosen, scenario.fleet.cells, cells, slots, max_staleness),
        elastic=chosen is elastic,
        step_seconds=seconds,
        gain_over_async=over_async,
        gain_over_colocate=over_colocate,
        advice=tuple(_advice(scenario, tried, elastic, fixed, colocate, chosen, max_staleness)),
        tried=tuple(tried.values()),
        shapes=tuple(shapes),
    )


def _best(tried: dict[str, Result], kind: str) -> Result | None:
    """The fastest of a kind; of two that are within half a percent, the one listed first, which is the simpler one."""
    found = [r for name, r in tried.items() if name.startswith(kind)]
    if not found:
        return None
    least = min(r.step_seconds for r in found)
    return next(r for r in found if r.step_seconds <= least * 1.005)


def _shapes(
    scenario: Scenario, runs: Sequence[Run], chosen: Result, say: Callable[[str], None]
) -> list[tuple[int, int, float]]:
    fleet = scenario.fleet
    shapes = [(fleet.cells, fleet.slots, chosen.step_seconds)]
    others = [(fleet.cells, max(1, fleet.slots // 2)), (fleet.cells, fleet.slots * 2)]
    if fleet.cells % 2 == 0 and fleet.cells > 2:
        others.append((fleet.cells // 2, fleet.slots * 2))
    if fleet.slots % 2 == 0:
        others.append((fleet.cells * 2, fleet.slots // 2))
    for cells, slots in dict.fromkeys(others):
        if (cells, slots) == (fleet.cells, fleet.slots):
            continue
        say(f"{chosen.schedule} on {cells} cells of {slots} slots")
        shapes.append((cells, slots, run(resized(scenario, cells, slots), runs, chosen.schedule).step_seconds))
    return shapes


def _settings(chosen: Result, searched: int, cells: int, slots: int, max_staleness: int) -> dict[str, int | str]:
    """searched: cells that the split was searched on."""
    schedule = SCHEDULES[chosen.schedule]
    settings: dict[str, int | str] = {
        "batch.per_burst": schedule.per_burst,
        "sched.cells": cells,
        "sched.capacity": slots,
        "sched.max_staleness": max_staleness,
    }
    for key, value in schedule.settings.items():
        settings[f"sched.{key}"] = str(value).lower() if isinstance(value, bool) else value
    if chosen.trainers is not None:
        settings["sched.trainers"] = max(1, round(chosen.trainers * cells / searched))
    return settings


def _advice(
    scenario: Scenario,
    tried: dict[str, Result],
    elastic: Result,
    fixed: Result | None,
    colocate: Result,
    chosen: Result,
    max_staleness: int,
) -> list[str]:
    said = []
    if chosen is elastic:
        rival = fixed if fixed is not None and fixed.step_seconds < colocate.step_seconds else colocate
        gain = rival.step_seconds / elastic.step_seconds - 1.0
        said.append(
            f"Use elasticity: {elastic.says} is {gain:.1%} faster than the best without ({rival.says}"
            + (f", {rival.trainers} of {scenario.fleet.cells} cells train" if rival.trainers else "")
            + f"), and {elastic.distance:.1%} above all work spread evenly."
        )
    else:
        split = f" with {chosen.trainers} of {scenario.fleet.cells} cells training" if chosen.trainers else ""
        gain = chosen.step_seconds / elastic.step_seconds - 1.0
        said.append(
            f"Do not use elasticity: {chosen.says}{split} is as good; the best elastic schedule ({elastic.says}) would "
            f"change the time a step by {-gain:+.1%}, and less than {WORTH:.0%} is not worth moving cells for."
        )
    if max_staleness == 0:
        said.append(
            "With a staleness of 1 allowed, two batches a burst would be open to you; it is the largest gain there is, "
            "so see --max-staleness 1."
        )
    one = _best(tried, "elastic-1")
    if max_staleness and one is not None and fixed is not None and one.step_seconds > fixed.step_seconds:
        said.append(
            f"On-policy elasticity (one batch a burst) loses to the tuned async schedule here "
            f"({fixed.step_seconds / one.step_seconds:.2f}x): keep two batches a burst."
        )
    if chosen.capped > 0.5:
        said.append(
            f"A cap ends {chosen.capped:.0%} of all executions: raise it, or what is trained is mostly cut off."
        )
    if chosen.sampling_idle > 0.3:
        said.append(
            f"{chosen.sampling_idle:.0%} of all cells' time are empty slots: a few long executions hold whole engines; "
            "a cap on their length, or larger batches, would use them."
        )
    if "continuous" in chosen.schedule:
        said.append(
            "Continuous admission needs a runner that asks for its next burst before the last one has ended; Gyre's "
            "own asks afterwards."
        )
    return said
