"""The policy: state + input -> new state + actions. No clock, no I/O: service and simulator drive the same code.

    policy = Policy(SchedConfig(), per_burst=2, steps=6)
    for action in policy.step(Received(at, CellHello(...))): ...

Every decision leaves a `Record` with the numbers it was taken on. The rules are in `rules`, what requests change in
`requests`, what is done to cells in `motions`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre_sched import protocol as p
from gyre_sched import rules
from gyre_sched.actions import (
    Action,
    Answer,
    Input,
    Publish,
    Received,
    Refuse,
    Restarted,
    Returned,
    Silent,
    Stopped,
    Tick,
)
from gyre_sched.cell import PASSING, Cell
from gyre_sched.config import SchedConfig
from gyre_sched.errors import Refused, SchedError, Superseded
from gyre_sched.motions import Motions, Numbers
from gyre_sched.order import longest_first
from gyre_sched.outlook import Outlook, outlook
from gyre_sched.protocol import Role
from gyre_sched.requests import Requests
from gyre_sched.state import Burst, State, Transfer


class Policy:
    """One run's scheduling decisions. `step` is the only way in."""

    def __init__(
        self,
        config: SchedConfig,
        *,
        per_burst: int,
        steps: int,
        at: float = 0.0,
        past: Sequence[tuple[str, float]] = (),
    ) -> None:
        """per_burst: batches of a burst; steps: optimizer steps of the run; at: now; past: tasks of past
        executions and the seconds they took, to predict from.

        Raises `SchedError` when a burst alone would break the bound on staleness."""
        bound = rules.staleness_bound(config, per_burst)
        if per_burst - 1 > bound:
            raise SchedError(
                f"sched.max_staleness = {bound!r} does not allow bursts of {per_burst!r} batches, the last of which is "
                f"{per_burst - 1} versions behind when it is trained; lower batch.per_burst or raise the bound"
            )
        self.config = config
        self.per_burst = per_burst
        self.steps = steps
        self.state = State(
            config.cells + config.standalone,
            at=at,
            past=past,
            bursts=2 + bound // per_burst,
            per_burst=per_burst,
            staleness_bound=bound,
        )
        self._do = Motions(self.state, config)
        self._requests = Requests(self.state, self._do)

    def step(self, event: Input) -> list[Action]:
        """Take one input; returns the actions to carry out, in order. A `Received` has exactly one `Answer` or
        `Refuse`, the last of them."""
        self._do.begin()
        last: Action | None = None
        if isinstance(event, Received):
            last = self._received(event.request, event.at)
        elif isinstance(event, Returned):
            self._returned(event)
        elif isinstance(event, Silent):
            self._silent(event)
        elif isinstance(event, Restarted):
            self._restarted(event)
        elif isinstance(event, Stopped):
            self._do.record("scheduler_stopped", event.at)
            return self._do.out
        else:
            self._tick(event)
        self._decide(event.at)
        if isinstance(event, Received):
            if isinstance(event.request, p.ProxyHello):
                last = Answer(self.state.routes())
            elif isinstance(event.request, p.OpenBurst) and last is None:
                last = Answer(self._grant(event.request, event.at))
        if self._do.rerouted:
            self._do.out.append(Publish(self.state.routes()))
        if last is not None:
            self._do.out.append(last)
        return self._do.out

    def _received(self, request: p.Request, at: float) -> Action | None:
        try:
            reply = self._requests.handle(request, at)
        except Refused as e:
            self._do.record("refused", at, None, {"request": type(request).__name__, "reason": str(e)})
            return Refuse(str(e))
        return None if reply is None else Answer(reply)

    # --- bursts -------------------------------------------------------------------------------------------------

    def _grant(self, m: p.OpenBurst, at: float) -> p.Reply:
        state = self.state
        obstacle = rules.grant_obstacle(state, at, self.config, per_burst=self.per_burst, steps=self.steps)
        backlog = state.backlog
        if obstacle or backlog is None:
            return p.NotYet(reason=obstacle or "the feed was not heard yet")
        if state.core.role is Role.TRAINING:
            self._do.record("core_stays", at, state.core, {"batches_ready": backlog.batches_ready, **state.numbers()})
        if not state.granted:
            state.due = backlog.batches_closed
            state.fates_due = backlog.executions_trained + backlog.executions_excluded
        state.durations.turn()
        state.pace.fade()
        late = rules.staleness(state, self.per_burst)
        order: tuple[int, ...] = ()
        if self.config.order == "longest" and m.executions > state.capacity - state.water:
            order = longest_first(m.tasks, state.lengths, state.durations)
        state.granted += 1
        state.due += self.per_burst
        state.fates_due += m.executions
        state.count.dispatch(m.executions)
        state.burst, state.wanted, state.quiet_since = Burst(m.burst, m.executions, state.version, at), None, at
        state.burst.order = order
        numbers: Numbers = {"burst": m.burst, "executions": m.executions, "order": "longest" if order else "planned"}
        numbers |= {"staleness": late, "staleness_bound": state.staleness_bound, **state.numbers()}
        self._do.record("burst_granted", at, None, numbers)
        return p.Granted(burst=m.burst, capacity=state.capacity, order=order)

    def _settle(self, at: float) -> None:
        state, burst = self.state, self.state.burst
        if burst is None or burst.settled or not (how := rules.settled(state, at, self.config)):
            return
        burst.settled = True
        closed = state.backlog.batches_closed if state.backlog else 0
        numbers: Numbers = {"burst": burst.index, "how": how, "batches_closed": closed, "batches_due": state.due}
        numbers["seconds"] = at - (burst.ended or at)
        self._do.record("burst_settled", at, None, numbers)
        state.due = min(state.due, closed)  # what never came is not owed by the next burst

    # --- agents' answers ----------------------------------------------------------------------------------------

    def _returned(self, event: Returned) -> None:
        cell, at, reply = self.state.cells[event.cell], event.at, event.reply
        if cell.pending is None or cell.pending.call != event.call:
            self._do.record("late_answer", at, cell, {"call": event.call, "answer": type(reply).__name__})
            return
        if isinstance(reply, p.Fenced):
            self._fenced(cell, at, reply)
            return
        request, cell.pending = cell.pending.request, None
        if isinstance(request, p.EnterTraining):
            if isinstance(reply, p.Failed):
                self._do.enter_failed(cell, at, reply.detail)
            else:
                self._entered(cell, at, reply)
        elif isinstance(reply, p.Failed) and self.state.stopping is not None:
            self._do.record(
                "return_interrupted", at, cell, {"detail": reply.detail}
            )  # the run ends: no fault of its own
        elif isinstance(reply, p.Failed):
            self._do.return_failed(cell, at, reply.detail)
        elif reply.version != request.version:
            detail = f"expected version {request.version}, the engine serves {reply.version}"
            self._do.return_failed(cell, at, detail)
        else:
            self._refreshed(cell, at, reply)

    def _fenced(self, cell: Cell, at: float, reply: p.Fenced) -> None:
        """The agent did not take the order, which stays pending: it is given again when the agent is heard next.
        Raises `Superseded` when it takes orders of a later term: this scheduler is not the run's any more."""
        if reply.term > self.state.term:
            raise Superseded(
                f"cell {cell.index} takes orders of term {reply.term}, this scheduler's is {self.state.term}: another "
                "scheduler of this run was started since; this one ends"
            )
        self._do.record("fenced", at, cell, {"term": reply.term, "detail": reply.detail})
        if cell.pending is not None:
            cell.pending.refused, cell.state = True, None

    def _entered(self, cell: Cell, at: float, reply: p.Done) -> None:
        began = self.state.moving.began if self.state.moving else at
        self.state.moving = None
        self._do.move(cell, Role.TRAINING, at)
        self._do.record("entered", at, cell, {"seconds": at - began, "agent_seconds": reply.seconds})

    def _refreshed(self, cell: Cell, at: float, reply: p.Done) -> None:
        cell.version, cell.return_failures, cell.suspect = reply.version, 0, False
        if cell.role is Role.ROLLOUT:  # refreshed in place: the routes name the new version
            self.state.routing.update(cell)
            self._do.reroute()
        else:
            if cell.role is Role.LEAVING:
                self._do.move(cell, Role.REFRESHING, at)
            self._do.move(cell, Role.ROLLOUT, at)
        self._do.record("refreshed", at, cell, {"version": reply.version, "agent_seconds": reply.seconds})

    # --- time ---------------------------------------------------------------------------------------------------

    def _silent(self, event: Silent) -> None:
        for index, seconds in zip(event.cells, event.seconds, strict=True):
            cell = self.state.cells[index]
            if cell.role not in (Role.STARTING, Role.FENCED):
                self._do.fail(cell, event.at, "lease_expired", 0.0, {"silent": seconds}, Role.FENCED)

    def _restarted(self, event: Restarted) -> None:
        """Everything is as the journal says; orders whose answers the scheduler before could not hear are given again,
        and what has a deadline has it from now on."""
        state, at = self.state, event.at
        state.term += 1
        for cell in state.cells:
            if cell.role in PASSING:
                cell.since = at
            self._do.again(cell)
        state.quiet_since = at
        self._do.reroute()
        numbers: Numbers = {"cells": len(state.cells), "torn": event.torn, "term": state.term, **state.numbers()}
        self._do.record("scheduler_started", at, None, numbers)

    def _tick(self, event: Tick) -> None:
        at, state, config = event.at, self.state, self.config
        if event.slept:
            self._do.record("slept", at, None, {"seconds": event.slept})
        starting = state.by_role[Role.STARTING]  # all of them since the same moment
        early = bool(starting) and not state.cells[next(iter(starting))].overdue(at, config)
        passing = [role for role in PASSING if role is not Role.STARTING or not early]
        for cell in state.having(Role.TRAINING, *passing):
            if cell.role is Role.TRAINING and cell.trainer_lost is not None:
                if at - cell.trainer_lost > config.enter_timeout:
                    self._do.enter_failed(cell, at, f"no trainer for {config.enter_timeout:g} s")
            elif cell.overdue(at, config):
                self._overdue(cell, at)

    def _overdue(self, cell: Cell, at: float) -> None:
        if cell.role is Role.STARTING:
            self._do.fail(cell, at, "never_heard", 0.0, {"seconds": at - cell.since})
        elif cell.role is Role.ENTERING:
            self._do.enter_failed(cell, at, "no answer in time")
        elif cell.role is not Role.DRAINING:
            self._do.return_failed(cell, at, "no answer in time")
        elif self.state.moving:
            for proxy in sorted(self.state.moving.waiting):
                self.state.proxies.pop(proxy, None)
                self._do.record("proxy_gone", at, cell, {"proxy": proxy, "seconds": at - cell.since})
            self.state.moving.waiting.clear()

    # --- decisions ----------------------------------------------------------------------------------------------

    def _decide(self, at: float) -> None:
        """Whatever the rules allow or demand now; nothing more when asked again in the same state."""
        state, config = self.state, self.config
        self._watch_drain(at)
        self._settle(at)
        self._watch_floor(at)
        if cell := rules.recalled(state, at, config):
            self._do.leave(cell, at, "recalled: no engine is routable")
        for cell in rules.returning(state, at, config):
            self._do.leave(cell, at, rules.settled(state, at, config) or "the core stays, the next burst needs it")
        for cell in rules.outdated(state, at, config):
            self._do.refresh(cell, at, in_place=state.water > 0)
        for cell in state.having(Role.FAILED):
            self._recover(cell, at)
        if cell := rules.next_to_train(state, at, config):
            seen = outlook(state, at, config) if config.leave == "deadline" else None
            if seen and seen.keeps_up(config.leave_within):
                self._hold(cell, at, seen)
            else:
                self._transfer(cell, at, seen)
                self._watch_drain(at)
        self._watch_core(at)
        self._watch_floor(at)  # once more, so that a step leaves nothing for the next one to notice

    def _watch_floor(self, at: float) -> None:
        """Since when there is work and no engine to route it to."""
        state = self.state
        bare = state.water > 0 and not state.by_role[Role.ROLLOUT]
        state.bare_since = (at if state.bare_since is None else state.bare_since) if bare else None

    def _hold(self, cell: Cell, at: float, seen: Outlook) -> None:
        """The water level would let the cell go, but nobody waits for it: said once, until one leaves."""
        if self.state.held != cell.index:
            self.state.held = cell.index
            self._do.record("held", at, cell, {**self.state.numbers(), "C_e": cell.capacity, **seen.numbers()})

    def _transfer(self, cell: Cell, at: float, seen: Outlook | None) -> None:
        state, backlog = self.state, self.state.backlog
        state.held = None
        numbers = {**state.numbers(), "C_e": cell.capacity, **(seen.numbers() if seen else {})}
        self._do.move(cell, Role.DRAINING, at)
        state.moving = Transfer(cell.index, state.epoch, at, set(state.proxies))
        if backlog:
            numbers |= {
                "waiting": backlog.waiting,
                "open_batch": backlog.open_batch,
                "micro_steps_left": backlog.micro_steps_left,
            }
        self._do.record("transfer", at, cell, {**numbers, "epoch": state.epoch, "proxies": len(state.proxies)})

    def _watch_drain(self, at: float) -> None:
        state, moving = self.state, self.state.moving
        if moving is None or state.cells[moving.cell].role is not Role.DRAINING:
            return
        cell = state.cells[moving.cell]
        if state.water > state.capacity:  # another engine was lost meanwhile: its requests would have nowhere to go
            state.moving = None
            self._do.record("transfer_cancelled", at, cell, state.numbers())
            self._do.move(cell, Role.ROLLOUT, at)
        elif not moving.waiting:
            self._do.enter(cell, at)

    def _recover(self, cell: Cell, at: float) -> None:
        """A failed cell is admitted when its agent says that it is routable, and is told to return when it does not."""
        config = self.config
        if not cell.engine_alive or cell.lost(config):
            return
        if cell.routable and cell.trainer == "idle" and not cell.suspect:
            self._do.admit(cell, at)
        elif not rules.readable(self.state) and cell.version != self.state.version:
            return  # it could not take the weights: the core's trainer has to be back first
        elif at >= cell.retry_at and (self.state.water or self.state.stopping is None):
            self._do.leave(cell, at, "recovery")

    def _watch_core(self, at: float) -> None:
        """Without a core there is nothing to dispatch for: say so, and grant no burst."""
        state, core = self.state, self.state.core
        reason = None
        if core.barred(self.config):
            reason = f"the core failed to enter training {core.enter_failures} times; see the log of its trainer"
        elif core.lost(self.config):
            reason = f"the core failed to return to rollout {core.return_failures} times; see the log of its agent"
        if reason != state.halted:
            state.halted = reason
            self._do.record("halted" if reason else "resumed", at, core, {"reason": reason, **state.numbers()})
