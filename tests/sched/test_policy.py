"""The policy's rules, one table each."""

import msgspec
import pytest

from gyre_sched import protocol as p
from gyre_sched import rules
from gyre_sched.actions import Answer, Call, Publish, Received, Record, Refuse, Returned, Tick
from gyre_sched.config import SchedConfig
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role


class Desk:
    """A policy, a clock and what came out."""

    def __init__(self, *, cells=2, capacity=4, per_burst=2, steps=4, proxies=("proxy",), **settings):
        self.policy = Policy(SchedConfig(cells=cells, **settings), per_burst=per_burst, steps=steps)
        self.at = 0.0
        self.capacity = capacity
        self.calls: dict[int, Call] = {}
        self.records: list[Record] = []
        self.routes: p.Routes | None = None
        self.backlog = p.Backlog(
            waiting=0, open_batch=None, micro_steps_left=0, batches_closed=0, executions_trained=0,
            executions_excluded=0,
        )  # fmt: skip
        for cell in range(cells):
            self.hello(cell)
        for proxy in proxies:
            self.send(p.ProxyHello(proxy=proxy, url="http://proxy"))
        self.tell()

    def take(self, event):
        reply = None
        for action in self.policy.step(event):
            match action:
                case Record():
                    self.records.append(action)
                case Call():
                    self.calls[action.cell] = action
                case Publish(routes):
                    self.routes = routes
                case Answer(reply):
                    pass
                case Refuse(reason):
                    raise AssertionError(reason)
        return reply

    def send(self, request):
        return self.take(Received(self.at, request))

    def hello(self, cell, version=0):
        return self.send(
            p.CellHello(
                cell=cell, agent=f"agent-{cell}", engine=f"cell-{cell}", engine_url=f"http://{cell}",
                capacity=self.capacity, version=version,
            )
        )  # fmt: skip

    def state(self, cell, **fields):
        return self.send(p.CellState(**{"cell": cell, "engine_alive": True, "trainer_alive": True, **fields}))

    def tell(self, **changes):
        self.backlog = msgspec.structs.replace(self.backlog, **changes)
        return self.send(self.backlog)

    def tick(self, seconds=0.0, beats=True):
        """Time passes; agents are heard."""
        self.at += seconds
        if beats:
            self.policy.state.ticked = self.at
            for cell in self.policy.state.cells:
                cell.heard = self.at
        return self.take(Tick(self.at))

    def burst(self, index=0, executions=8):
        return self.send(p.OpenBurst(burst=index, executions=executions))

    def end(self, count):
        f = self.policy.state.count.terminated
        for i in range(f, f + count):
            self.send(p.Terminated(execution=str(i)))

    def drained(self, cell, proxy="proxy", epoch=None):
        epoch = self.policy.state.epoch if epoch is None else epoch
        self.send(p.Drained(proxy=proxy, engine=f"cell-{cell}", epoch=epoch, moved=0))

    def done(self, cell, version=None, failed=None):
        call = self.calls.pop(cell)
        version = getattr(call.request, "version", 0) if version is None else version
        reply = p.Failed(detail=failed) if failed else p.Done(seconds=1.0, version=version)
        self.take(Returned(self.at, cell, call.call, reply))

    def train(self, cell):
        self.drained(cell)
        self.done(cell)
        assert self.role(cell) is Role.TRAINING

    def role(self, cell):
        return self.policy.state.cells[cell].role

    def kinds(self, kind):
        return [r for r in self.records if r.kind == kind]


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
    ended, waiting, open_batch, left, ready, moves
):
    desk = Desk()
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


def test_satellites_follow_one_at_a_time_once_the_core_trains():
    desk = Desk(cells=4, capacity=2)
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
def test_a_satellite_needs_work_to_take(left, waiting, open_batch, moves):
    desk = Desk()
    desk.burst()
    desk.end(8)
    desk.tell(open_batch=0, batches_ready=0)
    desk.train(0)
    assert desk.role(1) is Role.ROLLOUT
    desk.tell(open_batch=open_batch, micro_steps_left=left, waiting=waiting)
    assert (desk.role(1) is Role.DRAINING) is moves


def test_a_drain_waits_for_every_proxy_and_for_routes_without_the_cell():
    desk = Desk(proxies=("a", "b"))
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


def test_without_proxies_a_drain_is_over_at_once():
    desk = Desk(proxies=())
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8)
    assert desk.role(0) is Role.ENTERING


def test_a_proxy_that_never_acks_counts_as_gone_until_it_is_heard_again():
    desk = Desk(proxies=("a", "b"), drain_timeout=10.0)
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


def test_a_drain_is_cancelled_when_the_other_engine_dies():
    desk = Desk()
    desk.burst()
    desk.end(4)
    desk.tell(waiting=4)
    assert desk.role(0) is Role.DRAINING
    desk.state(1, engine_alive=False)
    assert desk.role(0) is Role.ROLLOUT
    assert desk.role(1) is Role.FAILED
    assert [e.engine for e in desk.routes.engines] == ["cell-0"]
    assert desk.kinds("transfer_cancelled")


def trained(**settings):
    """Both cells in training, the burst over, its data trained."""
    desk = Desk(**settings)
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8, batches_ready=2)
    desk.train(0)
    desk.train(1)
    return desk


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
def test_cells_return_when_the_data_of_the_burst_is_trained(backlog, published, returns):
    desk = trained()
    if published is not None:
        desk.send(p.Published(version=published, manifest=b"m"))
    desk.tell(**{"waiting": 0, "batches_ready": 0, **backlog})
    assert [desk.role(i) for i in (0, 1)] == [Role.LEAVING if returns else Role.TRAINING] * 2
    if returns:
        want = p.EnterRollout(version=published or 0, manifest=b"m" if published else b"")
        assert [desk.calls[i].request for i in (0, 1)] == [want, want]


