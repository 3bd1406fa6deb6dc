"""What the scheduler knows: counters, cells, proxies, the burst, the feed's backlog, the published weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre_sched.cell import Cell
from gyre_sched.config import SchedConfig
from gyre_sched.errors import Refused
from gyre_sched.pace import Pace
from gyre_sched.predict import Durations, Running, TaskLengths
from gyre_sched.protocol import Backlog, Published, Role, Routes, Status
from gyre_sched.routing import Routing


@dataclass(slots=True)
class Burst:
    """The burst granted last. It is open until its last execution terminates and settled when its data is trained."""

    index: int
    executions: int
    version: int  # weights its executions started with
    granted: float
    ended: float | None = None
    settled: bool = False
    order: tuple[int, ...] = ()  # in which its groups start; empty: as planned


@dataclass(slots=True)
class Transfer:
    """The one cell on its way from rollout to training."""

    cell: int
    epoch: int  # first routes without the cell
    began: float
    waiting: set[str]  # proxies that have not acked the drain


@dataclass(slots=True)
class Wanted:
    """A burst the runner has asked for and not been granted."""

    burst: int
    executions: int
    tasks: tuple[str, ...]  # of its groups; empty: not told
    at: float


@dataclass(slots=True)
class Counters:
    """d, p and f: executions dispatched, started and terminated, cumulative.

    Ids are kept for the last `keep` bursts: those that may be open, and one before, which is as late as a repeated
    message can come.
    """

    keep: int = 2
    dispatched: int = 0
    started: int = 0
    terminated: int = 0
    _started: list[set[str]] = field(default_factory=lambda: [set()])
    _terminated: list[set[str]] = field(default_factory=lambda: [set()])
    _replaced: list[set[str]] = field(default_factory=lambda: [set()])

    @property
    def water(self) -> int:
        """w = d - f."""
        return self.dispatched - self.terminated

    def dispatch(self, executions: int) -> None:
        """A burst was granted."""
        self.dispatched += executions
        for ids in (self._started, self._terminated, self._replaced):
            ids[:] = [set(), *ids[: self.keep - 1]]

    def start(self, execution: str) -> bool:
        """Count a start once; False if it was counted before. Raises `Refused` beyond d."""
        if any(execution in ids for ids in self._started):
            return False
        if self.started >= self.dispatched:
            raise Refused(
                f"execution {execution!r} is none of the {self.dispatched} dispatched, which all started; open a burst"
            )
        self._started[0].add(execution)
        self.started += 1
        return True

    def terminate(self, execution: str) -> bool:
        """Count an end once; False if it was counted before. Raises `Refused` beyond d."""
        if any(execution in ids for ids in self._terminated):
            return False
        if self.terminated >= self.dispatched:
            raise Refused(
                f"execution {execution!r} is none of the {self.dispatched} dispatched, which all ended; open a burst"
            )
        self._terminated[0].add(execution)
        self.terminated += 1
        return True

    def ended(self, execution: str) -> bool:
        """Whether its end was counted."""
        return any(execution in ids for ids in self._terminated)

    def replaced(self, by: str) -> bool:
        """Whether `by` was dispatched in another execution's place."""
        return any(by in ids for ids in self._replaced)

    def replace(self, execution: str, by: str) -> None:
        """Count the dispatch of `by` and the end of `execution`, each once."""
        if not self.replaced(by):
            self._replaced[0].add(by)
            self.dispatched += 1
        self.terminate(execution)


