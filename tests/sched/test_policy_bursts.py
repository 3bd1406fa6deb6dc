"""The policy: when a burst is over, cells return and the next burst is granted."""

import pytest

from gyre_sched import protocol as p
from gyre_sched.config import SchedConfig
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role


@pytest.mark.parametrize(
    ("backlog", "published", "returns"),
    [
        ({"batches_closed": 2, "version": 2}, 2, True),
        ({"batches_closed": 2, "version": 2}, 1, False),  # the weights are not out yet
        ({"batches_closed": 2, "version": 2}, None, False),
        ({"batches_closed": 1, "version": 1}, 1, False),  # a batch is still to come: it is being scored
        ({"batches_closed": 1, "version": 1, "batches_ready": 1, "waiting": 4}, 1, False),
        ({"batches_closed": 1, "version": 1, "open_batch": 1}, 1, False),
        ({"batches_closed": 2, "version": 2, "waiting": 3}, 2, True),  # left over; makes no batch
        ({"batches_closed": 1, "version": 1, "executions_trained": 5, "executions_excluded": 3}, 1, True),
        ({"batches_closed": 2, "version": 0}, None, True),  # nobody was admitted: no step, no new weights
    ],
)
def test_cells_return_when_the_data_of_the_burst_is_trained(trained, backlog, published, returns):
    desk = trained()
    if published is not None:
        desk.send(p.Published(version=published, manifest=b"m"))
    desk.tell(**{"waiting": 0, "batches_ready": 0, **backlog})
    assert [desk.role(i) for i in (0, 1)] == [Role.LEAVING if returns else Role.TRAINING] * 2
    if returns:
        want = p.EnterRollout(version=published or 0, manifest=b"m" if published else b"", registration=1)
        assert [desk.calls[i].request for i in (0, 1)] == [want, want]


def test_a_burst_whose_batches_never_come_is_given_up_after_a_while_and_owes_nothing(trained):
    desk = trained(settle_timeout=100.0)
    desk.send(p.Published(version=1, manifest=b"m"))
    desk.tell(waiting=2, batches_ready=0, batches_closed=1, version=1)
    desk.tick(99.0)
    assert desk.role(0) is Role.TRAINING
    desk.tick(1.0)
    assert desk.role(0) is Role.LEAVING
    (settled,) = desk.kinds("burst_settled")
    assert settled.numbers["how"] == "the feed was quiet for 100 s"
    desk.done(0)
    desk.done(1)
    assert isinstance(desk.burst(1), p.Granted)
    desk.end(8)
    desk.tell(batches_closed=3)  # two more, not three
    assert [r.numbers["burst"] for r in desk.kinds("burst_settled")] == [0, 1]


@pytest.mark.parametrize("served", [0, 1, 3])
def test_only_the_right_version_brings_a_cell_back(trained, served):
    desk = trained()
    desk.send(p.Published(version=2, manifest=b"m"))
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    desk.done(1)
    desk.done(0, version=served)
    assert [e.engine for e in desk.routes.engines] == ["cell-1"]
    assert desk.role(0) is Role.FAILED
    assert "may come back" in desk.burst(1).reason
    desk.tick(10.0)
    desk.done(0)
    assert [(e.engine, e.version) for e in desk.routes.engines] == [("cell-0", 2), ("cell-1", 2)]
    assert desk.burst(1) == p.Granted(burst=1, capacity=8)


def test_a_failed_cell_is_waited_for_only_as_long_as_it_may_come_back(new_desk):
    desk = new_desk(return_timeout=100.0, lease=20.0)
    desk.state(1, engine_alive=False)
    assert "cell 1 has failed" in desk.burst().reason
    desk.tick(100.0)
    assert isinstance(desk.burst(), p.Granted)
    desk = new_desk(lease=20.0)
    desk.state(1, engine_alive=False)
    desk.state(0)
    desk.tick(9.0, beats=False)
    desk.state(0)
    desk.tick(9.0, beats=False)
    assert "cell 1 has failed" in desk.burst().reason
    desk.tick(3.0, beats=False)
    assert isinstance(desk.burst(), p.Granted), "its agent is silent"