def test_a_burst_whose_batches_never_come_is_given_up_after_a_while_and_owes_nothing():
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
def test_only_the_right_version_brings_a_cell_back(served):
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


def test_a_failed_cell_is_waited_for_only_as_long_as_it_may_come_back():
    desk = Desk(return_timeout=100.0, lease=20.0)
    desk.state(1, engine_alive=False)
    assert "cell 1 has failed" in desk.burst().reason
    desk.tick(100.0)
    assert isinstance(desk.burst(), p.Granted)
    desk = Desk(lease=20.0)
    desk.state(1, engine_alive=False)
    desk.state(0)
    desk.at += 15.0
    desk.state(0)
    desk.at += 6.0
    assert isinstance(desk.burst(), p.Granted), "its agent is silent"


def test_a_cell_leaves_when_its_trainer_has_left_and_returns_when_its_engine_is_fresh():
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


def test_no_burst_before_every_cell_is_back():
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


def test_no_burst_beyond_the_steps_of_the_run():
    desk = Desk(steps=4)
    for burst in range(2):
        assert isinstance(desk.burst(burst), p.Granted)
        desk.end(8)
        desk.tell(batches_closed=2 * burst + 2)
    assert "all 4 steps" in desk.burst(2).reason
    resumed = Desk(steps=4)
    resumed.tell(batches_closed=2)
    assert isinstance(resumed.burst(1), p.Granted)
    resumed.end(8)
    resumed.tell(batches_closed=4)
    assert "all 4 steps" in resumed.burst(2).reason


def test_a_resumed_run_trains_what_it_finds_before_it_grants():
    desk = Desk()
    desk.tell(waiting=4, batches_ready=1, batches_closed=1)
    assert desk.role(0) is Role.DRAINING
    assert isinstance(desk.burst(1), p.NotYet)


def test_the_first_burst_waits_for_cells_that_start_but_not_for_ever():
    desk = Desk(start_timeout=50.0)
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


def test_engines_that_stayed_in_rollout_are_refreshed_between_bursts():
    desk = Desk()
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

    desk = Desk()
    desk.send(p.Published(version=1, manifest=b"m"))
    assert [desk.calls[i].request for i in (0, 1)] == [p.Refresh(version=1, manifest=b"m")] * 2
    assert not desk.routes.engines


def test_refresh_in_rollout_keeps_the_routes_and_moves_no_cell_meanwhile():
    desk = Desk(refresh_in_rollout=True)
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


def test_the_core_stays_only_if_a_batch_is_ready_and_the_others_hold_the_burst():
    def ask(executions, *, ready=1, closed=1, **settings):
        desk = Desk(cells=2, steps=8, **settings)
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


def test_a_lost_trainer_is_waited_for_and_then_the_cell_comes_back():
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


def test_a_silent_agent_fails_its_cell_unless_the_scheduler_itself_slept():
    desk = Desk(lease=30.0)
    for _ in range(4):
        desk.state(0)
        desk.tick(10.0, beats=False)
    assert [desk.role(i) for i in (0, 1)] == [Role.ROLLOUT, Role.FAILED]
    assert desk.kinds("lease_expired")[0].numbers["silent"] == 40.0
    desk.tick(1000.0, beats=False)
    assert desk.role(0) is Role.ROLLOUT
    assert desk.kinds("slept")


def test_an_engine_that_came_back_with_old_weights_takes_new_ones_first():
    desk = Desk()
    desk.send(p.Published(version=1, manifest=b"m"))
    desk.done(0)
    desk.done(1)
    desk.burst()
    desk.state(1, engine_alive=False)
    desk.state(1, version=0, routable=True)
    assert desk.role(1) is Role.REFRESHING
    assert desk.calls[1].request == p.Refresh(version=1, manifest=b"m")
    desk.done(1)
    assert [(e.engine, e.version) for e in desk.routes.engines] == [("cell-0", 1), ("cell-1", 1)]


def test_with_work_and_no_engine_a_training_cell_is_recalled():
    desk = Desk(floor_grace=60.0)
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


def test_a_core_that_cannot_enter_halts_the_run_and_says_so():
    desk = Desk(attempts=2)
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


def test_a_half_refreshed_engine_is_not_trusted_on_its_agents_word():
    desk = Desk()
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
def test_after_shutdown_nothing_moves_but_running_work_keeps_its_engines(reason):
    desk = Desk()
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


def test_a_late_answer_changes_nothing():
    desk = Desk(enter_timeout=10.0)
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


def test_a_second_look_decides_nothing_new():
    desk = trained()
    before = desk.policy.state.status(desk.at)
    assert desk.policy.step(Tick(desk.at)) == []
    assert desk.policy.state.status(desk.at) == before


def test_ids_of_the_burst_before_are_still_known():
    desk = Desk(steps=8)
    desk.burst()
    desk.end(8)
    desk.tell(batches_closed=2)
    desk.burst(1)
    desk.send(p.Terminated(execution="3"))
    desk.send(p.Started(execution="3"))
    desk.send(p.Started(execution="3"))
    assert desk.policy.state.water == 8
    assert desk.policy.state.count.started == 1


def test_water_is_what_the_rule_says():
    desk = Desk(cells=3)
    desk.burst(executions=9)
    cell = desk.policy.state.core
    assert not rules.water_allows(desk.policy.state, cell)
    desk.end(1)
    assert rules.water_allows(desk.policy.state, cell)
