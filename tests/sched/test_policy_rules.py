"""The rules that go beyond the water level: deadline, order, staleness, dwelling, standalone engines, schedules."""

import msgspec
import pytest

from gyre_sched import protocol as p
from gyre_sched.actions import Received, Refuse
from gyre_sched.config import SchedConfig
from gyre_sched.errors import SchedError
from gyre_sched.outlook import burst_seconds
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role


@pytest.fixture
def paced(new_desk):
    """Four cells; after a first burst in which every execution took 100 s and a cell trained 1 unit a second."""

    def make(**settings):
        rule = {"leave": "deadline", "leave_within": 1.0, **settings}
        desk = new_desk(cells=4, capacity=2, per_burst=1, steps=8, **rule)
        desk.burst(0, 8)
        for i in range(8):
            desk.send(p.Started(execution=f"a{i}"))
        desk.at += 100.0
        for i in range(8):
            desk.send(p.Terminated(execution=f"a{i}"))
        desk.tell(waiting=8, batches_ready=1, work_left=50.0)
        desk.train(0)
        desk.policy.state.pace._seconds, desk.policy.state.pace._work = 10.0, 10.0
        desk.send(p.Published(version=1, manifest=b"m"))
        desk.tell(waiting=0, batches_ready=0, batches_closed=1, version=1, work_left=0.0, work_done=50.0)
        while desk.calls or desk.policy.state.by_role[Role.DRAINING]:
            for i in tuple(desk.policy.state.by_role[Role.DRAINING]):
                desk.drained(i)
            for cell in list(desk.calls):
                desk.done(cell)
        assert isinstance(desk.burst(1, 8), p.Granted)
        for i in range(8):
            desk.send(p.Started(execution=f"b{i}"))
        return desk

    return make


def test_the_next_cell_leaves_only_if_those_in_training_are_not_done_before_the_burst_ends(paced):
    desk = paced()
    desk.at += 40.0  # 60 s to go
    for i in range(4):
        desk.send(p.Terminated(execution=f"b{i}"))
    desk.tell(waiting=4, work_left=59.0)
    desk.train(0)  # nobody trains: the core leaves
    pace = desk.policy.state.pace.rate
    desk.tell(work_left=59.0 * pace)
    assert desk.role(1) is Role.ROLLOUT
    (held,) = desk.kinds("held")
    assert held.cell == 1
    assert held.numbers["trainers"] == 1
    assert held.numbers["w"] == 4 <= held.numbers["C_R"] - held.numbers["C_e"]
    assert (held.numbers["burst_seconds"], held.numbers["durations"]) == (60.0, 8)
    desk.tell(work_left=61.0 * pace)
    assert desk.role(1) is Role.DRAINING
    transfer = desk.kinds("transfer")[-1].numbers
    assert transfer["train_seconds"] == pytest.approx(61.0)
    assert transfer["train_seconds"] > transfer["burst_seconds"]


def test_when_the_burst_is_over_or_nothing_is_known_the_water_level_alone_decides(paced, new_desk):
    desk = paced()
    for i in range(8):
        desk.send(p.Terminated(execution=f"b{i}"))
    desk.tell(waiting=8, batches_ready=1, work_left=0.01)
    for cell in range(4):
        desk.train(cell)

    desk = new_desk(cells=4, capacity=2, leave="deadline")
    desk.burst()
    desk.end(6)
    desk.tell(waiting=6, work_left=1.0)
    desk.train(0)
    assert desk.role(1) is Role.DRAINING
    assert desk.kinds("transfer")[1].numbers["burst_seconds"] is None


def test_a_wider_window_keeps_a_cell_that_would_leave_for_little(paced):
    for within, role in ((1.0, Role.DRAINING), (1.5, Role.ROLLOUT)):
        desk = paced(leave_within=within)
        desk.at += 40.0
        for i in range(4):
            desk.send(p.Terminated(execution=f"b{i}"))
        desk.tell(waiting=4, work_left=10.0)
        desk.train(0)
        desk.tell(work_left=80.0 * desk.policy.state.pace.rate)
        assert desk.role(1) is role


def test_executions_that_wait_put_off_the_predicted_end(paced):
    desk = paced()
    state = desk.policy.state
    before = burst_seconds(state, desk.at, desk.policy.config)
    state.count.dispatched += 9  # two rounds of 8
    assert (before, burst_seconds(state, desk.at, desk.policy.config)) == (100.0, 200.0)