def test_a_cell_leaves_when_its_trainer_has_left_and_returns_when_its_engine_is_fresh(trained):
    desk = trained()
    desk.send(p.Published(version=2, manifest=b"m"))
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    desk.state(0, trainer="training")
    assert desk.role(0) is Role.LEAVING
    desk.state(0, trainer="idle")
    assert desk.role(0) is Role.REFRESHING
    assert not desk.routes.engines
    desk.done(0)
    assert desk.role(0) is Role.ROLLOUT


def test_no_burst_before_every_cell_is_back(trained):
    desk = trained()
    desk.send(p.Published(version=2, manifest=b"m"))
    assert "not trained" in desk.burst(1).reason
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    assert "cell 0 is leaving" in desk.burst(1).reason
    desk.done(0)
    assert "cell 1 is leaving" in desk.burst(1).reason
    desk.done(1)
    assert desk.burst(1) == p.Granted(burst=1, capacity=8)
    assert "unfinished" in desk.burst(2).reason


def test_no_burst_beyond_the_steps_of_the_run(new_desk):
    desk = new_desk(steps=4)
    for burst in range(2):
        assert isinstance(desk.burst(burst), p.Granted)
        desk.end(8)
        desk.tell(batches_closed=2 * burst + 2)
    assert "all 4 steps" in desk.burst(2).reason
    resumed = new_desk(steps=4)
    resumed.tell(batches_closed=2)
    assert isinstance(resumed.burst(1), p.Granted)
    resumed.end(8)
    resumed.tell(batches_closed=4)
    assert "all 4 steps" in resumed.burst(2).reason


def test_a_resumed_run_trains_what_it_finds_before_it_grants(new_desk):
    desk = new_desk()
    desk.tell(waiting=4, batches_ready=1, batches_closed=1)
    assert desk.role(0) is Role.DRAINING
    assert isinstance(desk.burst(1), p.NotYet)


def test_the_first_burst_waits_for_cells_that_start_but_not_for_ever(new_desk):
    desk = new_desk(start_timeout=50.0)
    policy = desk.policy = Policy(SchedConfig(cells=2, start_timeout=50.0), per_burst=2, steps=4)
    assert "feed" in desk.burst().reason
    desk.tell()
    desk.hello(0)
    assert "cell 1 is starting" in desk.burst().reason
    desk.tick(50.0)
    assert policy.state.cells[1].role is Role.FAILED
    assert desk.burst() == p.Granted(burst=0, capacity=4)
    desk.hello(1)
    assert len(desk.routes.engines) == 2


def test_engines_that_stayed_in_rollout_are_refreshed_between_bursts(new_desk):
    desk = new_desk()
    desk.burst()
    desk.end(4)
    desk.tell(waiting=4, batches_ready=1)
    desk.train(0)
    desk.end(4)
    desk.send(p.Published(version=2, manifest=b"m"))
    assert desk.role(1) is Role.DRAINING
    desk.drained(1)
    desk.done(1, failed="no memory")
    desk.tick(1.0)
    desk.done(1)
    desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=2)
    desk.drained(1)
    while desk.calls:
        desk.done(min(desk.calls))
    assert {(e.engine, e.version) for e in desk.routes.engines} == {("cell-0", 2), ("cell-1", 2)}

    desk = new_desk()
    desk.send(p.Published(version=1, manifest=b"m"))
    assert [desk.calls[i].request for i in (0, 1)] == [p.Refresh(version=1, manifest=b"m", registration=1)] * 2
    assert not desk.routes.engines


def test_refresh_in_rollout_keeps_the_routes_and_moves_no_cell_meanwhile(new_desk):
    desk = new_desk(refresh_in_rollout=True)
    desk.burst()
    desk.send(p.Published(version=1, manifest=b"m"))
    assert isinstance(desk.calls[0].request, p.Refresh)
    assert [e.version for e in desk.routes.engines] == [0, 0]
    desk.end(8)
    desk.tell(waiting=8)
    assert desk.role(0) is Role.ROLLOUT
    desk.done(0)
    assert desk.role(0) is Role.DRAINING
    assert (desk.routes.engines[0].engine, desk.routes.engines[0].version) == ("cell-1", 0)
    desk.done(1)
    assert desk.routes.engines[0].version == 1


