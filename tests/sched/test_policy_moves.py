"""The policy: when a cell may leave rollout, and how."""

import pytest

from gyre_sched import protocol as p
from gyre_sched.protocol import Role


@pytest.mark.parametrize(
    ("ended", "waiting", "open_batch", "left", "ready", "moves"),
    [
        (0, 4, None, 0, 1, False),  # w = 8 > 8 - 4
        (3, 4, None, 0, 1, False),  # w = 5
        (4, 0, None, 0, 0, False),  # water low, nothing to train on
        (4, 2, None, 0, 0, True),  # a complete group waits
        (4, 0, 0, 1, 1, True),  # an open batch with work left
        (4, 0, 0, 0, 0, True),  # an open batch the core must close
        (4, 0, None, 0, 1, True),  # only excluded executions: a batch all the same
        (8, 8, None, 0, 2, True),
    ],
)
def test_the_core_leaves_rollout_when_the_rest_holds_the_work_and_data_waits(
    new_desk, ended, waiting, open_batch, left, ready, moves
):
    desk = new_desk()
    assert isinstance(desk.burst(), p.Granted)
    desk.end(ended)
    desk.tell(waiting=waiting, open_batch=open_batch, micro_steps_left=left, batches_ready=ready)
    assert (desk.role(0) is Role.DRAINING) is moves
    assert desk.role(1) is Role.ROLLOUT
    if moves:
        (transfer,) = desk.kinds("transfer")
        told = {k: transfer.numbers[k] for k in ("w", "C_R", "C_e", "d", "p", "f", "epoch")}
        assert told == {"w": 8 - ended, "C_R": 8, "C_e": 4, "d": 8, "p": 0, "f": ended, "epoch": desk.routes.epoch}
        assert [e.engine for e in desk.routes.engines] == ["cell-1"]
        assert desk.routes.draining == ("cell-0",)


def test_satellites_follow_one_at_a_time_once_the_core_trains(new_desk):
    desk = new_desk(cells=4, capacity=2)
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8, batches_ready=2)
    for cell in range(4):
        moving = [i for i in range(4) if desk.role(i) in (Role.DRAINING, Role.ENTERING)]
        assert moving == [cell]
        desk.drained(cell)
        assert desk.role(cell) is Role.ENTERING
        assert isinstance(desk.calls[cell].request, p.EnterTraining)
        desk.done(cell)
    assert [r.cell for r in desk.kinds("transfer")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("left", "waiting", "open_batch", "moves"), [(1, 0, 0, True), (0, 2, 0, True), (0, 0, 0, False)]
)
def test_a_satellite_needs_work_to_take(new_desk, left, waiting, open_batch, moves):
    desk = new_desk()
    desk.burst()
    desk.end(8)
    desk.tell(open_batch=0, batches_ready=0)
    desk.train(0)
    assert desk.role(1) is Role.ROLLOUT
    desk.tell(open_batch=open_batch, micro_steps_left=left, waiting=waiting)
    assert (desk.role(1) is Role.DRAINING) is moves


def test_a_drain_waits_for_every_proxy_and_for_routes_without_the_cell(new_desk):
    desk = new_desk(proxies=("a", "b"))
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8)
    begun = desk.routes.epoch
    desk.drained(0, "a", epoch=begun - 1)  # said before it knew
    desk.drained(0, "b", epoch=begun)
    desk.drained(0, "b", epoch=begun)
    desk.drained(1, "a", epoch=begun)  # another engine
    assert desk.role(0) is Role.DRAINING
    desk.send(p.ProxyHello(proxy="c", url="http://late"))  # never sent anything to the cell
    desk.drained(0, "a", epoch=begun)
    assert desk.role(0) is Role.ENTERING


def test_without_proxies_a_drain_is_over_at_once(new_desk):
    desk = new_desk(proxies=())
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8)
    assert desk.role(0) is Role.ENTERING


def test_a_proxy_that_never_acks_counts_as_gone_until_it_is_heard_again(new_desk):
    desk = new_desk(proxies=("a", "b"), drain_timeout=10.0)
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8)
    desk.drained(0, "a")
    desk.tick(9.9)
    assert desk.role(0) is Role.DRAINING
    desk.tick(0.1)
    assert desk.role(0) is Role.ENTERING
    assert [r.numbers["proxy"] for r in desk.kinds("proxy_gone")] == ["b"]
    assert set(desk.policy.state.proxies) == {"a"}
    desk.drained(0, "b")
    assert set(desk.policy.state.proxies) == {"a", "b"}


def test_a_drain_is_cancelled_when_the_other_engine_dies(new_desk):
    desk = new_desk()
    desk.burst()
    desk.end(4)
    desk.tell(waiting=4)
    assert desk.role(0) is Role.DRAINING
    desk.state(1, engine_alive=False)
    assert desk.role(0) is Role.ROLLOUT
    assert desk.role(1) is Role.FAILED
    assert [e.engine for e in desk.routes.engines] == ["cell-0"]
    assert desk.kinds("transfer_cancelled")