def test_a_cell_that_returned_dwells_in_rollout(new_desk):
    desk = new_desk(dwell=30.0)
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8, batches_ready=2)
    assert desk.role(0) is Role.ROLLOUT
    desk.tick(29.0)
    assert desk.role(0) is Role.ROLLOUT
    desk.tick(1.0)
    assert desk.role(0) is Role.DRAINING


def test_a_standalone_engine_counts_lasts_longest_and_never_trains(new_desk):
    desk = new_desk(cells=2, standalone=1)
    desk.send(p.CellHello(cell=2, agent="a", engine="extra", engine_url="u", capacity=8))
    assert [(e.engine, e.lasting) for e in desk.routes.engines] == [("cell-0", 0), ("cell-1", 1), ("extra", 2)]
    desk.burst()
    assert desk.policy.state.capacity == 16
    desk.tell(waiting=4)
    assert desk.role(0) is Role.DRAINING, "8 <= 16 - 4"
    desk.drained(0)
    desk.done(0)
    desk.train(1)
    desk.end(8)
    assert desk.role(2) is Role.ROLLOUT
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    desk.send(p.Published(version=2, manifest=b"m"))
    assert isinstance(desk.calls[2].request, p.Refresh)


def granted(desk, index, tasks, executions=8):
    return desk.send(p.OpenBurst(burst=index, executions=executions, tasks=tasks))


def learn(desk, capacity, tasks):
    """A burst in which task i took 10 * (i + 1) seconds."""
    granted(desk, 0, tasks)
    for i, task in enumerate(tasks):
        for member in range(8 // len(tasks)):
            desk.send(p.Started(execution=f"{i}-{member}", task=task))
    for i in range(len(tasks)):
        desk.at += 10.0
        for member in range(8 // len(tasks)):
            desk.send(p.Terminated(execution=f"{i}-{member}"))
    desk.tell(batches_closed=2)


@pytest.mark.parametrize(
    ("capacity", "setting", "order"), [(2, "longest", (2, 3, 0, 1)), (4, "longest", ()), (2, "planned", ())]
)
def test_groups_start_longest_first_only_when_not_all_can_start(new_desk, capacity, setting, order):
    desk = new_desk(capacity=capacity, order=setting)
    learn(desk, capacity, ("a", "b", "c", "d"))
    reply = granted(desk, 1, ("b", "a", "d", "new"))
    assert reply == p.Granted(burst=1, capacity=2 * capacity, order=order)
    assert granted(desk, 1, ("b", "a", "d", "new")) == reply, "asked again"
    assert desk.kinds("burst_granted")[1].numbers["order"] == ("longest" if order else "planned")


def test_groups_of_unequal_size_are_refused(new_desk):
    policy = new_desk().policy
    (record, refusal) = policy.step(Received(0.0, p.OpenBurst(burst=0, executions=8, tasks=("a", "b", "c"))))
    assert "groups of one size" in refusal.reason
    assert isinstance(refusal, Refuse)
    assert record.kind == "refused"


def test_a_burst_that_alone_breaks_the_bound_on_staleness_is_refused_at_the_start():
    Policy(SchedConfig(max_staleness=1), per_burst=2, steps=4)
    with pytest.raises(SchedError, match=r"max_staleness = 0 does not allow bursts of 2 batches"):
        Policy(SchedConfig(max_staleness=0), per_burst=2, steps=4)


def test_the_core_does_not_stay_beyond_the_bound_on_staleness(new_desk):
    for bound, stays in ((None, True), (2, True), (1, False)):
        desk = new_desk(cells=2, steps=8, max_staleness=bound)
        desk.burst()
        desk.end(8)
        desk.tell(waiting=8, batches_ready=2)
        desk.train(0)
        desk.tell(waiting=0, open_batch=1, batches_ready=1, batches_closed=1)
        desk.send(p.Published(version=1, manifest=b"m"))
        if desk.role(1) is Role.DRAINING:
            desk.train(1)
        desk.burst(1, 4)
        for cell in list(desk.calls):
            desk.done(cell)
        assert isinstance(desk.burst(1, 4), p.Granted) is stays
        if stays:
            assert desk.kinds("burst_granted")[1].numbers["staleness"] == 2


def test_colocate_moves_nobody_before_the_burst_has_ended(new_desk):
    desk = new_desk(schedule="colocate")
    desk.burst()
    desk.end(7)
    desk.tell(waiting=7, batches_ready=1)
    assert [desk.role(i) for i in (0, 1)] == [Role.ROLLOUT] * 2
    desk.end(1)
    desk.train(0)
    desk.train(1)


def asynchronous(new_desk, **settings):
    desk = new_desk(cells=3, per_burst=1, steps=6, schedule="async", trainers=1, **settings)
    assert desk.role(0) is Role.DRAINING, "its trainers train from the start"
    assert desk.burst().reason == "cell 0 is draining"
    desk.train(0)
    assert desk.burst() == p.Granted(burst=0, capacity=8)
    return desk


def test_async_samples_a_burst_while_the_one_before_is_trained(new_desk):
    desk = asynchronous(new_desk)
    desk.end(8)
    assert isinstance(desk.burst(1), p.Granted), "batch 0 is not trained: one version behind"
    desk.end(8)
    assert "2 versions behind" in desk.burst(2).reason
    desk.tell(batches_closed=1, version=1)
    assert "not published" in desk.burst(2).reason
    desk.send(p.Published(version=1, manifest=b"m"))
    assert [desk.role(i) for i in range(3)] == [Role.TRAINING, Role.REFRESHING, Role.REFRESHING]
    desk.done(1)
    desk.done(2)
    assert isinstance(desk.burst(2), p.Granted)
    assert [r.numbers["staleness"] for r in desk.kinds("burst_granted")] == [0, 1, 1]


def test_continuous_admission_grants_as_soon_as_nobody_waits_and_refreshes_in_place(new_desk):
    desk = asynchronous(new_desk, admission="continuous", max_staleness=2)
    assert "8 executions wait" in desk.burst(1).reason
    for i in range(8):
        desk.send(p.Started(execution=f"x{i}"))
    assert isinstance(desk.burst(1), p.Granted)
    desk.send(p.Terminated(execution="x0"))
    desk.send(p.Published(version=1, manifest=b"m"))
    assert [desk.calls[i].request for i in (1, 2)] == [p.Refresh(version=1, manifest=b"m", registration=1)] * 2
    assert len(desk.routes.engines) == 2
    for i in range(8):
        desk.send(p.Started(execution=f"y{i}"))
    assert isinstance(desk.burst(2), p.Granted)
    desk.send(p.Terminated(execution="x0"))
    assert desk.policy.state.count.terminated == 1, "said again, two bursts later"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"leave_quantile": 1.0}, "less than 1"),
        ({"leave_quantile": 0.0}, "must be positive"),
        ({"leave_within": 0.0}, "must be positive"),
        ({"dwell": -0.1}, "must not be negative"),
        ({"standalone": -1}, "must not be negative"),
        ({"max_staleness": -1}, "leave it out"),
        ({"schedule": "async", "cells": 2, "trainers": 2}, "needs an engine"),
        ({"schedule": "async", "cells": 2, "standalone": 2, "trainers": 3}, "must not exceed cells"),
        ({"admission": "continuous"}, "schedule = 'async'"),
        ({"leave": "never"}, "Invalid enum value"),
    ],
)
def test_wrong_settings_are_refused_with_a_remedy(settings, says):
    with pytest.raises((ValueError, msgspec.ValidationError), match=says):
        msgspec.convert(settings, SchedConfig)


