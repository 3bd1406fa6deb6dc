"""The pool: which engines may take a call, and which one does.

Every decision is a method without I/O that takes the time as an argument; callers wait on `changed`.

    usable    routed, not draining, not paused after a failure
    choose    the execution's own engine if usable (its prefix is cached there); else one with room, least loaded,
              longest lasting first. An execution that has to move goes to the longest lasting engine with room, so that
              it moves once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

_DOUBLINGS = 60  # of a pause; no limit is longer, and a float holds it


class Movable(Protocol):
    """A generation under way at an engine."""

    def move(self, reason: str) -> None:
        """Leave the engine with the tokens at hand and go on elsewhere."""
        ...


@dataclass(slots=True, frozen=True)
class Route:
    """An engine that may be sent new requests."""

    name: str
    url: str
    capacity: int = 1 << 30  # executions it may host
    version: int = 0
    lasting: int = 0  # higher stays longer in rollout
    kv: tuple[str, ...] = ()  # bus addresses of its KV services, one a rank


@dataclass(slots=True, eq=False)
class EngineState:
    """What the pool knows of one engine, routed or not."""

    route: Route
    routed: bool = True
    draining: bool = False
    failures: int = 0  # in a row
    retry_at: float = 0.0  # not used before (loop time)
    executions: set[str] = field(default_factory=set)  # that stick to it
    active: set[Movable] = field(default_factory=set)  # requests open at it now
    leaving: set[Movable] = field(default_factory=set)  # that left it, and whose KV pages are being fetched
    moved: int = 0  # requests that left it since it began to drain


class Pool:
    """All engines and what sticks to them."""

    def __init__(self, *, backoff: float = 0.5, backoff_limit: float = 15.0) -> None:
        self.term, self.epoch = 0, -1
        self.engines: dict[str, EngineState] = {}
        self.changed = asyncio.Condition()
        self._backoff, self._limit = backoff, backoff_limit
        self._sticky: dict[str, str] = {}
        self._kv: dict[str, tuple[str, ...]] = {}  # of every engine there ever was

    def update(
        self,
        epoch: int,
        routes: Iterable[Route],
        draining: Iterable[str] = (),
        *,
        term: int = 0,
        reset: bool = False,
    ) -> bool:
        """Take over the routes of `epoch`, of the scheduler of `term`. Returns False and ignores older ones: those
        of an earlier term always, those of an earlier epoch unless `reset`."""
        if term < self.term or (term == self.term and epoch < self.epoch and not reset):
            return False
        self.term, self.epoch = term, epoch
        routed = {r.name: r for r in routes}
        self._kv |= {r.name: r.kv for r in routed.values()}
        leaving = set(draining)
        for name, state in self.engines.items():
            state.routed = name in routed
            if name in leaving and not state.draining:
                state.moved = 0
            state.draining = name in leaving
        for name, route in routed.items():
            known = self.engines.get(name)
            if known is None:
                self.engines[name] = EngineState(route)
                continue
            if known.route.url != route.url or known.route.version != route.version:
                known.failures, known.retry_at = 0, 0.0  # another process, or refreshed and probed again
            known.route = route
        for name in [n for n, s in self.engines.items() if not (s.routed or s.draining or s.active or s.leaving)]:
            del self.engines[name]
        return True

    def drain(self, name: str) -> None:
        """Tell every request at `name` to go on elsewhere."""
        if (state := self.engines.get(name)) is not None:
            for generation in list(state.active):
                generation.move("drain")

    def choose(self, execution: str, now: float) -> EngineState | None:
        """Return the engine for the execution's next request, None if none is usable; changes nothing."""
        usable = [s for s in self.engines.values() if s.routed and not s.draining and s.retry_at <= now]
        own = self._sticky.get(execution)
        for state in usable:
            if state.route.name == own:
                return state

        def rank(state: EngineState) -> tuple[bool, float, float, str]:
            load = len(state.executions) / max(1, state.route.capacity)
            full = len(state.executions) >= state.route.capacity
            lasting = -float(state.route.lasting)
            by_load = own is None or full
            return (full, load, lasting, state.route.name) if by_load else (full, lasting, load, state.route.name)

        return min(usable, key=rank, default=None)

    def assign(self, execution: str, state: EngineState) -> str | None:
        """Make `execution` stick to an engine; returns the one it stuck to, if that was another."""
        name = state.route.name
        before = self._sticky.get(execution)
        if before != name:
            if before in self.engines:
                self.engines[before].executions.discard(execution)
            self._sticky[execution] = name
        state.executions.add(execution)
        return before if before != name else None

    def pages_at(self, engine: str) -> tuple[str, ...]:
        """Where KV pages of `engine` are asked for, routed or not; nowhere once a request was lost at it."""
        state = self.engines.get(engine)
        return () if state is not None and state.failures else self._kv.get(engine, ())

    def forget(self, execution: str) -> None:
        """The execution has ended."""
        name = self._sticky.pop(execution, None)
        if name in self.engines:
            self.engines[name].executions.discard(execution)

    def next_try(self, now: float) -> float | None:
        """Seconds until a paused engine may be tried again; None if none is paused."""
        waits = [s.retry_at - now for s in self.engines.values() if s.routed and not s.draining and s.retry_at > now]
        return min(waits, default=None)

    def failed(self, state: EngineState, now: float) -> None:
        """A request was lost at this engine: pause it, twice as long each time.

        Requests that are lost during the pause were under way when it began: they are the same failure.
        """
        self._kv.pop(state.route.name, None)
        if now < state.retry_at:
            return
        state.failures += 1
        state.retry_at = now + min(self._limit, self._backoff * 2 ** min(state.failures - 1, _DOUBLINGS))

    def succeeded(self, state: EngineState) -> None:
        """The engine answered."""
        state.failures = 0

    async def notify(self) -> None:
        """Wake whoever waits for a change."""
        async with self.changed:
            self.changed.notify_all()
