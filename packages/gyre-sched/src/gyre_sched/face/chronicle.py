"""A run's story, folded from its journal: roles over time, the water level, bursts, versions, failures.

    chronicle = Chronicle()
    for event in events: chronicle.take(event)

Pure, and bounded: a run of weeks takes as much memory as one of hours, because old detail is thinned and counted.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from gyre_sched.protocol import Event

POINTS = 1_000  # of the water line
SPANS = 400  # roles kept a cell
MARKS = 400  # transfers, bursts and versions kept, each
NOTES = 200  # events told in words

# told by the curves and the cells' rows; every other event is told in words too, unknown kinds included
_DRAWN = frozenset({"backlog", "started", "terminated", "role", "cell_hello", "drained", "burst_asked"})
_FAILURES = frozenset(
    {
        "engine_failed",
        "trainer_failed",
        "lease_expired",
        "never_heard",
        "enter_failed",
        "return_failed",
        "barred",
        "lost",
        "halted",
        "refused",
        "proxy_gone",
        "transfer_cancelled",
        "version_rewound",
        "fenced",
    }
)


class Span(msgspec.Struct, array_like=True):
    """A stretch of time in one role. `ended` is None for the present one."""

    role: str
    began: float
    ended: float | None = None


class Cell(msgspec.Struct, kw_only=True):
    """One cell's present and past."""

    cell: int
    role: str = "starting"
    since: float = 0.0  # unix seconds
    engine: str = ""
    capacity: int = 0
    version: int = 0
    spans: list[Span] = []
    dropped: int = 0  # spans older than those kept


class Level(msgspec.Struct, array_like=True):
    """The levels from `at` on."""

    at: float
    water: int  # w: dispatched and not terminated
    capacity: int  # C_R: executions the routable engines may host
    queue: int  # dispatched and not started
    waiting: int  # executions at the feed, in no batch yet


class Mark(msgspec.Struct, array_like=True):
    """A moment: a transfer (cell and the inequality's numbers), a burst or a version (`value`)."""

    at: float
    value: int
    water: int = 0
    capacity: int = 0


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """An event in words."""

    at: float
    kind: str
    cell: int | None
    text: str
    failure: bool


