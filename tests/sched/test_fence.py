"""The agent's fence and the scheduler's leases: no moment at which both think that the cell acts for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sched import protocol as p
from gyre_sched.actions import Received, Returned, Silent, Tick
from gyre_sched.errors import Superseded
from gyre_sched.fence import Fence
from gyre_sched.leases import Leases


def order(term, registration):
    return p.EnterTraining(term=term, registration=registration)


def beat(at, cell=0):
    return Received(at, p.CellState(cell=cell, engine_alive=True, trainer_alive=True))


def test_orders_before_the_first_registration_are_not_obeyed():
    assert "nothing was heard" in Fence(30.0).refusal(order(1, 1), 0.0)


def test_an_order_is_for_one_registration_of_one_scheduler_or_a_later_one():
    fence = Fence(30.0)
    assert fence.registered(p.Registered(term=2, registration=5), sent=0.0)
    assert fence.refusal(order(2, 5), 1.0) is None
    assert "for registration 4" in fence.refusal(order(2, 4), 1.0)
    assert "of term 1" in fence.refusal(order(1, 5), 1.0)
    assert fence.refusal(order(3, 5), 1.0) is None  # another scheduler went on from the journal
    assert "of term 2" in fence.refusal(order(2, 5), 1.0), "the one before is over"
    assert not fence.registered(p.Registered(term=2, registration=6), sent=2.0)


def test_what_lapsed_takes_a_new_registration():
    fence = Fence(30.0)
    fence.registered(p.Registered(term=1, registration=1), sent=0.0)
    fence.acknowledged(20.0)
    assert fence.refusal(order(1, 1), 50.0) is None
    assert "nothing was heard" in fence.refusal(order(1, 1), 50.1)
    fence.acknowledged(50.2)  # an answer that comes too late
    assert "nothing was heard" in fence.refusal(order(1, 1), 50.2)
    fence.registered(p.Registered(term=1, registration=2), sent=60.0)
    assert "for registration 1" in fence.refusal(order(1, 1), 61.0)
    assert fence.refusal(order(1, 2), 61.0) is None
    fence.lapse()
    assert not fence.holds(61.0)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 20.0), st.sampled_from(["beat", "lost", "tick"]), st.floats(0.0, 5.0)), max_size=60
    )
)
def test_the_fence_falls_before_the_lease_ends(steps):
    """Beats arrive late, or not at all; when the scheduler gives a cell up, its agent has."""
    lease, now = 15.0, 0.0
    leases, fence = Leases(1, lease, 0.0), Fence(lease)
    fence.registered(p.Registered(term=1, registration=1), sent=0.0)
    for after, what, late in steps:
        sent = now + after
        now = sent + late
        if what == "beat":
            leases.hear(beat(now))
            if fence.holds(now):
                fence.acknowledged(sent)
        for event in leases.tick(now):
            if isinstance(event, Silent):
                assert not fence.holds(now)
                return


def test_a_lease_ends_once():
    leases = Leases(3, 30.0, 0.0)
    for at in (10.0, 20.0, 30.0):
        leases.hear(beat(at, 1))
        assert leases.tick(at) == [Tick(at)]
    assert leases.tick(40.0) == [Silent(40.0, (0, 2), (40.0, 40.0)), Tick(40.0)]
    assert leases.tick(50.0) == [Tick(50.0)]
    leases.hear(beat(51.0, 2))
    assert leases.tick(61.0) == [Silent(61.0, (1,), (31.0,)), Tick(61.0)]
    assert leases.tick(76.0) == [Tick(76.0)]
    assert leases.tick(82.0) == [Silent(82.0, (2,), (31.0,)), Tick(82.0)]


def test_a_scheduler_that_slept_gives_nobody_up():
    leases = Leases(2, 30.0, 0.0)
    assert leases.tick(100.0) == [Tick(100.0, 100.0)]
    assert leases.tick(110.0) == [Tick(110.0)]
    leases.hear(Received(110.0, p.GetStatus()))  # nobody's
    leases.hear(beat(110.0, 7))  # of no cell
    assert [type(e) for e in leases.tick(120.0)] == [Tick]
    assert leases.tick(131.0) == [Silent(131.0, (0, 1), (31.0, 31.0)), Tick(131.0)]


def test_a_scheduler_that_was_replaced_ends(new_desk):
    desk = new_desk()
    desk.burst()
    desk.tell(waiting=8, batches_ready=2)
    desk.end(8)
    desk.drained(0)
    call = desk.calls[0]
    with pytest.raises(Superseded, match="this one ends"):
        desk.take(Returned(desk.at, 0, call.call, p.Fenced(term=9, detail="")))


def test_an_order_that_overtook_the_registration_is_given_again(new_desk):
    desk = new_desk()
    desk.burst()
    desk.tell(waiting=8, batches_ready=2)
    desk.end(8)
    desk.drained(0)
    first = desk.calls.pop(0)
    desk.take(Returned(desk.at, 0, first.call, p.Fenced(term=0, detail="")))
    assert not desk.calls
    desk.state(0)
    again = desk.calls[0]
    assert (again.request, again.call > first.call) == (first.request, True)
    desk.done(0)
    assert desk.role(0) is p.Role.TRAINING
