"""The simulator: closed forms, nothing lost, the water inequality, what the shipped trace says."""

import math
from pathlib import Path

import msgspec
import pytest

from gyre_sched.config import SchedConfig
from gyre_sched.errors import ScenarioError
from gyre_sched.protocol import Role
from gyre_sched.simulate import SCHEDULES, Run, Scenario, Turn, load_trace, run
from gyre_sched.simulate.bound import lower_bound
from gyre_sched.simulate.clock import Clock
from gyre_sched.simulate.elastic import PolicyDriver
from gyre_sched.simulate.engine import EngineModel, Job
from gyre_sched.simulate.idle import IdleDriver
from gyre_sched.simulate.scenario import Fleet, Length, Switch, Training, load_scenario
from gyre_sched.simulate.scenario import Workload as Work
from gyre_sched.simulate.workload import Workload

ONE = Run("task", (Turn(1000, 200, 30.0), Turn(500, 100, 7.0)))


@pytest.fixture(scope="module")
def trace():
    return load_trace()


def small(**tables):
    """A scenario of seconds, for the shipped trace or runs of a test."""
    made = {
        "workload": Work(groups=4, group_size=4, merge=4, **tables.pop("work", {})),
        "fleet": Fleet(**{"cells": 2, "slots": 8, **tables.pop("fleet", {})}),
        "training": Training(**{"micro_step": 200_000, **tables.pop("train", {})}),
        "length": Length(**{"steps": 4, "warmup": 2, **tables.pop("length", {})}),
    }
    return Scenario(**made, **tables)


def drive(scenario, runs, name, steps):
    """Run to the end of the last step; returns the driver and the executions in the order in which they ended."""
    schedule, clock = SCHEDULES[name], Clock()
    training = msgspec.structs.replace(scenario.training, rate=scenario.training.rate or 2000.0, **schedule.training)
    scenario = msgspec.structs.replace(scenario, training=training)
    workload = Workload(scenario, runs)
    if schedule.policy:
        config = schedule.config(scenario.fleet.cells, scenario.fleet.standalone, scenario.fleet.slots)
        driver = PolicyDriver(scenario, workload, clock, config, per_burst=schedule.per_burst, steps=steps)
    else:
        driver = IdleDriver(scenario, workload, clock, per_burst=schedule.per_burst, steps=steps)
    ended = []
    tell = driver.rollout._on_end
    driver.rollout._on_end = lambda job: (ended.append(job), tell(job))
    driver.start()
    while len(driver.training.closed) < steps:
        assert clock.next()
        assert clock.now < 1e8
    return driver, ended


# --- one engine


def alone(fleet, *jobs):
    """When each of the jobs, all submitted at 0 for one call, is done."""
    clock, done = Clock(), {}
    engine = EngineModel(0, clock, fleet, Switch(), lambda job: done.setdefault(job.name, clock.now))
    for job in jobs:
        engine.submit(job)
    while clock.next():
        pass
    return done


def request(name, fresh, output):
    job = Job(name, 0, "g", "t", ())
    job.context, job.fresh, job.left = fresh, fresh, float(output)
    return job


def test_a_request_alone_takes_its_prefill_and_its_steps():
    fleet = Fleet(step_ms=10, step_ms_request=1, step_ms_kilotoken=0.5, prefill=1000)
    (seconds,) = alone(fleet, request("a", 2000, 100)).values()
    assert seconds == pytest.approx(2.0 + 100 * 0.001 * (10 + 1 + 0.5 * 2))


def test_requests_together_share_the_pace_and_the_short_one_frees_the_long_one():
    fleet = Fleet(step_ms=10, step_ms_request=5, step_ms_kilotoken=0, prefill=1e12)
    done = alone(fleet, request("short", 1, 100), request("long", 1, 300))
    together = 100 * 0.020
    assert done["short"] == pytest.approx(together)
    assert done["long"] == pytest.approx(together + 200 * 0.015)


def test_requests_beyond_the_cache_wait_for_it():
    fleet = Fleet(step_ms=10, step_ms_request=0, step_ms_kilotoken=0, prefill=1e12, kv_tokens=1500)
    done = alone(fleet, request("a", 1000, 100), request("b", 1000, 100), request("c", 1000, 100))
    assert list(done.values()) == pytest.approx([1.0, 2.0, 3.0])


