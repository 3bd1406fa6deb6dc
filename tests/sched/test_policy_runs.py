"""Whole runs of the policy in a simulated world: what must hold at every step is checked by the world itself."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_sched.protocol import Role

_EXAMPLES = int(os.environ.get("GYRE_SOAK_EXAMPLES", "60"))
_CHECKS = settings(
    max_examples=_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def _finished(w):
    state = w.policy.state
    backlog = state.backlog
    assert w.closed == w.steps, (
        f"{w.roles} w={state.water} {backlog} {[r for r in w.records[-40:] if r.kind != 'backlog']}"
    )
    assert w.bursts == w.steps // w.per_burst
    assert len(w.kinds("burst_ended")) == w.bursts
    assert len(w.kinds("burst_settled")) == w.bursts - len(w.kinds("core_stays"))
    assert state.count.dispatched == state.count.terminated
    assert not w.refused


shapes = st.fixed_dictionaries(
    {
        "cells": st.integers(1, 5),
        "groups": st.integers(1, 4),
        "group_size": st.integers(1, 6),
        "per_burst": st.integers(1, 3),
        "seed": st.integers(0, 2**32),
        "proxies": st.integers(1, 3),
        "long": st.sampled_from([0.0, 1.0, 100.0, 500.0]),
        "slow": st.sampled_from([0.0, 2.0, 20.0]),
    }
)


@_CHECKS
@given(
    shape=shapes,
    bursts=st.integers(1, 3),
    capacity=st.integers(2, 40),
    stays=st.booleans(),
    early=st.booleans(),
    leave=st.sampled_from(["water", "deadline"]),
    schedule=st.sampled_from(["elastic", "elastic", "colocate"]),
)
def test_every_burst_ends_and_the_next_is_granted(world, shape, bursts, capacity, stays, early, leave, schedule):
    limits = {"capacity": capacity, "core_stays": stays, "refresh_in_rollout": early, "leave": leave}
    limits["schedule"] = schedule
    w = world(**shape, steps=bursts * shape["per_burst"], settings=limits).run()
    _finished(w)
    assert not w.kinds("enter_failed")
    assert not w.kinds("return_failed")
    assert not w.kinds("halted")
    assert all(role is Role.ROLLOUT for role in w.roles.values())


faults = st.lists(
    st.tuples(
        st.floats(0, 1000),
        st.sampled_from(["engine", "trainer", "agent", "silent", "call", "hang", "deaf", "dead", "scheduler"]),
        st.integers(0, 4),
    ),
    max_size=8,
).map(tuple)


@_CHECKS
@given(
    shape=shapes,
    bursts=st.integers(1, 2),
    faults=faults,
    stays=st.booleans(),
    leave=st.sampled_from(["water", "deadline"]),
)
def test_failures_that_leave_the_core_never_break_a_rule_nor_end_the_run(world, shape, bursts, faults, stays, leave):
    limits = {"attempts": 50, "capacity": 8, "core_stays": stays, "leave": leave}
    w = world(**shape, steps=bursts * shape["per_burst"], faults=faults, settings=limits).run()
    _finished(w)


@_CHECKS
@given(shape=shapes, bursts=st.integers(1, 2), faults=faults, stays=st.booleans(), share=st.floats(0.05, 0.6))
def test_replacements_never_break_a_rule_nor_end_the_run(world, shape, bursts, faults, stays, share):
    """Each is counted once, raises the water level only where that is covered, and its burst ends after it."""
    limits = {"attempts": 50, "capacity": 8, "core_stays": stays}
    w = world(**shape, steps=bursts * shape["per_burst"], faults=faults, settings=limits, replacing=share).run()
    count = w.policy.state.count
    assert w.closed == w.steps
    assert w.bursts == w.steps // w.per_burst
    assert count.dispatched == count.terminated == w.dispatched
    assert count.dispatched == shape["groups"] * shape["group_size"] * w.steps + w.replaced
    assert not w.refused


@pytest.mark.parametrize("cell", [1, 2])
def test_a_run_goes_on_without_a_satellite_that_never_comes_back(world, cell):
    w = world(cells=3, faults=((60.0, "dead", cell),), long=300.0).run()
    _finished(w)
    assert w.roles[cell] is Role.FENCED
    assert w.kinds("lease_expired")


def test_a_feed_that_does_not_count_ready_batches_is_enough(world):
    for seed in range(20):
        _finished(world(seed=seed, reports_ready=False).run())


def test_a_burst_over_before_any_cell_moved_is_trained_by_all_cells_in_order(world):
    w = world(cells=3, long=0.0, slow=0.1, groups=4, steps=2, seed=1).run()
    _finished(w)
    first = [r.cell for r in w.kinds("transfer")]
    assert first[0] == 0
    assert first == sorted(first)
    assert all(r.numbers["w"] == 0 for r in w.kinds("transfer"))


def test_a_proxy_that_never_acks_is_gone_after_the_deadline(world):
    w = world(faults=((0.0, "deaf", 0),), proxies=2, long=50.0).run()
    _finished(w)
    gone = w.kinds("proxy_gone")
    assert gone
    assert {r.numbers["proxy"] for r in gone} == {"proxy-0"}
    assert all(r.numbers["seconds"] >= w.config.drain_timeout for r in gone)


def test_a_satellite_that_never_enters_stays_in_rollout_and_a_core_halts_the_run(world):
    w = world(cells=2, long=20.0, settings={"attempts": 2})
    w.failing[1] = 0
    carry, w._carry_out = w._carry_out, None

    def refuse_training(call):
        if call.cell == 1 and type(call.request).__name__ == "EnterTraining":
            w.failing[1] = 1
        carry(call)

    w._carry_out = refuse_training
    _finished(w.run())
    assert len(w.kinds("enter_failed")) in (0, 1, 2)

    w = world(cells=2, long=20.0, settings={"attempts": 2})
    carry_core = w._carry_out

    def refuse_core(call):
        if call.cell == 0 and type(call.request).__name__ == "EnterTraining":
            w.failing[0] = 1
        carry_core(call)

    w._carry_out = refuse_core
    w.run(limit=5000.0)
    assert len(w.kinds("enter_failed")) == 2
    assert [r.cell for r in w.kinds("barred")] == [0]
    assert w.policy.state.halted
    assert "trainer" in w.policy.state.halted


def test_some_replacements_are_counted_and_some_declined_and_bursts_end_after_them(world):
    kinds = {"replaced": 0, "replace_declined": 0}
    for seed in range(10):
        w = world(seed=seed, replacing=0.3, slow=60.0, settings={"capacity": 4}).run()
        assert w.closed == w.steps
        assert len(w.kinds("burst_ended")) >= w.bursts
        for kind in kinds:
            kinds[kind] += len(w.kinds(kind))
    assert min(kinds.values()) > 0, kinds


@_CHECKS
@given(
    shape=shapes,
    bursts=st.integers(1, 3),
    at=st.lists(st.floats(0, 1000), min_size=1, max_size=20),
    others=faults,
    leave=st.sampled_from(["water", "deadline"]),
)
def test_a_scheduler_that_is_killed_again_and_again_goes_on_from_its_journal(world, shape, bursts, at, others, leave):
    """The world compares the states: what is restored is what was, and nobody is bothered."""
    killed = tuple((when, "scheduler", 0) for when in at)
    limits = {"attempts": 50, "capacity": 8, "leave": leave}
    w = world(**shape, steps=bursts * shape["per_burst"], faults=(*killed, *others), settings=limits).run()
    _finished(w)
    assert w.policy.state.term == 1 + len(w.kinds("scheduler_started")[1:])
    if not others:
        assert not w.kinds("lease_expired")
        assert all(role is Role.ROLLOUT for role in w.roles.values())
