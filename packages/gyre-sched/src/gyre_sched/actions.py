"""What goes into the policy and what comes out of it.

Inputs carry `at`, seconds of one clock that never goes back; the policy has no other notion of time.
"""

from __future__ import annotations

import msgspec

from gyre_sched import protocol as p


class Received(msgspec.Struct, frozen=True, tag="received"):
    """A request came over the bus; the policy answers it with `Answer` or `Refuse`."""

    at: float
    request: p.Request


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The agent of `cell` answered `Call` number `call`, or the call failed (`Failed`)."""

    at: float
    cell: int
    call: int
    reply: p.Done | p.Failed | p.Fenced


class Silent(msgspec.Struct, frozen=True, tag="silent"):
    """The leases of `cells` ran out: their agents were not heard for `seconds`, each its own."""

    at: float
    cells: tuple[int, ...]
    seconds: tuple[float, ...]


class Restarted(msgspec.Struct, frozen=True, tag="restarted"):
    """A scheduler begins, the run's first or one that goes on from the journal of those before it. `torn`: bytes that
    were cut off the journal's end."""

    at: float
    torn: int = 0


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """This scheduler ends in order; agents, proxies and executions go on."""

    at: float


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """Time has passed. `slept`: seconds this process stood still meanwhile, in which it could hear nobody."""

    at: float
    slept: float = 0.0


Input = Received | Returned | Silent | Restarted | Stopped | Tick


class Answer(msgspec.Struct, frozen=True):
    """Reply to the request received."""

    reply: p.Reply


class Refuse(msgspec.Struct, frozen=True):
    """The request received is wrong; nothing was changed."""

    reason: str


class Call(msgspec.Struct, frozen=True):
    """Send `request` to the agent of `cell` and bring the answer back as `Returned`."""

    cell: int
    agent: str
    call: int
    request: p.EnterTraining | p.EnterRollout | p.Refresh
    deadline: float  # seconds


class Publish(msgspec.Struct, frozen=True):
    """The routes have changed."""

    routes: p.Routes


class Record(msgspec.Struct, frozen=True):
    """One line for the journal."""

    at: float
    kind: str
    cell: int | None
    numbers: dict[str, float | int | str | None]


Action = Answer | Refuse | Call | Publish | Record
