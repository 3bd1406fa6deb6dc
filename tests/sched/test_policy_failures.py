"""The policy when something fails, is late or comes twice."""

import pytest

from gyre_sched import protocol as p
from gyre_sched import rules
from gyre_sched.actions import Returned, Tick
from gyre_sched.protocol import Role


def test_a_lost_trainer_is_waited_for_and_then_the_cell_comes_back(trained):
    desk = trained(enter_timeout=30.0)
    desk.state(1, trainer_alive=False, detail="exit code 1")
    assert desk.kinds("trainer_failed")[0].numbers["detail"] == "exit code 1"
    desk.tick(30.0)
    assert desk.role(1) is Role.TRAINING
    desk.tick(1.0)
    assert desk.role(1) is Role.FAILED
    desk.tick(10.0)
    assert isinstance(desk.calls[1].request, p.EnterRollout)
    desk.done(1)
    assert desk.role(1) is Role.ROLLOUT, "its trainer is still down: it does not train"
    desk.state(1)
    assert desk.role(1) is Role.DRAINING

    desk = trained()
    desk.state(1, trainer_alive=False)
    desk.tick(10.0)
    desk.state(1)
    desk.tick(1000.0)
    assert desk.role(1) is Role.TRAINING


def test_a_silent_agent_fails_its_cell_unless_the_scheduler_itself_slept(new_desk):
    desk = new_desk(lease=30.0)
    for _ in range(4):
        desk.state(0)
        desk.tick(10.0, beats=False)
    assert [desk.role(i) for i in (0, 1)] == [Role.ROLLOUT, Role.FENCED]
    assert desk.kinds("lease_expired")[0].numbers["silent"] == 40.0
    desk.tick(1000.0, beats=False)
    assert desk.role(0) is Role.ROLLOUT
    assert desk.kinds("slept")


def test_an_engine_that_came_back_with_old_weights_takes_new_ones_first(new_desk):
    desk = new_desk()
    desk.send(p.Published(version=1, manifest=b"m"))
    desk.done(0)
    desk.done(1)
    desk.burst()
    desk.state(1, engine_alive=False)
    desk.state(1, version=0, routable=True)
    assert desk.role(1) is Role.REFRESHING
    assert desk.calls[1].request == p.Refresh(version=1, manifest=b"m", registration=1)
    desk.done(1)
    assert [(e.engine, e.version) for e in desk.routes.engines] == [("cell-0", 1), ("cell-1", 1)]


def test_with_work_and_no_engine_a_training_cell_is_recalled(new_desk):
    desk = new_desk(floor_grace=60.0)
    desk.burst()
    desk.end(4)
    desk.tell(waiting=4, batches_ready=1)
    desk.train(0)
    desk.state(1, engine_alive=False)
    desk.tick(59.0)
    assert desk.role(0) is Role.TRAINING
    desk.tick(1.0)
    assert desk.role(0) is Role.LEAVING
    desk.done(0)
    assert [e.engine for e in desk.routes.engines] == ["cell-0"]


def test_a_core_that_cannot_enter_halts_the_run_and_says_so(new_desk):
    desk = new_desk(attempts=2)
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8, batches_ready=2)
    for _ in range(2):
        desk.drained(0)
        desk.done(0, failed="the trainer does not answer")
        desk.tick(10.0)
        desk.done(0)
    assert desk.role(0) is Role.ROLLOUT
    assert [r.numbers["failures"] for r in desk.kinds("enter_failed")] == [1, 2]
    (halted,) = desk.kinds("halted")
    assert "failed to enter training 2 times" in halted.numbers["reason"]
    assert "failed to enter training" in desk.burst(1).reason


def test_a_half_refreshed_engine_is_not_trusted_on_its_agents_word(new_desk):
    desk = new_desk()
    desk.send(p.Published(version=1, manifest=b"m"))
    desk.done(0)
    desk.done(1, failed="the refresh broke off")
    desk.state(1, routable=True, version=1)
    assert desk.role(1) is Role.FAILED
    desk.tick(10.0)
    assert isinstance(desk.calls[1].request, p.EnterRollout)
    desk.done(1)
    assert desk.role(1) is Role.ROLLOUT


