"""What each request does to the state. A handler validates, then changes; what follows from it is the policy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gyre_sched import protocol as p
from gyre_sched import rules
from gyre_sched.cell import Cell
from gyre_sched.errors import Refused
from gyre_sched.motions import Motions
from gyre_sched.protocol import Role
from gyre_sched.state import State, Wanted


class Requests:
    """The handlers of `protocol.Request`. They raise `Refused`, having changed nothing."""

    def __init__(self, state: State, motions: Motions) -> None:
        self._state = state
        self._config = motions.config
        self._do = motions
        self._handlers: dict[type[Any], Callable[[Any, float], p.Reply | None]] = {
            p.OpenBurst: self._open_burst,
            p.Started: self._started,
            p.Terminated: self._terminated,
            p.Replace: self._replace,
            p.Shutdown: self._shutdown,
            p.ProxyHello: self._proxy_hello,
            p.Drained: self._drained,
            p.EngineFailed: self._engine_hint,
            p.Backlog: self._backlog,
            p.Published: self._published,
            p.CellHello: self._cell_hello,
            p.CellState: self._cell_state,
            p.GetStatus: lambda _, at: state.status(at, motions.config),
        }

    def handle(self, request: p.Request, at: float) -> p.Reply | None:
        """Take `request`; None when the reply depends on what the policy decides next. Raises `Refused`."""
        return self._handlers[type(request)](request, at)

    # --- the runner ---------------------------------------------------------------------------------------------

    def _open_burst(self, m: p.OpenBurst, at: float) -> p.Reply | None:
        burst = self._state.burst
        if m.executions < 1:
            raise Refused(f"a burst needs at least 1 execution, got {m.executions!r}")
        if burst and m.burst == burst.index and burst.ended is None:
            return p.Granted(burst=m.burst, capacity=self._state.capacity, order=burst.order)  # asked again
        if burst and m.burst <= burst.index:
            raise Refused(f"expected a burst after {burst.index}, which was granted last, got {m.burst!r}")
        if m.tasks and m.executions % len(m.tasks):
            raise Refused(
                f"expected groups of one size, got {m.executions!r} executions in {len(m.tasks)} groups; "
                "name one task a group"
            )
        self._state.wanted = Wanted(m.burst, m.executions, m.tasks, at)
        return None

    def _started(self, m: p.Started, at: float) -> p.Reply:
        count = self._state.count
        if count.start(m.execution):
            if not count.ended(m.execution):  # told late
                self._state.running.start(m.execution, m.task, at)
            self._do.record("started", at, None, {"execution": m.execution, "task": m.task, "p": count.started})
        return p.Ack()

    def _terminated(self, m: p.Terminated, at: float) -> p.Reply:
        state = self._state
        if not state.count.terminate(m.execution):
            return p.Ack()
        state.quiet_since = at
        if (ran := state.running.end(m.execution)) is not None:
            state.durations.add(m.execution, at - ran.at)
            if ran.task:
                state.lengths.add(ran.task, at - ran.at)
        self._do.record(
            "terminated", at, None, {"execution": m.execution, "f": state.count.terminated, "w": state.water}
        )
        if not state.water and state.burst:
            state.burst.ended = at
            seconds = at - state.burst.granted
            self._do.record(
                "burst_ended", at, None, {"burst": state.burst.index, "seconds": seconds, **state.numbers()}
            )
        return p.Ack()

    def _replace(self, m: p.Replace, at: float) -> p.Reply:
        state, count = self._state, self._state.count
        if count.replaced(m.by):
            return p.Ack()  # said again
        names: dict[str, float | int | str | None] = {"execution": m.execution, "by": m.by}
        if reason := rules.replace_obstacle(state, m.burst, ended=count.ended(m.execution)):
            self._do.record("replace_declined", at, None, {**names, "reason": reason, **state.numbers()})
            return p.Declined(reason=reason)
        count.replace(m.execution, m.by)
        state.running.end(m.execution)  # a failure that is not its own says nothing of how long executions take
        state.fates_due += 1
        state.quiet_since = at
        if state.burst:
            state.burst.executions += 1
            state.burst.ended = None
        self._do.record("replaced", at, None, {**names, **state.numbers()})
        return p.Ack()

    def _shutdown(self, m: p.Shutdown, at: float) -> p.Reply:
        if self._state.stopping is None:
            self._state.stopping = m.reason
            self._do.record("shutdown", at, None, {"reason": m.reason, **self._state.numbers()})
        return p.Ack()

    # --- proxies ------------------------------------------------------------------------------------------------

    def _present(self, proxy: str, url: str, at: float) -> None:
        if self._state.proxies.get(proxy) != url:
            self._state.proxies[proxy] = url
            self._do.record("proxy_hello", at, None, {"proxy": proxy, "url": url})

    def _proxy_hello(self, m: p.ProxyHello, at: float) -> p.Reply:
        self._present(m.proxy, m.url, at)
        return self._state.routes()

    def _drained(self, m: p.Drained, at: float) -> p.Reply:
        self._present(m.proxy, self._state.proxies.get(m.proxy, ""), at)
        moving = self._state.moving
        if moving is None or m.epoch < moving.epoch or m.proxy not in moving.waiting:
            return p.Ack()  # said again, or of an earlier drain
        cell = self._state.cells[moving.cell]
        if m.engine == cell.engine:
            moving.waiting.discard(m.proxy)
            seconds = at - moving.began
            self._do.record(
                "drained", at, cell, {"proxy": m.proxy, "epoch": m.epoch, "moved": m.moved, "seconds": seconds}
            )
        return p.Ack()

    def _engine_hint(self, m: p.EngineFailed, at: float) -> p.Reply:
        """A hint only: the agent's heartbeat decides."""
        self._present(m.proxy, self._state.proxies.get(m.proxy, ""), at)
        index = self._state.engines.get(m.engine)
        cell = None if index is None else self._state.cells[index]
        self._do.record("engine_hint", at, cell, {"proxy": m.proxy, "engine": m.engine, "detail": m.detail})
        return p.Ack()

    # --- the feed and the core ----------------------------------------------------------------------------------

    def _backlog(self, m: p.Backlog, at: float) -> p.Reply:
        if m != self._state.backlog:
            self._state.backlog, self._state.quiet_since = m, at
            self._state.pace.work(m.work_left, m.work_done, at)
            self._do.record("backlog", at, None, {f: getattr(m, f) for f in m.__struct_fields__})
        return p.Ack()

    def _published(self, m: p.Published, at: float) -> p.Reply:
        before = self._state.published
        self._state.published = m
        if before is None or m.version > before.version:
            self._do.record("published", at, None, {"version": m.version, "bytes": len(m.manifest)})
        elif m.version < before.version:  # the core was restored from an older checkpoint and replays from there
            self._do.record("version_rewound", at, None, {"version": m.version, "before": before.version})
        return p.Ack()

    # --- agents -------------------------------------------------------------------------------------------------

    def _cell(self, index: int) -> Cell:
        if not 0 <= index < len(self._state.cells):
            raise Refused(f"expected a cell in 0..{len(self._state.cells) - 1}, got {index!r}; is sched.cells right?")
        return self._state.cells[index]

    def _cell_hello(self, m: p.CellHello, at: float) -> p.Reply:
        cell = self._cell(m.cell)
        if m.capacity < 1:
            raise Refused(f"cell {m.cell}: expected a capacity of at least 1, got {m.capacity!r}")
        if self._state.engines.get(m.engine, m.cell) != m.cell:
            raise Refused(f"cell {m.cell}: engine {m.engine!r} belongs to another cell; engine names are unique")
        known = (cell.agent, cell.engine, cell.url, cell.capacity) == (m.agent, m.engine, m.engine_url, m.capacity)
        if known and cell.instance == m.instance and (m.instance or cell.role is Role.ROLLOUT):
            self._register(cell, at)
            self._do.again(cell)
            return p.Registered(term=self._state.term, registration=cell.registration)
        if m.role != "rollout":
            raise Refused(f"cell {m.cell} is new here and can only join from rollout, its role is {m.role!r}")
        if cell.role is Role.FENCED:
            self._do.move(cell, Role.FAILED, at)
        if cell.role not in (Role.STARTING, Role.FAILED):
            self._do.fail(cell, at, "agent_restarted", 0.0, {})
        self._state.engines.pop(cell.engine, None)
        self._state.engines[m.engine] = m.cell
        cell.agent, cell.engine, cell.url, cell.capacity = m.agent, m.engine, m.engine_url, m.capacity
        cell.version, cell.kv, cell.trainer, cell.instance, cell.state = m.version, m.kv, "idle", m.instance, None
        cell.engine_alive, cell.trainer_alive = True, cell.index < self._config.with_trainer
        cell.enter_failures = cell.return_failures = 0
        cell.suspect = False
        self._do.record(
            "cell_hello", at, cell, {"engine": m.engine, "url": m.engine_url, "C_e": m.capacity, "version": m.version}
        )
        self._register(cell, at)
        self._do.admit(cell, at)
        return p.Registered(term=self._state.term, registration=cell.registration)

    def _register(self, cell: Cell, at: float) -> None:
        """What was ordered before is void; a fenced cell may be brought back."""
        cell.registration += 1
        if cell.role is Role.FENCED:
            self._do.move(cell, Role.FAILED, at)
        self._do.record("registered", at, cell, {"registration": cell.registration, "term": self._state.term})

    def _cell_state(self, m: p.CellState, at: float) -> p.Reply:
        cell = self._cell(m.cell)
        if not cell.agent:
            raise Refused(f"cell {m.cell} sent its state before CellHello; say hello first")
        if cell.instance and m.registration != cell.registration:
            raise Refused(
                f"cell {m.cell} has registration {cell.registration!r}, got the state of {m.registration!r}; say hello"
            )
        if cell.role is Role.FENCED:
            if cell.instance:
                raise Refused(f"cell {m.cell} was silent for a lease; say hello to be registered anew")
            self._do.move(cell, Role.FAILED, at)
        cell.state, cell.trainer = m, m.trainer
        if cell.pending is not None and cell.pending.refused:
            self._do.again(cell)
        self._engine_seen(cell, m, at)
        self._trainer_seen(cell, m, at)
        if cell.role is Role.FAILED:
            cell.routable = m.routable and m.engine_alive
            cell.version = m.version
        elif cell.role is Role.LEAVING and m.trainer == "idle" and m.trainer_alive:
            self._do.move(cell, Role.REFRESHING, at)
        return p.Ack()

    def _engine_seen(self, cell: Cell, m: p.CellState, at: float) -> None:
        if m.engine_alive == cell.engine_alive:
            return
        cell.engine_alive = m.engine_alive
        if m.engine_alive:
            self._do.record("engine_back", at, cell, {"version": m.version, "detail": m.detail})
        elif cell.role in (Role.ROLLOUT, Role.DRAINING):
            # its agent restarts it and says when it may be routed to; told to only if that takes too long
            self._do.fail(cell, at, "engine_failed", self._config.return_timeout, {"detail": m.detail})
        else:
            self._do.record("engine_failed", at, cell, {"role": cell.role.value, "detail": m.detail})

    def _trainer_seen(self, cell: Cell, m: p.CellState, at: float) -> None:
        if m.trainer_alive == cell.trainer_alive:
            return
        cell.trainer_alive = m.trainer_alive
        cell.trainer_lost = None if m.trainer_alive else at
        kind = "trainer_back" if m.trainer_alive else "trainer_failed"
        self._do.record(kind, at, cell, {"role": cell.role.value, "detail": m.detail})
