"""Messages of the scheduler and of the cell agents.

    runner ─ OpenBurst, Started, Terminated, Replace ─▶ scheduler ─ Routes, Event (published) ─▶ proxies, launcher
    proxy ─ ProxyHello, Drained, EngineFailed ─▶ scheduler
    feed ─ Backlog ─▶ scheduler            core trainer ─ Published ─▶ scheduler
    agent ─ CellHello, CellState ─▶ scheduler ─ EnterTraining, EnterRollout, Refresh, StopCell ─▶ agent
    trainer ─ TrainerReport ─▶ agent (answered by TrainerOrder)

Identities: a cell is its index (0 is the core); an engine is `cell-<index>` or a standalone engine's name. Versions
count optimizer steps: the weights a run starts from are version 0. Durations are seconds on the sender's own clock.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec


class Role(StrEnum):
    """What a cell does; the edges are in `gyre_sched.cell`."""

    STARTING = "starting"
    ROLLOUT = "rollout"  # routable
    DRAINING = "draining"  # out of the routes, requests being continued elsewhere
    ENTERING = "entering"  # engine releases memory, trainer enters
    TRAINING = "training"
    LEAVING = "leaving"  # trainer told to hand over and leave
    REFRESHING = "refreshing"  # engine resumes, takes the current weights, is probed
    FAILED = "failed"
    FENCED = "fenced"  # its agent was silent for a lease: it takes no orders until it is registered anew


# --- requests to the scheduler -------------------------------------------------------------------------------------


class OpenBurst(msgspec.Struct, frozen=True, kw_only=True, tag="open_burst"):
    """The runner wants to dispatch `executions`. Reply: `Granted`, or `NotYet` (ask again)."""

    burst: int
    executions: int
    tasks: tuple[str, ...] = ()  # of the burst's groups, in the order planned; empty: the order is not the scheduler's


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A dispatched execution's harness was started. Reply: `Ack`."""

    execution: str
    task: str = ""  # empty: nothing is learned of how long the task's executions take


class Terminated(msgspec.Struct, frozen=True, kw_only=True, tag="terminated"):
    """A dispatched execution has ended, whatever its outcome; idempotent. Reply: `Ack`."""

    execution: str


class Replace(msgspec.Struct, frozen=True, kw_only=True, tag="replace"):
    """`execution` ended by a failure that is not its own, and `by` is to be dispatched in its place.

    Tells the end of `execution`, too, if that was not told: the water level stays as it is then. Idempotent. Reply:
    `Ack`, or `Declined`, which changes nothing.
    """

    execution: str
    by: str
    burst: int


class ProxyHello(msgspec.Struct, frozen=True, kw_only=True, tag="proxy_hello"):
    """A proxy is up and will ack drains. Reply: `Routes` as they stand."""

    proxy: str
    url: str


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """The proxy has no request left at `engine`, and sends none since routes `epoch`. Reply: `Ack`."""

    proxy: str
    engine: str
    epoch: int
    moved: int  # requests it continued elsewhere


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="engine_failed"):
    """A proxy lost an engine (connection refused or broken). Reply: `Ack`."""

    proxy: str
    engine: str
    detail: str


class CellHello(msgspec.Struct, frozen=True, kw_only=True, tag="cell_hello"):
    """A cell agent is up, its engine answers at `engine_url` and its trainer is ready; or it was fenced and asks for
    orders again. Reply: `Registered`."""

    cell: int
    agent: str  # bus address of the agent's server
    engine: str
    engine_url: str
    capacity: int  # executions the engine may host at once (C_e)
    version: int = 0
    instance: str = ""  # of the agent's process: another one has other processes, and forgot what it was told
    role: str = "rollout"  # rollout | training | between; one the scheduler does not know can only join from rollout
    kv: tuple[str, ...] = ()  # bus addresses of its KV services, one a rank; none: its pages do not move


class CellState(msgspec.Struct, frozen=True, kw_only=True, tag="cell_state"):
    """Heartbeat of a cell agent, and at once whenever one of the fields changes. Reply: `Ack`; refused when the
    registration is not the cell's, so that the agent says hello again."""

    cell: int
    engine_alive: bool
    trainer_alive: bool
    trainer: str = "idle"  # idle | training
    version: int = 0  # weights the engine serves
    detail: str = ""
    routable: bool = False  # after an engine died and came back: refreshed and probed again
    registration: int = 0


class Backlog(msgspec.Struct, frozen=True, kw_only=True, tag="backlog"):
    """What the feed holds, whole, at every change and as a heartbeat. Reply: `Ack`."""

    waiting: int  # admitted executions of complete groups, in no batch yet
    open_batch: int | None  # index of the batch being trained
    micro_steps_left: int  # of the open batch: unclaimed or leased, as far as known
    batches_closed: int
    executions_trained: int
    executions_excluded: int
    batches_ready: int = 0  # whole batches that `waiting` makes, plus the open one if it has work left
    version: int = 0  # weights that the last closed batch made; cells return only once these were published
    work_left: float = 0.0  # to train of what is admitted, waiting or in the open batch; in a unit of the feed's choice
    work_done: float = 0.0  # since the run began, in the same unit; both 0: the feed does not tell


class Published(msgspec.Struct, frozen=True, kw_only=True, tag="published"):
    """The core has published the snapshot of `version`; `manifest` is a msgpack `gyre_transport.snapshot.Manifest`.

    Reply: `Ack`."""

    version: int
    manifest: bytes


