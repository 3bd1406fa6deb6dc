"""The ledger: where every execution stands, in SQLite.

    dispatched ─▶ started ─▶ terminated ─▶ judged ─▶ submitted ─▶ trained | excluded | placeholder

    dispatched   the burst was granted; counts in the water level
    started      its harness runs, or is about to
    terminated   its harness and all it left behind have ended
    judged       it has its outcome (column `ending`: scored, evaluator_failed, nothing_to_score, aborted)
    submitted    the feed has it
    trained …    its fate; a placeholder was in a batch without target tokens

An execution that ended without a result may be replaced by another one of its group (refill.py): both rows say so, and
a replacement is entered as dispatched in the same transaction.

Each step is one transaction; one that the state does not allow raises `LedgerError` and changes nothing: an execution
ends exactly once. A runner that starts over an existing ledger goes on from what it says.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from gyre_agent_proxy.runner import refill
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
    replaces: str = ""  # the execution it was dispatched in place of
    replaced_by: str = ""
    not_replaced: str = ""  # why not, although it ended without a result through no fault of its own


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


_ADDED = ("replaces", "replaced_by", "not_replaced")  # columns that ledgers of earlier versions lack


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
            known = {row["name"] for row in self._db.execute("PRAGMA table_info(executions)")}
            for name in (name for name in _ADDED if name not in known):
                self._db.execute(f"ALTER TABLE executions ADD COLUMN {name} TEXT NOT NULL DEFAULT ''")
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
        with self._transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO executions (id, task, grp, burst, state, dispatched) VALUES (?, ?, ?, ?, ?, ?)",
                [(*row, burst, State.DISPATCHED, now) for row in rows],
            )

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

    def refill(self, execution: str, limit: int) -> Row:
        """Decide, once, whether a judged execution without a result is replaced; returns its row.

        Its replacement is dispatched with it, unless `limit` executions of its group failed and were replaced already.
        Raises `LedgerError` for an execution that is not judged, or that has a result.
        """
        with self._transaction():
            row = self.row(execution)
            if row.state is not State.JUDGED or not refill.replaceable(row.ending):
                raise LedgerError(f"execution {execution!r} is {row.state.value} and cannot be replaced")
            if row.replaced_by or row.not_replaced:
                return row
            used = self._db.execute(
                "SELECT COUNT(*) FROM executions WHERE grp = ? AND replaced_by != '' AND why != ?",
                (row.grp, refill.STOPPED),
            ).fetchone()[0]
            by = "" if (obstacle := refill.obstacle(row.why, used, limit)) else refill.successor(execution)
            self._db.execute(
                "UPDATE executions SET replaced_by = ?, not_replaced = ? WHERE id = ?", (by, obstacle, execution)
            )
            if by:
                self._db.execute(
                    "INSERT INTO executions (id, task, grp, burst, state, dispatched, replaces) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (by, row.task, row.grp, row.burst, State.DISPATCHED, time.time(), execution),
                )
            return self.row(execution)

    def withdraw(self, execution: str, why: str) -> None:
        """The scheduler declined the replacement of `execution`, so it never was: its row goes, `why` stays.

        Raises `LedgerError` when it is not dispatched any more."""
        with self._transaction():
            by = self.row(execution).replaced_by
            gone = self._db.execute("DELETE FROM executions WHERE id = ? AND state = ?", (by, State.DISPATCHED))
            if gone.rowcount != 1:
                raise LedgerError(f"the replacement {by!r} of execution {execution!r} is not dispatched, or no more")
            self._db.execute("UPDATE executions SET replaced_by = '', not_replaced = ? WHERE id = ?", (why, execution))

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

    def refills(self) -> tuple[int, int]:
        """(executions that were replaced, executions without a result that were not)."""
        found = self._db.execute(
            "SELECT COUNT(*) FILTER (WHERE replaced_by != ''), COUNT(*) FILTER (WHERE not_replaced != '') "
            "FROM executions"
        ).fetchone()
        return found[0], found[1]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

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
