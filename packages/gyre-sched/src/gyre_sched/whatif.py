"""A recorded run under another policy: the inputs of its journal again, with other rules.

What the world did of itself (executions that start and end, the feed, failures) is taken as recorded, relative to the
grant of its burst. What follows from decisions happens anew: proxies ack drains and agents answer, each as fast as it
did in the run. So the first decisions that differ are exact; later ones would have met a feed that the run never saw,
which `gyre_sched.simulate` can estimate and a replay cannot.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import msgspec

from gyre_sched import protocol as p
from gyre_sched.actions import Action, Answer, Call, Input, Publish, Received, Record, Returned, Tick
from gyre_sched.journal import Step
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role

_KINDS = ("transfer", "held", "transfer_cancelled", "leave", "burst_granted", "core_stays", "recalled", "halted")
_ASK = 0.5  # seconds between two asks of a runner
_TICK = 1.0
_PATIENCE = 86_400.0  # seconds after which a burst that is not granted is given up


@dataclass(frozen=True, slots=True)
class Decision:
    """Something a policy decided, in the burst it was decided in."""

    burst: int | None
    seconds: float  # since the burst was granted, or since the beginning
    kind: str
    cell: int | None
    numbers: dict[str, float | int | str | None]


@dataclass(slots=True)
class Outcome:
    """What a policy decided and what its cells did."""

    decisions: list[Decision] = field(default_factory=list)
    role_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # cell-seconds
    refused: str | None = None  # why a burst of the run was not granted

    def of(self, kind: str) -> list[Decision]:
        """Decisions of one kind."""
        return [d for d in self.decisions if d.kind == kind]


class _Answers:
    """How long agents and proxies took, in the order in which they were asked; the median once that is used up."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int | None, str], deque[float]] = defaultdict(deque)
        self._all: dict[str, list[float]] = defaultdict(list)

    def add(self, cell: int | None, kind: str, seconds: float) -> None:
        self._seconds[cell, kind].append(seconds)
        self._all[kind].append(seconds)

    def take(self, cell: int | None, kind: str) -> float:
        if waiting := self._seconds[cell, kind]:
            return waiting.popleft()
        return median(self._all[kind]) if self._all[kind] else 1.0


