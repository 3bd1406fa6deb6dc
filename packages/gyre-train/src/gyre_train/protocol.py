"""Messages of the feed: what trainers ask of it. (Its intake is `gyre_traj.intake`, on a socket of its own.)

    core:       OpenBatch ─▶ Opened      Claim* Complete*      Collect ─▶ Collected     CloseBatch
    satellite:  Join ─▶ Joined           Claim* Complete*      HandOver ─▶ Taken

A claimed micro-step is leased to its cell. It counts when the cell's contribution is in the core's sums: for the core
when it completes, for a satellite when its hand-over was taken. A cell that stops renewing loses all its leases that
do not count yet, completed or not: a contribution is all or nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class OpenBatch(msgspec.Struct, frozen=True, kw_only=True, tag="open_batch"):
    """The core has published `version` (whose manifest is `manifest`) and wants to train. Reply: `Opened` or `Wait`.

    Opening the open batch again starts it over (the core lost its sums). Opening an older version, restored from a
    checkpoint, replays the batches since then. Opening the next version closes a batch whose micro-steps all count: the
    core stepped and died before `CloseBatch`."""

    cell: int
    version: int
    manifest: bytes


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A satellite wants to join the open batch. Reply: `Joined` or `Wait`."""

    cell: int


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """Reply: `MicroStep`, `Wait` (none is packed yet), or `Exhausted` (hand over, or collect).

    A cell holds one uncompleted micro-step at a time: claiming again repeats it (the reply was lost). A cell whose
    leases were lost is told `Exhausted`; `Renew`, `Complete` and its hand-over say that nothing was kept."""

    cell: int
    batch: int


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    """The cell is alive; keeps all its leases. Sent every `lease` / 4 from a thread of its own. Reply: `Ok`."""

    cell: int
    batch: int


class Complete(msgspec.Struct, frozen=True, kw_only=True, tag="complete"):
    """Forward and backward of a micro-step are in the cell's own sums. Reply: `Ok`."""

    cell: int
    batch: int
    micro_step: int
    attempt: int
    loss: float  # Σ w·ℓ over the micro-step's targets, not yet divided by |E|
    seconds: float
    metrics: dict[str, float] = {}  # as of gyre_traj.metrics: sums over targets, and maxima by names in "_max"


class HandOver(msgspec.Struct, frozen=True, kw_only=True, tag="hand_over"):
    """A satellite offers its sums. Its gradients stay readable until the reply. Reply: `Taken` or `Wait` (ask again).

    `micro_steps` are the (id, attempt) pairs in the sums; empty sums need no hand-over and are answered at once."""

    cell: int
    batch: int
    micro_steps: tuple[tuple[int, int], ...]
    gradients: bytes  # msgpack tuple of gyre_transport descriptors, one a gradient buffer, in buffer order


class Collect(msgspec.Struct, frozen=True, kw_only=True, tag="collect"):
    """The core asks for the hand-overs. Reply: `Handed` once every micro-step is completed by the core or offered, else
    `Wait`, or `MicroStep` work came back (a satellite was lost): `Reopened`."""

    cell: int
    batch: int


class Collected(msgspec.Struct, frozen=True, kw_only=True, tag="collected"):
    """The core has added the contributions of `cells`, and could not read those of `lost`. Reply: `Ok`, or `Reopened`
    when `lost` gave work back."""

    cell: int
    batch: int
    cells: tuple[int, ...]
    lost: tuple[int, ...] = ()


class CloseBatch(msgspec.Struct, frozen=True, kw_only=True, tag="close_batch"):
    """The optimizer step is done and `version` is the new version: the next one, or the same if |E| was 0.

    Reply: `Ok`; saying it again is harmless."""

    cell: int
    batch: int
    version: int
    loss: float  # the batch's loss: Σ_cells Σ w·ℓ / |E|
    grad_norm: float
    learning_rate: float
    seconds: float  # optimizer step alone
    checkpoint: str = ""  # path, if one was saved


class FeedStatus(msgspec.Struct, frozen=True, kw_only=True, tag="feed_status"):
    """Reply: `Stats`."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    batch: int
    version: int


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    batch: int
    version: int
    manifest: bytes


class MicroStep(msgspec.Struct, frozen=True, kw_only=True, tag="micro_step"):
    """A packed micro-step; see `gyre_traj.Packed`."""

    micro_step: int
    attempt: int
    lease: float  # seconds
    packed: bytes  # `gyre_traj.Packed`, msgpack


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Nothing yet; ask again in `retry` seconds."""

    reason: str
    retry: float = 0.2


class Exhausted(msgspec.Struct, frozen=True, kw_only=True, tag="exhausted"):
    """No micro-step is left to claim in this batch, and none will come."""


class Handed(msgspec.Struct, frozen=True, kw_only=True, tag="handed"):
    """All contributions, in cell order, and the batch's denominator."""

    cells: tuple[int, ...]
    gradients: tuple[bytes, ...]  # as in `HandOver`, one a cell
    executions: int  # |E|, placeholders included
    loss: float  # Σ w·ℓ over all micro-steps


class Reopened(msgspec.Struct, frozen=True, kw_only=True, tag="reopened"):
    """Micro-steps came back to the queue: claim again."""


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """The core has added the sums: free the buffers. `kept` False: they were refused (leases lost); zero them."""

    kept: bool = True


class Ok(msgspec.Struct, frozen=True, kw_only=True, tag="ok"):
    kept: bool = True  # False: the lease was lost; zero the sums that hold this micro-step and join again


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    groups_complete: int
    executions_waiting: int
    executions_trained: int
    executions_excluded: int
    batches_closed: int
    open_batch: int | None
    micro_steps_done: int
    micro_steps_total: int  # of the open batch, as packed so far
    version: int


PROTOCOL = ("feed", 1)  # raised when a message of an older version would be misread
Request = Annotated[
    OpenBatch | Join | Claim | Renew | Complete | HandOver | Collect | Collected | CloseBatch | FeedStatus, PROTOCOL
]
Reply = Annotated[Opened | Joined | MicroStep | Wait | Exhausted | Handed | Reopened | Taken | Ok | Stats, PROTOCOL]
