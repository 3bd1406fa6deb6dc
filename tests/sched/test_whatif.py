"""A recorded run under other rules."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from gyre_sched.actions import Record
from gyre_sched.cli import main
from gyre_sched.journal import Journal, Step
from gyre_sched.policy import Policy
from gyre_sched.protocol import Event
from gyre_sched.replay import says_nothing_new
from gyre_sched.simulate import SCHEDULES, Scenario, load_trace
from gyre_sched.simulate.clock import Clock
from gyre_sched.simulate.elastic import PolicyDriver
from gyre_sched.simulate.scenario import Fleet, Training
from gyre_sched.simulate.scenario import Workload as Work
from gyre_sched.simulate.workload import Workload
from gyre_sched.whatif import differences, what_if


@pytest.fixture(scope="module")
def recorded():
    """A simulated elastic run of four steps as a scheduler's journal has it: its config and its steps."""
    scenario = Scenario(
        workload=Work(groups=4, group_size=4, merge=8),
        fleet=Fleet(cells=4, slots=4),
        training=Training(rate=2000.0, micro_step=200_000),
    )
    clock, steps, seq = Clock(), [], 0
    config = SCHEDULES["elastic-1"].config(4, 0, 4)
    driver = PolicyDriver(scenario, Workload(scenario, load_trace()), clock, config, per_burst=1, steps=4)
    policy = driver.policy
    inner = policy.step

    def step(event):
        nonlocal seq
        quiet = says_nothing_new(event, policy.state)
        actions = inner(event)
        records = [a for a in actions if isinstance(a, Record)]
        if records or not quiet:
            events = tuple(
                Event(seq=seq + i, at=r.at, kind=r.kind, cell=r.cell, numbers=r.numbers) for i, r in enumerate(records)
            )
            seq += len(events)
            steps.append(Step(event, events))
        return actions

    policy.step = step
    driver.start()
    while len(driver.training.closed) < 4 or driver.policy.state.by_role["training"]:
        assert clock.next()
    return SimpleNamespace(config=config, steps=steps)


def again(recorded, **changes):
    policies = [
        Policy(msgspec.structs.replace(recorded.config, **c), per_burst=1, steps=4, at=recorded.steps[0].input.at)
        for c in ({}, changes)
    ]
    return what_if(recorded.steps, *policies)


def test_the_same_policy_decides_the_same(recorded):
    before, after = again(recorded)
    assert len(before.of("transfer")) == 16
    assert differences(before, after, within=0.01) == []
    assert after.refused is None
    for role, seconds in before.role_seconds.items():
        assert after.role_seconds[role] == pytest.approx(seconds, abs=0.1)


def test_a_rule_that_holds_cells_back_shows_who_would_have_stayed_and_why(recorded):
    before, after = again(recorded, leave="deadline")
    assert after.of("held")
    assert not before.of("held")
    assert after.role_seconds["training"] < before.role_seconds["training"]
    assert len(after.of("burst_granted")) == 4
    pairs = differences(before, after)
    later = [(a, b) for a, b in pairs if a and b and a.kind == "transfer"]
    assert later
    assert all(b.seconds > a.seconds for a, b in later)
    held = after.of("held")[0].numbers
    assert held["train_seconds"] <= held["burst_seconds"] * 0.4
    assert held["w"] <= held["C_R"] - held["C_e"]


def test_colocate_would_have_moved_nobody_before_the_end(recorded):
    _, after = again(recorded, schedule="colocate")
    assert after.of("transfer")
    assert all(d.numbers["w"] == 0 for d in after.of("transfer"))


def test_a_burst_that_would_not_have_been_granted_is_told(recorded):
    policies = [Policy(recorded.config, per_burst=1, steps=n, at=recorded.steps[0].input.at) for n in (4, 2)]
    _, after = what_if(recorded.steps, *policies)
    assert after.refused == "burst 2: all 2 steps have their executions"


def test_the_command_reads_a_run_directory(recorded, tmp_path, capsys):
    journal = Journal(tmp_path / "sched" / "journal")
    for step in recorded.steps:
        journal.append(step.input, [Record(e.at, e.kind, e.cell, e.numbers) for e in step.events])
    journal.close()
    limits = {k: v for k, v in msgspec.structs.asdict(recorded.config).items() if isinstance(v, int | float)}
    lines = [f"{k} = {str(v).lower()}" for k, v in limits.items()]
    (tmp_path / "config.toml").write_text(
        "\n".join(['[run]\ndir = "x"\nsteps = 4\n[batch]\nper_burst = 1\n[sched]', *lines])
    )
    path = str(tmp_path / "sched" / "journal")
    assert main(["replay", path, "--set", "sched.leave=deadline"]) == 0
    out = capsys.readouterr().out
    assert "held cell 1: recorded -, now +" in out
    assert "transfer: 16 recorded, 16 now" in out
    assert main(["replay", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "cannot read the journal" in capsys.readouterr().err
    other = tmp_path / "other.toml"
    other.write_text((tmp_path / "config.toml").read_text().replace("cells = 4", "cells = 3"))
    assert main(["replay", path, "--config", str(other)]) == 1
    assert "name the config that it was written with" in capsys.readouterr().err