class Chronicle:
    """Folds events, in order. Events of kinds it does not know are counted and change nothing."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.at = 0.0  # time of the last event
        self.seq = -1
        self.ended = False
        self.dispatched = self.started = self.terminated = 0
        self.moved = 0  # requests that proxies continued elsewhere because a cell left
        self.version = 0
        self.burst: int | None = None
        self.halted: str | None = None
        self.backlog: dict[str, float | int | str | None] = {}
        self.cells: dict[int, Cell] = {}
        self.levels: list[Level] = []
        self.transfers: deque[Mark] = deque(maxlen=MARKS)
        self.bursts: deque[Mark] = deque(maxlen=MARKS)
        self.versions: deque[Mark] = deque(maxlen=MARKS)
        self.notes: deque[Note] = deque(maxlen=NOTES)
        self.kinds: Counter[str] = Counter()
        self.seconds: dict[int, dict[str, float]] = {}  # cell -> role -> seconds in the roles it has left

    @property
    def water(self) -> int:
        """w = dispatched - terminated."""
        return self.dispatched - self.terminated

    @property
    def capacity(self) -> int:
        """C_R: capacity of the cells in rollout."""
        return sum(c.capacity for c in self.cells.values() if c.role == "rollout")

    @property
    def failures(self) -> dict[str, int]:
        """How often each kind of failure happened."""
        return {kind: n for kind, n in sorted(self.kinds.items()) if kind in _FAILURES}

    def take(self, event: Event) -> None:
        """Fold one event."""
        if self.began is None:
            self.began = event.at
        self.at, self.seq = event.at, event.seq
        self.kinds[event.kind] += 1
        before = (self.water, self.capacity, self.dispatched - self.started, self._waiting)
        match event.kind:
            case "scheduler_started":
                self._started(event)
            case "cell_hello" if event.cell is not None:
                self._hello(event, self._cell(event.cell))
            case "role" if event.cell is not None:
                self._moved(event, self._cell(event.cell))
            case "refreshed" if event.cell is not None:
                self._cell(event.cell).version = _int(event, "version")
            case "drained":
                self.moved += _int(event, "moved")
            case "backlog":
                self.backlog = event.numbers
            case "published" | "version_rewound":
                self.version = _int(event, "version")
                self.versions.append(Mark(event.at, self.version))
            case "transfer" if event.cell is not None:
                self.transfers.append(Mark(event.at, event.cell, _int(event, "w"), _int(event, "C_R")))
            case "burst_granted":
                self.burst = _int(event, "burst")
                self.bursts.append(Mark(event.at, self.burst))
            case "halted" | "resumed":
                self.halted = str(event.numbers.get("reason")) if event.kind == "halted" else None
            case "scheduler_stopped":
                self.ended = True
            case _:
                pass
        self._count(event)
        now = (self.water, self.capacity, self.dispatched - self.started, self._waiting)
        if now != before or not self.levels:
            self._level(Level(event.at, *now))
        if event.kind not in _DRAWN:
            failure = event.kind in _FAILURES
            self.notes.append(Note(at=event.at, kind=event.kind, cell=event.cell, text=words(event), failure=failure))

    @property
    def _waiting(self) -> int:
        waiting = self.backlog.get("waiting")
        return int(waiting) if isinstance(waiting, int | float) else 0

    def _count(self, event: Event) -> None:
        """d, p and f, as far as the event tells them."""
        for key, name in (("d", "dispatched"), ("p", "started"), ("f", "terminated")):
            value = event.numbers.get(key)
            if isinstance(value, int):
                setattr(self, name, value)

    def _cell(self, index: int) -> Cell:
        if index not in self.cells:
            began = self.began or self.at
            self.cells[index] = Cell(cell=index, since=began, spans=[Span("starting", began)])
        return self.cells[index]

    def _started(self, event: Event) -> None:
        self.ended = False
        cells = event.numbers.get("cells")
        for index in range(int(cells) if isinstance(cells, int) else 0):
            self._cell(index)

    def _hello(self, event: Event, cell: Cell) -> None:
        cell.engine, cell.capacity = str(event.numbers.get("engine", "")), _int(event, "C_e")
        cell.version = _int(event, "version")

    def _moved(self, event: Event, cell: Cell) -> None:
        role = str(event.numbers.get("to"))
        spent = self.seconds.setdefault(cell.cell, {})
        spent[cell.role] = spent.get(cell.role, 0.0) + event.at - cell.since
        if cell.spans:
            cell.spans[-1].ended = event.at
        cell.role, cell.since = role, event.at
        cell.spans.append(Span(role, event.at))
        if len(cell.spans) > SPANS:
            del cell.spans[0]
            cell.dropped += 1

    def _level(self, level: Level) -> None:
        if self.levels and self.levels[-1].at == level.at:
            self.levels[-1] = level
            return
        self.levels.append(level)
        if len(self.levels) > POINTS:  # every other one goes, the newest stay whole
            old = len(self.levels) // 2
            self.levels[:old] = self.levels[:old:2]


def words(event: Event) -> str:
    """An event's numbers as a line for a person."""
    n = event.numbers
    match event.kind:
        case "transfer":
            return f"leaves rollout: w = {n.get('w')} <= C_R - C_e = {n.get('C_R')} - {n.get('C_e')}"
        case "entered":
            return f"trains, {_seconds(n.get('seconds'))} after it was ordered"
        case "leave":
            return f"returns to rollout: {n.get('why')}"
        case "refreshed":
            return f"serves version {n.get('version')} ({_seconds(n.get('agent_seconds'))})"
        case "burst_granted":
            return f"burst {n.get('burst')}: {n.get('executions')} executions, capacity {n.get('C_R')}"
        case "burst_ended":
            return f"burst {n.get('burst')} ended after {_seconds(n.get('seconds'))}"
        case "burst_settled":
            return f"burst {n.get('burst')} is trained: {n.get('how')}"
        case "published":
            return f"version {n.get('version')} published"
        case "shutdown":
            return f"no further burst: {n.get('reason')}"
    return "; ".join(f"{key}: {_short(value)}" for key, value in n.items() if value not in (None, ""))


def _seconds(value: object) -> str:
    return f"{value:.1f} s" if isinstance(value, int | float) else "? s"


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _int(event: Event, key: str) -> int:
    value = event.numbers.get(key)
    return int(value) if isinstance(value, int | float) else 0