def test_a_request_that_is_withdrawn_keeps_what_it_has_sampled():
    clock, done = Clock(), []
    fleet = Fleet(step_ms=10, step_ms_request=0, step_ms_kilotoken=0, prefill=1e12)
    first, second = (EngineModel(i, clock, fleet, Switch(move="kv", move_seconds=0.5), done.append) for i in (0, 1))
    job = request("a", 1, 100)
    first.submit(job)

    def move():
        assert first.withdraw(job)
        assert job.left == pytest.approx(60)
        first.forget(job)
        job.move = True
        second.submit(job)

    clock.after(0.4, move)
    while not done:
        assert clock.next()
    assert clock.now == pytest.approx(0.4 + 0.5 + 0.6, abs=1e-3)
    while clock.next():
        pass
    assert done == [job]


def test_new_weights_in_place_stop_an_engine_and_cost_its_contexts():
    fleet = Fleet(step_ms=10, step_ms_request=0, step_ms_kilotoken=0, prefill=1000)
    clock, done = Clock(), []
    engine = EngineModel(0, clock, fleet, Switch(), lambda job: done.append(clock.now))
    engine.submit(request("a", 2000, 100))
    clock.after(2.5, engine.pause, 10.0)
    while clock.next():
        pass
    assert done == pytest.approx([2.0 + 1.0 + 10.0 + 2.0])


# --- a run


def test_one_execution_takes_the_closed_form():
    scenario = Scenario(
        workload=Work(groups=1, group_size=1, merge=1, scale=1, alike=1, score_seconds=3),
        fleet=Fleet(cells=1, slots=1, step_ms=10, step_ms_request=1, step_ms_kilotoken=0, prefill=1000),
        training=Training(rate=100, micro_step=10_000, optimizer=11, publish=2),
        switch=Switch(drain=1, enter=4, leave=3, refresh=5),
        length=Length(steps=3, warmup=1),
    )
    rollout = 1500 / 1000 + 300 * 0.011 + 37
    switch, back = 1 + 4, 3 + 5
    result = run(scenario, [ONE], "colocate")
    assert result.step_seconds == pytest.approx(rollout + 3 + switch + 1800 / 100 + 11 + 2 + back)
    assert result.tokens == 1800
    assert (result.staleness_max, result.moves) == (0, 0)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_execution_ends_once_and_is_trained_once(trace, name):
    scenario = small(fleet={"cells": 3})
    driver, ended = drive(scenario, trace, name, steps=4)
    names = [job.name for batch in driver.training.closed[:4] for job in batch.jobs]
    assert len(set(names)) == len(names) == 4 * scenario.workload.executions
    assert len({job.name for job in ended}) == len(ended)
    assert set(names) <= {job.name for job in ended}
    whole = {job.name: sum(t.fresh + t.output for t in job.turns) for job in ended}
    assert all(job.tokens == whole[job.name] for job in ended), "moved or not, every token is sampled once"
    assert driver.training.done >= sum(whole[n] for n in names) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["elastic-1", "elastic-1-deadline", "elastic-2", "elastic-2-longest"])
def test_the_water_inequality_holds_at_every_transfer_and_cells_leave_in_order(trace, name):
    driver, _ = drive(small(fleet={"cells": 4, "slots": 4}), trace, name, steps=4)
    transfers = [r for r in driver.records if r.kind == "transfer"]
    assert len(transfers) >= 4
    assert all(r.numbers["w"] <= r.numbers["C_R"] - r.numbers["C_e"] for r in transfers)
    assert driver.rollout.moves > 0
    bursts = [r.numbers["staleness"] for r in driver.records if r.kind == "burst_granted"]
    assert set(bursts) == {SCHEDULES[name].per_burst - 1}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_work_is_conserved_and_no_schedule_beats_the_bound(trace, name):
    result = run(small(fleet={"cells": 3}), trace, name)
    parts = result.sampling + result.sampling_idle + result.training + result.training_idle + result.switching
    assert parts == pytest.approx(1.0)
    assert all(p > -1e-9 for p in (result.sampling_idle, result.training_idle, result.switching))
    assert result.distance > -0.03, "the bound takes engines for full, which is the mean of what they are"


def test_the_two_ways_to_colocate_agree(trace):
    scenario = small()
    policy, _ = drive(scenario, trace, "colocate", steps=3)
    own = msgspec.structs.replace(SCHEDULES["colocate-idle"])
    clock = Clock()
    model = msgspec.structs.replace(scenario.training, rate=2000.0)
    scenario = msgspec.structs.replace(scenario, training=model, switch=Switch(drain=0.0))
    idle = IdleDriver(scenario, Workload(scenario, trace), clock, per_burst=own.per_burst, steps=3, eager=False)
    idle.start()
    while len(idle.training.closed) < 3:
        assert clock.next()
    assert idle.training.closed[-1].at == pytest.approx(policy.training.closed[-1].at, rel=0.01)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(trace):
    scenario = small()
    first = run(scenario, trace, "elastic-2-longest")
    assert run(scenario, trace, "elastic-2-longest") == first
    other = msgspec.structs.replace(scenario, length=msgspec.structs.replace(scenario.length, seed=1))
    assert run(other, trace, "elastic-2-longest").step_seconds != first.step_seconds


