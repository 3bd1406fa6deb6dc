"""The ledger: where every execution stands, in SQLite.

    dispatched ─▶ started ─▶ terminated ─▶ judged ─▶ submitted ─▶ trained | excluded | placeholder

    dispatched   the burst was granted; counts in the water level
    started      its harness runs, or is about to
    terminated   its harness and all it left behind have ended
    judged       it has its outcome (column `ending`: scored, evaluator_failed, nothing_to_score, aborted)
    submitted    the feed has it
    trained …    its fate; a placeholder was in a batch without target tokens

Each step is one transaction; one that the state does not allow raises `LedgerError` and changes nothing: an execution
ends exactly once. A runner that starts over an existing ledger goes on from what it says.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from gyre_agent_proxy.runner.errors import LedgerError
from gyre_traj.intake import Ending, Fate, Outcome


class State(StrEnum):
    """See the module."""

    DISPATCHED = "dispatched"
    STARTED = "started"
    TERMINATED = "terminated"
    JUDGED = "judged"
    SUBMITTED = "submitted"
    TRAINED = "trained"
    EXCLUDED = "excluded"
    PLACEHOLDER = "placeholder"


FATES = frozenset({State.TRAINED, State.EXCLUDED, State.PLACEHOLDER})
RUNNABLE = frozenset({State.DISPATCHED, State.STARTED})  # a harness runs, or is still to run
UNFINISHED = RUNNABLE | {State.TERMINATED, State.JUDGED}  # the feed does not have it
_NEXT: dict[State, frozenset[State]] = {
    State.DISPATCHED: frozenset({State.STARTED}),
    State.STARTED: frozenset({State.TERMINATED}),
    State.TERMINATED: frozenset({State.JUDGED}),
    State.JUDGED: frozenset({State.SUBMITTED}),
    State.SUBMITTED: FATES,
    **{fate: frozenset() for fate in FATES},
}


def allowed(now: State, then: State) -> bool:
    """Whether an execution in state `now` may go to `then`."""
    return then in _NEXT[now]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One execution. Times are unix seconds."""

    id: str
    task: str
    grp: str
    burst: int
    state: State
    dispatched: float
    started: float | None = None
    terminated: float | None = None
    why: str = ""  # how the harness ended: "exit 0", "budget", "stopped", "lost", "could not start: …"
    ending: Ending | None = None
    score: float | None = None
    detail: str = ""
    calls: int | None = None  # model calls, as the proxy counted them
    trained_step: int | None = None
    reason: str = ""  # of an exclusion


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """`n` executions in the same state, with the same ending and why."""

    state: State
    ending: Ending | None
    why: str
    n: int
    scores: int  # how many of them have a score
    score: float  # sum
    calls: int  # sum


_TABLE = """
CREATE TABLE IF NOT EXISTS executions (
    id TEXT PRIMARY KEY, task TEXT NOT NULL, grp TEXT NOT NULL, burst INTEGER NOT NULL, state TEXT NOT NULL,
    dispatched REAL NOT NULL, started REAL, terminated REAL, why TEXT NOT NULL DEFAULT '',
    ending TEXT, score REAL, detail TEXT NOT NULL DEFAULT '', calls INTEGER, trained_step INTEGER,
    reason TEXT NOT NULL DEFAULT ''
) STRICT
"""


class Ledger:
    """The executions of one run; used from one thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_TABLE)
        except sqlite3.Error as e:
            raise LedgerError(
                f"the ledger {str(path)!r} cannot be used: {e}; check the folder's space and permissions"
            ) from e

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def dispatch(self, rows: Iterable[tuple[str, str, str]], burst: int) -> None:
        """Enter (id, task, group) executions as dispatched, all or none; those already entered stay as they are."""
        now = time.time()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(
                "INSERT OR IGNORE INTO executions (id, task, grp, burst, state, dispatched) VALUES (?, ?, ?, ?, ?, ?)",
                [(*row, burst, State.DISPATCHED, now) for row in rows],
            )
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def started(self, execution: str) -> None:
        """The harness is being started."""
        self._step(execution, State.STARTED, started=time.time())

    def terminated(self, execution: str, why: str) -> None:
        """Nothing of the execution runs any more."""
        self._step(execution, State.TERMINATED, terminated=time.time(), why=why)

    def judged(self, execution: str, outcome: Outcome, calls: int | None = None) -> None:
        """The execution has its outcome."""
        columns = {"ending": outcome.ending, "score": outcome.score, "detail": outcome.detail, "calls": calls}
        self._step(execution, State.JUDGED, **columns)

    def submitted(self, execution: str) -> None:
        """The feed has accepted it."""
        self._step(execution, State.SUBMITTED)

    def fate(self, fate: Fate) -> bool:
        """Enter a fate; False when the execution has the same one already (fates are read again after a restart)."""
        row = self.row(fate.execution)
        if fate.step is None:
            state = State.EXCLUDED
        elif row.ending is Ending.NOTHING_TO_SCORE:
            state = State.PLACEHOLDER
        else:
            state = State.TRAINED
        if (row.state, row.trained_step, row.reason) == (state, fate.step, fate.reason):
            return False
        self._step(fate.execution, state, trained_step=fate.step, reason=fate.reason)
        return True

    def row(self, execution: str) -> Row:
        """Raises `LedgerError` for an unknown execution."""
        found = self._db.execute("SELECT * FROM executions WHERE id = ?", (execution,)).fetchone()
        if found is None:
            raise LedgerError(f"the ledger knows no execution {execution!r}; was it dispatched by another run?")
        return msgspec.convert(dict(found), Row)

    def rows(self, burst: int | None = None) -> list[Row]:
        """All executions, or those of a burst, in order of dispatch."""
        where, values = ("", ()) if burst is None else ("WHERE burst = ?", (burst,))
        found = self._db.execute(f"SELECT * FROM executions {where} ORDER BY rowid", values)  # noqa: S608
        return [msgspec.convert(dict(row), Row) for row in found]

    def without_fate(self) -> list[str]:
        """Executions that have not ended yet."""
        marks = ", ".join("?" * len(FATES))
        found = self._db.execute(
            f"SELECT id FROM executions WHERE state NOT IN ({marks}) ORDER BY rowid",  # noqa: S608
            tuple(FATES),
        )
        return [row["id"] for row in found]

    def tally(self) -> list[Tally]:
        """Executions counted by where they stand."""
        found = self._db.execute(
            "SELECT state, ending, why, COUNT(*) AS n, COUNT(score) AS scores, TOTAL(score) AS score, "
            "CAST(TOTAL(calls) AS INTEGER) AS calls FROM executions GROUP BY state, ending, why"
        )
        return [msgspec.convert(dict(row), Tally) for row in found]

    def _step(self, execution: str, state: State, **columns: Any) -> None:
        before = tuple(now for now in State if allowed(now, state))
        assignments = ", ".join(f"{name} = ?" for name in ("state", *columns))
        marks = ", ".join("?" * len(before))
        changed = self._db.execute(
            f"UPDATE executions SET {assignments} WHERE id = ? AND state IN ({marks})",  # noqa: S608
            (state, *columns.values(), execution, *before),
        )
        if changed.rowcount != 1:
            raise LedgerError(
                f"execution {execution!r} is {self.row(execution).state.value} and cannot become {state.value}, which "
                f"follows {' or '.join(b.value for b in before)}"
            )