def test_the_core_stays_only_if_a_batch_is_ready_and_the_others_hold_the_burst(new_desk):
    def ask(executions, *, ready=1, closed=1, **settings):
        desk = new_desk(cells=2, steps=8, **settings)
        desk.burst()
        desk.end(8)
        desk.tell(waiting=8, batches_ready=2)
        desk.train(0)
        desk.tell(waiting=0, open_batch=1, micro_steps_left=0, batches_ready=ready, batches_closed=closed)
        desk.send(p.Published(version=1, manifest=b"m"))
        if desk.role(1) is Role.DRAINING:
            desk.train(1)
        desk.burst(1, executions)
        for cell in list(desk.calls):
            desk.done(cell)
        return desk, desk.burst(1, executions)

    desk, reply = ask(4)
    assert reply == p.Granted(burst=1, capacity=4)
    assert desk.role(0) is Role.TRAINING
    assert desk.kinds("core_stays")
    assert [e.version for e in desk.routes.engines] == [1]
    for desk, reply in (
        ask(5),  # more than the other cell holds
        ask(4, ready=0),  # no batch is ready
        ask(4, closed=0),  # two batches behind
        ask(4, core_stays=False),
    ):
        assert isinstance(reply, p.NotYet)
        assert not desk.kinds("core_stays")


def replace(desk, execution, by, burst=0):
    return desk.send(p.Replace(execution=execution, by=by, burst=burst))


def count(desk):
    c = desk.policy.state.count
    return c.dispatched, c.terminated, desk.policy.state.water


def test_a_replacement_that_tells_the_end_too_keeps_the_water_level_and_counts_once(new_desk):
    desk = new_desk()
    desk.burst()
    for _ in range(2):
        assert replace(desk, "0", "0-r1") == p.Ack()
        assert count(desk) == (9, 1, 8)
    desk.send(p.Terminated(execution="0"))  # said again
    assert count(desk) == (9, 1, 8)
    desk.send(p.Started(execution="0-r1"))
    desk.end(7)  # "1" … "7"
    assert desk.kinds("burst_ended") == []
    desk.send(p.Terminated(execution="0-r1"))
    assert count(desk) == (9, 9, 0)
    assert len(desk.kinds("burst_ended")) == 1
    assert [r.numbers["by"] for r in desk.kinds("replaced")] == ["0-r1"]


def test_a_burst_that_ended_goes_on_with_a_replacement_as_long_as_nobody_has_left(new_desk):
    desk = new_desk()
    desk.burst()
    desk.end(8)
    assert replace(desk, "7", "7-r1") == p.Ack()
    assert count(desk) == (9, 8, 1)
    desk.tell(executions_trained=4, executions_excluded=4)  # one of nine is still to come
    assert desk.burst(1) == p.NotYet(reason="burst 0 has 1 unfinished executions")
    desk.send(p.Terminated(execution="7-r1"))
    desk.tell(executions_trained=4, executions_excluded=5)
    assert isinstance(desk.burst(1), p.Granted)


def test_what_is_routable_must_cover_a_replacement_that_raises_the_water_level(new_desk):
    desk = new_desk(cells=2, capacity=4)
    desk.burst()
    desk.end(4)
    desk.tell(waiting=4)
    assert desk.role(0) is Role.DRAINING  # 4 executions, and the other cell hosts 4
    assert replace(desk, "3", "3-r1").reason == (
        "1 cells left rollout, and the others host 4 executions, which are all in use"
    )
    assert replace(desk, "4", "4-r1") == p.Ack()  # it ends and is replaced at once
    assert count(desk) == (9, 5, 4)
    desk.send(p.Terminated(execution="4-r1"))
    assert replace(desk, "3", "3-r1") == p.Ack()
    assert count(desk) == (10, 6, 4)


@pytest.mark.parametrize(
    ("burst", "settled", "stopping", "says"),
    [
        (1, False, False, "burst 1 is not the one granted last, 0 is"),
        (0, True, False, "counts as trained"),
        (0, False, True, "shutting down"),
        (0, False, False, "no engine is routable"),
    ],
)
def test_replacements_that_are_declined_change_nothing(trained, burst, settled, stopping, says):
    desk = trained()
    if settled:
        desk.tell(waiting=0, batches_ready=0, batches_closed=2, version=0)
    if stopping:
        desk.send(p.Shutdown(reason="asked to"))
    before = count(desk)
    assert says in replace(desk, "7", "7-r1", burst).reason
    assert count(desk) == before
    assert says in desk.kinds("replace_declined")[0].numbers["reason"]