@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_lengths_are_the_traces_whatever_the_correlation_in_a_group(trace, alike):
    scenario = Scenario(workload=Work(groups=500, group_size=8, alike=alike, merge=1))
    jobs = Workload(scenario, trace).batch(0)
    mean = sum(sum(t.output for t in j.turns) for j in jobs) / len(jobs)
    expected = 30 * sum(sum(t.output for t in r.turns) for r in trace) / len(trace)
    assert mean == pytest.approx(expected, rel=0.1)
    groups = {}
    for job in jobs:
        groups.setdefault(job.group, []).append(math.log(sum(t.output for t in job.turns)))
    if alike == 1.0:
        assert all(len(set(g)) == 1 for g in groups.values())


def test_caps_end_executions_and_are_told(trace):
    work = run(small(work={"cap": "work", "cap_hours": 1.0}), trace, "colocate")
    wall = run(small(work={"cap": "wall", "cap_hours": 1.0}), trace, "colocate")
    free = run(small(), trace, "colocate")
    assert free.capped == 0 < work.capped < wall.capped < 1
    assert wall.tokens < work.tokens < free.tokens
    assert wall.step_seconds < free.step_seconds


def test_standalone_engines_sample_and_never_train(trace):
    driver, _ = drive(small(fleet={"cells": 2, "standalone": 1}), trace, "elastic-1", steps=3)
    assert driver.roles.total(Role.TRAINING) > 0
    assert {r.cell for r in driver.records if r.kind == "transfer"} <= {0, 1}
    assert driver.rollout.engines[2].jobs is not None
    assert not any(r.kind == "role" and r.cell == 2 and r.numbers["to"] == "training" for r in driver.records)


def test_two_batches_a_burst_are_near_the_bound_on_a_capped_trace_and_the_split_is_tuned(trace):
    scenario = Scenario(workload=Work(cap="work", cap_hours=4.0, merge=8), length=Length(steps=6, warmup=4))
    colocate, half, best, one, deadline, two = (
        run(scenario, trace, name).step_seconds
        for name in ("colocate", "async-half", "async-best", "elastic-1", "elastic-1-deadline", "elastic-2")
    )
    bound = run(scenario, trace, "elastic-2").bound_seconds
    assert two <= 1.05 * bound
    assert colocate / deadline >= colocate / one + 0.03, "docs/scheduling.md measures it on twelve steps"
    assert best < half
    assert two < min(one, colocate, best)


def test_bound_of_executions_that_fill_their_slots_is_their_time():
    fleet = Fleet(cells=2, slots=2, step_ms=10, step_ms_request=5, step_ms_kilotoken=0, prefill=1e12)
    scenario = Scenario(
        workload=Work(groups=2, group_size=2), fleet=fleet, training=Training(rate=100.0), switch=Switch()
    )
    jobs = [Job(str(i), 0, "g", "t", (Turn(0, 1000, 0.0),)) for i in range(4)]
    for job in jobs:
        job.tokens = 1000.0
    assert lower_bound(scenario, jobs) == pytest.approx(1000 * 0.020 + 4 * 1000 / 100 / 2)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["fleet.cells=0"], "cells must be at least 1"),
        (["workload.alike=1.5"], "alike must be at most 1"),
        (["training.rate=0"], "rate must be more than 0"),
        (["workload.cap='week'"], "cap"),
        (["flet.cells=1"], "did you mean 'fleet'"),
    ],
)
def test_scenarios_that_make_no_sense_are_refused(overrides, says):
    with pytest.raises(Exception, match=says):
        load_scenario(None, overrides)


def test_the_example_is_a_scenario():
    scenario = load_scenario(Path(__file__).parents[2] / "examples" / "scheduling" / "fleet.toml")
    assert (scenario.fleet.cells, scenario.training.rate, scenario.workload.cap) == (4, 2500.0, "work")


def test_an_async_schedule_needs_two_cells(trace):
    with pytest.raises(ScenarioError, match="at least two cells"):
        run(small(fleet={"cells": 1}), trace, "async-half")


def test_a_simulation_that_does_not_end_is_given_up(trace):
    with pytest.raises(ScenarioError, match="came to a stop after 0 of"):
        run(small(length={"max_days": 1e-6}), trace, "colocate")


def test_schedules_are_settings_of_the_scheduler():
    for schedule in SCHEDULES.values():
        assert isinstance(schedule.config(8, 0, 32), SchedConfig)