def test_what_is_remembered_of_past_bursts_is_bounded(new_desk):
    desk = new_desk(per_burst=1, steps=20)
    state = desk.policy.state
    for burst in range(12):
        assert isinstance(desk.burst(burst, 8), p.Granted)
        for i in range(8):
            desk.send(p.Started(execution=f"{burst}-{i}", task=f"t{i}"))
            desk.send(p.Terminated(execution=f"{burst}-{i}"))
        desk.tell(batches_closed=burst + 1)
        sets = (state.count._started, state.count._terminated, state.count._replaced)
        assert all(sum(map(len, ids)) <= 8 * state.count.keep for ids in sets)
    assert len(state.durations) <= 4 * 8
    assert len(state.running) == 0
    assert state.count.keep <= 3


def test_what_is_kept_of_the_routable_engines_is_what_the_cells_say(world):
    w = world(
        cells=5, groups=3, group_size=4, per_burst=2, steps=6, seed=11, slow=20.0, proxies=2,
        faults=((40.0, "engine", 1), (90.0, "agent", 3), (200.0, "trainer", 2), (260.0, "call", 4)),
        settings={"capacity": 6},
    ).run()  # fmt: skip
    state = w.policy.state
    rollout = [c for c in state.cells if c.role is Role.ROLLOUT]
    assert list(state.routing) == [c.index for c in rollout]
    assert [(e.engine, e.url, e.capacity, e.version, e.lasting) for e in state.routes().engines] == [
        (c.engine, c.url, c.capacity, c.version, c.index) for c in rollout
    ]
    assert state.capacity == sum(c.capacity for c in rollout)
    assert dict(state.routing.versions) == {state.version: len(rollout)}