class GetStatus(msgspec.Struct, frozen=True, kw_only=True, tag="get_status"):
    """Reply: `Status`."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Grant no further burst and move no further cell; running work is left alone. Reply: `Ack`."""

    reason: str = ""


# --- replies and publications of the scheduler ---------------------------------------------------------------------


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    pass


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag="registered"):
    """Only orders with this registration, of this term or a later one, are for the cell from now on."""

    term: int  # of the scheduler: which of the run's schedulers it is, counted from 1
    registration: int


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag="granted"):
    """Dispatch now; at most `capacity` executions may be started and not terminated at a time."""

    burst: int
    capacity: int
    order: tuple[int, ...] = ()  # indices into the groups asked for: start them in this order; empty: as planned


class NotYet(msgspec.Struct, frozen=True, kw_only=True, tag="not_yet"):
    """Ask again in `retry` seconds."""

    reason: str
    retry: float = 0.5


class Declined(msgspec.Struct, frozen=True, kw_only=True, tag="declined"):
    """Go on without: asking again will not help."""

    reason: str


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One routable engine."""

    engine: str
    url: str
    capacity: int
    version: int
    lasting: int  # higher stays longer in rollout: standalone engines, then later cells
    kv: tuple[str, ...] = ()  # as in `CellHello`


class Routes(msgspec.Struct, frozen=True, kw_only=True, tag="routes"):
    """The whole routing state. Published at every change and every second; only the highest (term, epoch) counts."""

    epoch: int
    engines: tuple[Engine, ...]  # send new requests only to these
    draining: tuple[str, ...] = ()  # engines whose requests must be continued elsewhere, then acked by `Drained`
    term: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """One line of the journal: what was decided or observed, with the numbers it was decided on."""

    seq: int
    at: float  # unix seconds
    kind: str
    cell: int | None = None
    numbers: dict[str, float | int | str | None] = {}


class CellStatus(msgspec.Struct, frozen=True, kw_only=True):
    cell: int
    role: Role
    since: float  # seconds in this role
    version: int
    engine_alive: bool
    trainer_alive: bool
    trains: bool = True  # it has a trainer, or should; others only sample


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """What an operator wants to know now."""

    dispatched: int
    started: int
    terminated: int
    water: int  # dispatched - terminated
    capacity: int  # C_R: capacity of routable engines
    burst: int | None
    version: int
    epoch: int
    cells: tuple[CellStatus, ...]
    backlog: Backlog | None = None
    halted: str | None = None  # why nothing can be dispatched any more


PROTOCOL = ("scheduler", 1)  # raised when a message of an older version would be misread
Request = Annotated[
    OpenBurst
    | Started
    | Terminated
    | Replace
    | ProxyHello
    | Drained
    | EngineFailed
    | CellHello
    | CellState
    | Backlog
    | Published
    | GetStatus
    | Shutdown,
    PROTOCOL,
]
Reply = Annotated[Ack | Registered | Granted | NotYet | Declined | Routes | Status, PROTOCOL]
Publication = Annotated[Routes | Event, PROTOCOL]


# --- requests to a cell agent (scheduler and trainer are its clients) ----------------------------------------------


class EnterTraining(msgspec.Struct, frozen=True, kw_only=True, tag="enter_training"):
    """The engine is out of the routes and drained: verify, release its memory, let the trainer enter.

    Reply: `Done` when the trainer has entered, `Fenced` when the order is not for this cell (any more), `Failed`
    otherwise. So for the two below."""

    term: int = 0
    registration: int = 0


class EnterRollout(msgspec.Struct, frozen=True, kw_only=True, tag="enter_rollout"):
    """Let the trainer finish its micro-step, hand over and leave; resume the engine, refresh it to `version` from
    `manifest`, probe it. Reply: `Done` with the version served, or `Failed`."""

    version: int
    manifest: bytes
    term: int = 0
    registration: int = 0


class Refresh(msgspec.Struct, frozen=True, kw_only=True, tag="refresh"):
    """Refresh an engine that stays in rollout; requests in flight are paused, not aborted. Reply: `Done`."""

    version: int
    manifest: bytes
    term: int = 0
    registration: int = 0


class StopCell(msgspec.Struct, frozen=True, kw_only=True, tag="stop_cell"):
    """Stop engine and trainer and exit. Reply: `Done`."""


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True, tag="trainer_report"):
    """The trainer's long poll. Answered by `TrainerOrder` at once when the order differs from `state`, else after at
    most `wait` seconds. The trainer polls between micro-steps with wait=0."""

    cell: int
    state: str  # starting | idle | training
    wait: float = 2.0
    detail: str = ""
    instance: str = ""  # GYRE_TRAINER of its environment; empty: not said


class TrainerOrder(msgspec.Struct, frozen=True, kw_only=True, tag="trainer_order"):
    """What the trainer should be: idle, training, or stopped (save what must be saved, then exit)."""

    want: str  # idle | training | stop


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    seconds: float  # how long it took
    version: int = 0  # weights the engine serves


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    detail: str


class Fenced(msgspec.Struct, frozen=True, kw_only=True, tag="fenced"):
    """The order was not carried out: a scheduler of a later term gives orders, or the cell was registered anew since,
    or its agent heard nothing from the scheduler for a lease and has to be registered anew."""

    term: int  # the latest the agent knows
    detail: str


AGENT_PROTOCOL = ("agent", 1)
AgentRequest = Annotated[EnterTraining | EnterRollout | Refresh | StopCell | TrainerReport, AGENT_PROTOCOL]
AgentReply = Annotated[Done | Failed | Fenced | TrainerOrder | Ack, AGENT_PROTOCOL]