class State:
    """Everything the policy decides on. Only `Policy.step` changes it."""

    def __init__(
        self,
        cells: int,
        *,
        at: float = 0.0,
        past: Sequence[tuple[str, float]] = (),
        bursts: int = 2,
        per_burst: int = 1,
        staleness_bound: int = 0,
    ) -> None:
        """cells: standalone engines included; past: tasks and seconds of past executions, which seed the predictor;
        bursts: whose executions' ids are kept; per_burst: batches; staleness_bound: versions."""
        self.count = Counters(keep=bursts)
        self.durations = Durations(seconds for _, seconds in past)
        self.running = Running()
        self.lengths = TaskLengths()
        for task, seconds in past:
            self.lengths.add(task, seconds)
        self.pace = Pace(at)
        self.per_burst = per_burst
        self.staleness_bound = staleness_bound
        self.held: int | None = None  # the cell that might leave by the water level and is kept, as last recorded
        self.cells = [Cell(i, since=at) for i in range(cells)]
        self.by_role: dict[Role, set[int]] = {role: set() for role in Role}
        self.by_role[Role.STARTING] = set(range(cells))
        self.proxies: dict[str, str] = {}  # name -> url
        self.burst: Burst | None = None
        self.granted = 0  # bursts
        self.due = 0  # batches_closed at which all granted bursts are trained
        self.fates_due = 0  # executions trained + excluded at which they are
        self.backlog: Backlog | None = None
        self.quiet_since = at  # backlog and water last changed
        self.published: Published | None = None
        self.moving: Transfer | None = None
        self.wanted: Wanted | None = None
        self.term = 0  # which of the run's schedulers decides
        self.epoch = 0
        self.calls = 0
        self.bare_since: float | None = None  # work, and no engine to route it to
        self.stopping: str | None = None
        self.halted: str | None = None
        self.routing = Routing()
        self.engines: dict[str, int] = {}  # name -> cell, of those that ever said hello

    @property
    def water(self) -> int:
        """w: unfinished executions."""
        return self.count.water

    @property
    def queued(self) -> int:
        """Dispatched executions that wait for a free place."""
        return max(0, self.water - len(self.running))

    @property
    def behind(self) -> int:
        """Batches of granted bursts that are not trained."""
        return max(0, self.due - self.backlog.batches_closed) if self.granted and self.backlog else 0

    @property
    def version(self) -> int:
        """The current weights."""
        return self.published.version if self.published else 0

    @property
    def weights(self) -> tuple[int, bytes]:
        """Version and manifest of the current weights; an empty manifest: those the run started from."""
        return (self.published.version, self.published.manifest) if self.published else (0, b"")

    @property
    def capacity(self) -> int:
        """C_R: executions that the routable engines may host."""
        return self.routing.capacity

    @property
    def core(self) -> Cell:
        """Cell 0."""
        return self.cells[0]

    def move(self, cell: Cell, to: Role, at: float) -> float:
        """`Cell.move`, with the indexes kept."""
        before = cell.role
        seconds = cell.move(to, at)
        self.by_role[before].discard(cell.index)
        self.by_role[to].add(cell.index)
        if before is Role.ROLLOUT:
            self.routing.remove(cell)
        if to is Role.ROLLOUT:
            self.routing.add(cell)
        if Role.TRAINING in (before, to):
            self.pace.trainers(len(self.by_role[Role.TRAINING]), at)
        return seconds

    def having(self, *roles: Role) -> list[Cell]:
        """Cells in one of `roles`, in order."""
        return [self.cells[i] for i in sorted(set().union(*(self.by_role[r] for r in roles)))]

    def first(self, *roles: Role, but: int | None = None) -> Cell | None:
        """The first cell in one of `roles`, `but` left out."""
        return self.cells[min(found)] if (found := [i for r in roles for i in self.by_role[r] if i != but]) else None

    def routes(self) -> Routes:
        """The routing state as it stands."""
        return Routes(
            term=self.term,
            epoch=self.epoch,
            engines=self.routing.engines(),
            draining=tuple(c.engine for c in self.having(Role.DRAINING)),
        )

    def numbers(self) -> dict[str, float | int | str | None]:
        """The numbers most decisions are taken on."""
        count = self.count
        return {
            "w": count.water,
            "C_R": self.capacity,
            "d": count.dispatched,
            "p": count.started,
            "f": count.terminated,
            "epoch": self.epoch,
            "version": self.version,
        }

    def status(self, at: float, config: SchedConfig) -> Status:
        """What an operator wants to know at `at`."""
        return Status(
            dispatched=self.count.dispatched,
            started=self.count.started,
            terminated=self.count.terminated,
            water=self.water,
            capacity=self.capacity,
            burst=self.burst.index if self.burst else None,
            version=self.version,
            epoch=self.epoch,
            cells=tuple(c.status(at, config) for c in self.cells),
            backlog=self.backlog,
            halted=self.halted,
        )