@pytest.mark.parametrize("reason", ["", "an operator"])
def test_after_shutdown_nothing_moves_but_running_work_keeps_its_engines(new_desk, trained, reason):
    desk = new_desk()
    desk.burst()
    desk.end(4)
    desk.send(p.Shutdown(reason=reason))
    desk.tell(waiting=4, batches_ready=1)
    assert desk.role(0) is Role.ROLLOUT
    desk.state(1, engine_alive=False)
    desk.state(1, routable=True)
    assert desk.role(1) is Role.ROLLOUT
    desk = trained()
    desk.send(p.Shutdown(reason=reason))
    desk.send(p.Published(version=2, manifest=b"m"))
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    assert desk.role(0) is Role.TRAINING
    assert "shutting down" in desk.burst(1).reason


def test_a_core_restored_from_before_the_last_closed_batch_trains_it_again(trained):
    desk = trained()
    desk.send(p.Published(version=2, manifest=b"m"))
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    desk.done(0)
    desk.done(1)
    assert desk.role(0) is Role.ROLLOUT
    desk.state(0, trainer_alive=False)
    desk.state(0, version=2)
    desk.send(p.Published(version=0, manifest=b"restored"))
    desk.tick(1.0)
    assert desk.role(0) is Role.DRAINING


def test_nobody_takes_weights_whose_snapshot_died_with_the_cores_trainer(trained):
    desk = trained()
    desk.send(p.Published(version=2, manifest=b"m"))
    desk.state(0, trainer="training", trainer_alive=False)
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    desk.tick(1.0)
    assert desk.role(1) is Role.TRAINING
    desk.state(0, trainer="training")
    desk.tick(1.0)
    assert desk.role(1) is Role.LEAVING


def test_a_return_that_the_end_of_the_run_interrupts_is_no_failure(trained):
    desk = trained()
    desk.send(p.Published(version=2, manifest=b"m"))
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    assert desk.role(0) is Role.LEAVING
    desk.send(p.Shutdown(reason="the run ends"))
    desk.done(0, failed="cell 0 is stopping")
    assert desk.role(0) is Role.LEAVING
    assert desk.kinds("return_interrupted")
    assert not desk.kinds("return_failed")


def test_a_late_answer_changes_nothing(new_desk):
    desk = new_desk(enter_timeout=10.0)
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8)
    desk.drained(0)
    call = desk.calls[0]
    desk.tick(13.0)
    assert desk.role(0) is Role.FAILED
    desk.take(Returned(desk.at, 0, call.call, p.Done(seconds=13.0)))
    assert desk.role(0) is Role.FAILED
    assert desk.kinds("late_answer")


def test_a_second_look_decides_nothing_new(trained):
    desk = trained()
    before = desk.policy.state.status(desk.at, desk.policy.config)
    assert desk.policy.step(Tick(desk.at)) == []
    assert desk.policy.state.status(desk.at, desk.policy.config) == before


def test_ids_of_the_burst_before_are_still_known(new_desk):
    desk = new_desk(steps=8)
    desk.burst()
    desk.end(8)
    desk.tell(batches_closed=2)
    desk.burst(1)
    desk.send(p.Terminated(execution="3"))
    desk.send(p.Started(execution="3"))
    desk.send(p.Started(execution="3"))
    assert desk.policy.state.water == 8
    assert desk.policy.state.count.started == 1


def test_water_is_what_the_rule_says(new_desk):
    desk = new_desk(cells=3)
    desk.burst(executions=9)
    cell = desk.policy.state.core
    assert not rules.water_allows(desk.policy.state, cell)
    desk.end(1)
    assert rules.water_allows(desk.policy.state, cell)
