"""The cell state machine: its edges, its deadlines, its caps."""

import itertools

import msgspec
import pytest

from gyre_sched.cell import EDGES, MOVING, Cell, time_limit
from gyre_sched.config import SchedConfig
from gyre_sched.errors import IllegalEdge
from gyre_sched.protocol import Role
from gyre_transport.config import section
from gyre_transport.errors import ConfigError

ROUND = [
    Role.STARTING,
    Role.ROLLOUT,
    Role.DRAINING,
    Role.ENTERING,
    Role.TRAINING,
    Role.LEAVING,
    Role.REFRESHING,
    Role.ROLLOUT,
]


def test_the_round_of_a_healthy_cell():
    cell = Cell(0, since=10.0)
    for at, role in enumerate(ROUND[1:], start=11):
        assert cell.move(role, at) == 1.0
    assert (cell.role, cell.since) == (Role.ROLLOUT, 17)


@pytest.mark.parametrize(("before", "to"), itertools.product(Role, Role))
def test_only_the_edges_of_the_table_can_be_taken(before, to):
    cell = Cell(3, role=before, since=5.0)
    if to in EDGES[before]:
        cell.move(to, 6.0)
        assert cell.role is to
    else:
        with pytest.raises(IllegalEdge, match=f"cell 3 is {before}"):
            cell.move(to, 6.0)
        assert (cell.role, cell.since) == (before, 5.0)


def test_every_role_fails_and_nothing_trains_without_draining_and_entering():
    assert all(Role.FAILED in EDGES[r] for r in Role if r is not Role.FAILED)
    assert {r for r in Role if Role.TRAINING in EDGES[r]} == {Role.ENTERING}
    assert {r for r in Role if Role.ENTERING in EDGES[r]} == {Role.DRAINING}
    assert {r for r in Role if Role.ROLLOUT in EDGES[r]} == {
        Role.STARTING,
        Role.DRAINING,
        Role.REFRESHING,
        Role.FAILED,
    }
    assert MOVING == (Role.DRAINING, Role.ENTERING)


@pytest.mark.parametrize("role", list(Role))
def test_roles_on_the_way_have_a_deadline(role):
    config = SchedConfig(start_timeout=1.0, drain_timeout=2.0, enter_timeout=3.0, return_timeout=4.0, heartbeat=0.5)
    limit = time_limit(role, config)
    cell = Cell(0, role=role, since=100.0)
    if role in (Role.ROLLOUT, Role.TRAINING, Role.FAILED, Role.FENCED):
        assert limit is None
        assert not cell.overdue(1e9, config)
        return
    slack = 0.0 if role in (Role.STARTING, Role.DRAINING) else 1.0
    assert not cell.overdue(100.0 + limit + slack - 0.01, config)
    assert cell.overdue(100.0 + limit + slack, config)


def test_attempt_caps():
    config = SchedConfig(attempts=2)
    cell = Cell(0, role=Role.FAILED, trainer_alive=True, enter_failures=1, return_failures=1)
    assert cell.may_train(config)
    assert not cell.lost(config)
    cell.enter_failures = cell.return_failures = 2
    assert not cell.may_train(config)
    assert cell.lost(config)
    cell.role = Role.ROLLOUT
    assert not cell.lost(config)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"cells": 0}, "cells"),
        ({"drain_timeout": 0}, "drain_timeout"),
        ({"drain_timeout": float("nan")}, "drain_timeout"),
        ({"lease": 1.0, "heartbeat": 1.0}, "lease"),
        ({"attempts": "3"}, "attempts"),
        ({"drain_timout": 3}, "did you mean 'drain_timeout'"),
    ],
)
def test_a_wrong_config_is_told_by_name(values, named):
    with pytest.raises(ConfigError, match=named):
        section({"sched": values}, "sched", SchedConfig)


def test_defaults_are_valid_and_whole_numbers_are_seconds_too():
    assert section({}, "sched", SchedConfig) == SchedConfig()
    assert section({"sched": {"lease": 40}}, "sched", SchedConfig).lease == 40.0
    assert msgspec.structs.asdict(SchedConfig())["trainer"] == ()
