"""What is printed while a run goes on."""

from gyre_launch.view import STEP_COLUMNS, View, cell_text, lines, step_table, switch_line
from gyre_sched.protocol import Backlog, CellStatus, Event, Role, Status


def test_lines_before_anything_answers() -> None:
    assert lines(View(total_steps=6, executions=192)) == [
        "cells     starting",
        "runner    waiting for the cells",
        "proxy     0 calls, 0 moved between engines, 0 failed",
        "training  no data yet",
    ]


def test_lines_in_mid_run() -> None:
    def cell(index: int, role: Role) -> CellStatus:
        return CellStatus(cell=index, role=role, since=1, version=2, engine_alive=True, trainer_alive=True)

    status = Status(
        dispatched=64,
        started=64,
        terminated=40,
        water=24,
        capacity=32,
        burst=0,
        version=2,
        epoch=5,
        cells=(cell(0, Role.TRAINING), cell(1, Role.ROLLOUT)),
        backlog=Backlog(
            waiting=8, open_batch=1, micro_steps_left=3, batches_closed=1, executions_trained=32, executions_excluded=0
        ),
    )
    runner = {"started": 64, "terminated": 40, "mean_score": 0.25}
    view = View(status=status, runner=runner, proxy={"calls": 90, "calls_moved": 4}, total_steps=6, executions=192)
    assert lines(view) == [
        "cells     0:training v2  1:rollout v2   water 24 / capacity 32",
        "runner    40/192 executions ended, 24 running   mean score so far 0.250",
        "proxy     90 calls, 4 moved between engines, 0 failed",
        "training  step 1/6 done; batch 2: 3 micro-steps left",
    ]


def test_replaced_executions_are_more_to_wait_for() -> None:
    runner = {"started": 70, "terminated": 40, "replaced": 3}
    shown = lines(View(status=None, runner=runner, proxy={}, total_steps=6, executions=192))
    assert "runner    40/195 executions ended, 30 running, 3 replaced after a failure" in shown


def test_a_role_switch_is_a_line_and_other_events_are_not() -> None:
    numbers = {"from": "rollout", "to": "draining", "seconds": 61.04, "w": 30, "C_R": 64}
    event = Event(seq=1, at=0.0, kind="role", cell=0, numbers=numbers)
    assert switch_line(event) == "cell 0: rollout -> draining after 61.0 s (water 30, capacity 64)"
    assert switch_line(Event(seq=2, at=0.0, kind="published")) is None


def test_step_cells() -> None:
    assert cell_text({"1": 3, "0": 5}) == "0:5 1:3"
    assert cell_text(0.123456) == "0.1235"
    assert cell_text(None) == "-"


def test_a_step_is_two_aligned_lines() -> None:
    names, values = step_table({"step": 1, "micro_steps": {"0": 12, "1": 9}, "loss": -0.25}).splitlines()
    assert len(names) == len(values)
    assert len(names.split()) == len(STEP_COLUMNS) + 1  # "grad norm" is two words
    assert values.split()[0] == "1"
    assert "0:12 1:9" in values
