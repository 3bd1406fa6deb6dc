"""Whole runs under the async schedule, failures included; the world checks what must hold at every step."""

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_sched.protocol import Role

_CHECKS = settings(
    max_examples=int(os.environ.get("GYRE_SOAK_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

shapes = st.fixed_dictionaries(
    {
        "cells": st.integers(2, 5),
        "groups": st.integers(1, 4),
        "group_size": st.integers(1, 6),
        "per_burst": st.integers(1, 2),
        "seed": st.integers(0, 2**32),
        "proxies": st.integers(1, 3),
        "long": st.sampled_from([0.0, 1.0, 100.0, 500.0]),
        "slow": st.sampled_from([0.0, 2.0, 20.0]),
    }
)
faults = st.lists(
    st.tuples(
        st.floats(0, 1000),
        st.sampled_from(["engine", "trainer", "agent", "silent", "call", "hang", "deaf", "scheduler"]),
        st.integers(0, 4),
    ),
    max_size=6,
).map(tuple)


@_CHECKS
@given(shape=shapes, bursts=st.integers(1, 4), faults=faults, trainers=st.integers(1, 4))
def test_every_batch_is_trained_within_the_bound_and_the_others_never_train(world, shape, bursts, faults, trainers):
    class Asynchronous(world):
        @property
        def finished(self):
            return self.closed >= self.steps and self.policy.state.water == 0

    trainers = min(trainers, shape["cells"] - 1)
    limits = {"attempts": 50, "capacity": 30, "schedule": "async", "trainers": trainers}
    w = Asynchronous(**shape, steps=bursts * shape["per_burst"], faults=faults, settings=limits).run()
    assert w.closed == w.steps, [r for r in w.records[-30:] if r.kind != "backlog"]
    assert w.bursts == bursts
    assert not w.refused
    granted = w.kinds("burst_granted")
    assert all(r.numbers["staleness"] <= r.numbers["staleness_bound"] == 2 * shape["per_burst"] - 1 for r in granted)
    assert {r.cell for r in w.kinds("transfer")} <= set(range(trainers))
    assert not any(w.roles[i] is Role.TRAINING for i in range(trainers, shape["cells"]))
    if not faults:
        assert not w.kinds("leave")
