"""The planner: what it recommends, and that it says so when elasticity does not pay."""

import json

import msgspec
import pytest

from gyre_sched.cli import main
from gyre_sched.config import SchedConfig
from gyre_sched.simulate import Run, Scenario, Turn, load_trace
from gyre_sched.simulate.plan import plan, resized
from gyre_sched.simulate.scenario import Fleet, Length, Training
from gyre_sched.simulate.scenario import Workload as Work

QUICK = Length(steps=4, warmup=2)


@pytest.fixture(scope="module")
def uneven():
    """Long and short runs: a fleet that waits for the long ones has idle cells."""
    return Scenario(workload=Work(groups=6, group_size=4, merge=16), fleet=Fleet(cells=3, slots=8), length=QUICK)


@pytest.fixture(scope="module")
def elastic_plan(uneven):
    return plan(uneven, load_trace())


def test_uneven_runs_ask_for_elasticity_with_two_batches_a_burst(elastic_plan):
    assert elastic_plan.elastic
    assert elastic_plan.settings["batch.per_burst"] == 2
    assert elastic_plan.gain_over_async > 0.03
    assert elastic_plan.advice[0].startswith("Use elasticity: Elastic E2")
    names = [r.schedule for r in elastic_plan.tried]
    assert {"async-best", "colocate", "elastic-1"} <= set(names), "the tuned split is always beside it"
    assert elastic_plan.shapes[0][:2] == (3, 8)
    assert elastic_plan.step_seconds <= elastic_plan.shapes[0][2] * 1.01


def test_its_settings_are_settings_of_a_run(elastic_plan):
    sched = {k.partition(".")[2]: v for k, v in elastic_plan.settings.items() if k.startswith("sched.")}
    sched = {k: v == "true" if v in ("true", "false") else v for k, v in sched.items()}
    config = msgspec.convert(sched, SchedConfig)
    assert (config.cells, config.capacity) == (elastic_plan.cells, elastic_plan.slots)


def test_runs_of_one_length_do_not(uneven):
    runs = [Run(f"t{i}", (Turn(1000, 2000, 10.0),) * 4) for i in range(20)]
    scenario = msgspec.structs.replace(uneven, workload=Work(groups=6, group_size=4, scale=10.0))
    found = plan(scenario, runs)
    assert not found.elastic
    assert found.advice[0].startswith("Do not use elasticity")


def test_on_policy_runs_are_told_what_two_batches_a_burst_would_bring(uneven):
    found = plan(uneven, load_trace(), max_staleness=0)
    assert found.settings["batch.per_burst"] == 1
    assert all(r.staleness_max == 0 for r in found.tried)
    assert any("--max-staleness 1" in text for text in found.advice)
    assert found.gain_over_async is None


def test_the_same_machines_cut_otherwise_do_the_same_work():
    scenario = Scenario(fleet=Fleet(cells=8, slots=32), training=Training(rate=1000.0))
    half = resized(scenario, 16, 16)
    assert (half.fleet.cells, half.fleet.slots, half.training.rate) == (16, 16, 500.0)
    assert half.fleet.step(16, 0) == pytest.approx(scenario.fleet.step(32, 0))
    assert half.fleet.kv_tokens * 16 == scenario.fleet.kv_tokens * 8


def test_the_commands_print_tables_and_json(capsys):
    small = ["workload.groups=4", "workload.group_size=2", "workload.merge=16", "fleet.cells=2", "fleet.slots=4"]
    sets = [part for key in (*small, "length.steps=2", "length.warmup=2") for part in ("--set", key)]
    assert main(["plan", *sets]) == 0
    out = capsys.readouterr().out
    assert "recommended:" in out
    assert "sched.cells = " in out
    assert main(["simulate", *sets, "--schedules", "colocate", "elastic-2", "--seeded"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 6
    assert "all work spread evenly" in out
    assert main(["simulate", *sets, "--schedules", "colocate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"][0]["schedule"] == "colocate"
    assert found["scenario"]["training"]["rate"] > 0
    assert main(["simulate", "--list"]) == 0
    assert "elastic-2-longest" in capsys.readouterr().out
    assert main(["simulate", *sets, "--schedules", "elastic-9"]) == 1
    assert "expected one of" in capsys.readouterr().err
