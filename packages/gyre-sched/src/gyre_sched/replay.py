"""A policy brought to where a journal ends, by telling it again what it was told: restarts, and what-if questions.

The policy has no clock and no I/O, so the same inputs make the same state and the same decisions; `restore` checks that
they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from gyre_sched import protocol as p
from gyre_sched.actions import Input, Received, Record, Tick
from gyre_sched.errors import JournalError
from gyre_sched.journal import Step
from gyre_sched.policy import Policy
from gyre_sched.state import State


def says_nothing_new(event: Input, state: State) -> bool:
    """Whether `event` repeats what `state` knows: it is not written down unless more than an answer follows from it.
    To be asked before the policy takes it."""
    if isinstance(event, Tick):
        return not event.slept
    if not isinstance(event, Received):
        return False
    match event.request:
        case p.GetStatus():
            return True
        case p.CellState(cell=cell) as request:
            return 0 <= cell < len(state.cells) and state.cells[cell].state == request
        case p.Backlog() as request:
            return request == state.backlog
        case p.ProxyHello(proxy=proxy, url=url):
            return state.proxies.get(proxy) == url
    return False


_GO_ON = "go on with that, or start a new run from the last checkpoint"


def restore(policy: Policy, steps: Sequence[Step], *, remedy: str = _GO_ON) -> None:
    """Bring a new `policy` to the state that `steps` led to; nothing is carried out.

    Raises `JournalError` when it decides otherwise than the journal says: another version or configuration wrote it."""
    for step in steps:
        records = [action for action in policy.step(step.input) if isinstance(action, Record)]
        told = [(e.at, e.kind, e.cell, e.numbers) for e in step.events]
        made = [(r.at, r.kind, r.cell, r.numbers) for r in records]
        if made == told:
            continue
        was, now = next(pair for pair in zip_longest(told, made) if pair[0] != pair[1])
        raise JournalError(
            f"on {step.input!r} the journal has {was!r}, this scheduler would have decided {now!r}: it was written by "
            f"another version or with another [sched]; {remedy}"
        )