class _Watch:
    """Turns records into an outcome."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._burst: int | None = None
        self._began = 0.0

    def see(self, actions: Sequence[Action]) -> None:
        for r in actions:
            if not isinstance(r, Record):
                continue
            if r.kind == "burst_granted":
                self._burst, self._began = int(r.numbers["burst"] or 0), r.at
            if r.kind == "role":
                self.outcome.role_seconds[str(r.numbers["from"])] += float(r.numbers["seconds"] or 0.0)
            elif r.kind in _KINDS:
                decision = Decision(self._burst, r.at - self._began, r.kind, r.cell, r.numbers)
                self.outcome.decisions.append(decision)


def what_if(steps: Sequence[Step], recorded: Policy, changed: Policy) -> tuple[Outcome, Outcome]:
    """The run of a journal, and what `changed` would have decided.

    recorded: a new policy with the run's own configuration. Both have seen nothing yet.
    """
    answers, before = _as_it_was(steps, recorded)
    return before, _Again(steps, changed, answers).run()


def _as_it_was(steps: Sequence[Step], policy: Policy) -> tuple[_Answers, Outcome]:
    answers, watch = _Answers(), _Watch()
    asked: dict[int, tuple[float, str]] = {}
    for step in steps:
        event, moving = step.input, policy.state.moving
        if isinstance(event, Received) and isinstance(event.request, p.Drained) and moving:
            answers.add(None, "drain", event.at - moving.began)
        elif isinstance(event, Returned) and event.call in asked and isinstance(event.reply, p.Done):
            began, kind = asked.pop(event.call)
            answers.add(event.cell, kind, event.at - began)
        actions = policy.step(event)
        watch.see(actions)
        asked |= {a.call: (event.at, type(a.request).__name__) for a in actions if isinstance(a, Call)}
    return answers, watch.outcome


class _Again:
    """Feeds a policy."""

    def __init__(self, steps: Sequence[Step], policy: Policy, answers: _Answers) -> None:
        self._steps, self._policy, self._answers = steps, policy, answers
        self._watch = _Watch()
        self._heap: list[tuple[float, int, Input]] = []  # what follows from decisions
        self._serial = count()
        self._acked = -1  # routes epoch
        self._now = 0.0

    def run(self) -> Outcome:
        shift = 0.0
        for step in self._steps:
            event = step.input
            if isinstance(event, Returned) or (isinstance(event, Received) and isinstance(event.request, p.Drained)):
                continue
            at = event.at + shift
            self._until(at)
            if isinstance(event, Received) and isinstance(event.request, p.OpenBurst):
                if any(e.kind == "burst_granted" for e in step.events):
                    granted = self._ask(event.request, at)
                    if granted is None:
                        return self._watch.outcome
                    shift += granted - at
                continue
            self._take(self._as_now(event, at))
        return self._watch.outcome

    def _until(self, at: float) -> None:
        """Let follow what follows, and the clock tick, up to `at`."""
        while self._now + _TICK < at and (self._heap or self._policy.state.water):
            due = self._heap[0][0] if self._heap else at
            if due <= self._now + _TICK:
                self._next()
            else:
                self._take(Tick(self._now + _TICK))
        while self._heap and self._heap[0][0] <= at:
            self._next()

    def _next(self) -> None:
        at, _, event = heapq.heappop(self._heap)
        self._take(msgspec.structs.replace(event, at=max(at, self._now)))

    def _ask(self, request: p.OpenBurst, at: float) -> float | None:
        """Until it is granted; returns when."""
        end = at + _PATIENCE
        while at < end:
            self._until(at)
            reply = self._take(Received(at, request))
            if isinstance(reply, p.Granted):
                return at
            self._watch.outcome.refused = f"burst {request.burst}: {getattr(reply, 'reason', reply)}"
            at += _ASK if self._heap else _TICK * 60
        return None

    def _as_now(self, event: Input, at: float) -> Input:
        """A cell's heartbeat tells what its trainer does, which follows from decisions."""
        if isinstance(event, Received) and isinstance(event.request, p.CellState):
            cell = self._policy.state.cells[event.request.cell]
            doing = "training" if cell.role is Role.TRAINING else "idle"
            state = msgspec.structs.replace(event.request, trainer=doing, registration=cell.registration)
            return Received(at, state)
        return msgspec.structs.replace(event, at=at)

    def _take(self, event: Input) -> p.Reply | None:
        self._now = max(self._now, event.at)
        reply: p.Reply | None = None
        actions = self._policy.step(event)
        self._watch.see(actions)
        if any(isinstance(a, Record) and a.kind == "burst_granted" for a in actions):
            self._watch.outcome.refused = None
        for action in actions:
            match action:
                case Call(cell=cell, call=call, request=request):
                    seconds = self._answers.take(cell, type(request).__name__)
                    done = p.Done(seconds=seconds, version=getattr(request, "version", 0))
                    self._later(seconds, Returned(0.0, cell, call, done))
                case Publish(routes):
                    self._ack(routes)
                case Answer(answer):
                    reply = answer
        return reply

    def _ack(self, routes: p.Routes) -> None:
        moving = self._policy.state.moving
        if not routes.draining or moving is None or moving.epoch == self._acked:
            return
        self._acked = moving.epoch
        for proxy in sorted(moving.waiting):
            drained = p.Drained(proxy=proxy, engine=routes.draining[0], epoch=routes.epoch, moved=0)
            self._later(self._answers.take(None, "drain"), Received(0.0, drained))

    def _later(self, seconds: float, event: Input) -> None:
        heapq.heappush(self._heap, (self._now + seconds, next(self._serial), event))


def differences(
    before: Outcome, after: Outcome, *, within: float = 1.0
) -> list[tuple[Decision | None, Decision | None]]:
    """Decisions about a cell that are not in both, or not within so many seconds of each other; in order."""
    keyed: list[dict[tuple[int | None, str, int | None, int], Decision]] = []
    for outcome in (before, after):
        seen: dict[tuple[int | None, str, int | None], int] = defaultdict(int)
        found = {}
        for d in outcome.decisions:
            key = (d.burst, d.kind, d.cell)
            found[(*key, seen[key])] = d
            seen[key] += 1
        keyed.append(found)
    was, now = keyed
    pairs = [(was.get(key), now.get(key)) for key in {**was, **now}]
    changed = [(a, b) for a, b in pairs if a is None or b is None or abs(a.seconds - b.seconds) > within]

    def order(pair: tuple[Decision | None, Decision | None]) -> tuple[int, float]:
        d = min((d for d in pair if d), key=lambda d: d.seconds)
        return (-1 if d.burst is None else d.burst, d.seconds)

    return sorted(changed, key=order)
