"""The streaming packer: rows in as executions arrive, micro-steps out with a bounded delay.

    add(rows) ─▶ [waiting: less than `window` budgets] ─▶ micro-steps due: the fullest
    flush()   ─▶ the rest, balanced

While rows wait there is a choice of what to put beside what; a wider window packs fuller and delays longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gyre_traj.bins import assign, balance, load, places
from gyre_traj.errors import BadRow
from gyre_traj.forest import Forest
from gyre_traj.packed import Packed
from gyre_traj.packing import lay_out, usable
from gyre_traj.rows import Row


class Packer:
    """A state machine; which rows share a micro-step depends on nothing but the order in which rows arrive.

    budget: tokens of a micro-step. layout: "forests" share prefixes, "rows" do not. window: what waits is less than
    so many budgets; at least 1. Raises `BadRow`.
    """

    def __init__(self, budget: int, layout: Literal["forests", "rows"] = "forests", *, window: float = 2.0) -> None:
        if budget < 1 or not window >= 1:
            raise BadRow(f"expected a budget of 1 token or more and a window of 1 or more, got {budget!r}, {window!r}")
        if layout not in ("forests", "rows"):
            raise BadRow(f"unknown layout {layout!r}; choose 'forests' or 'rows'")
        self.budget = budget
        self.layout = layout
        self.window = window
        self._start()

    def _start(self) -> None:
        self._waiting: Forest[Row] = Forest(sharing=self.layout == "forests")
        self._numbered = 0

    @property
    def pending(self) -> int:
        """Tokens that wait, shared ones counted once; less than `window` budgets."""
        return self._waiting.tokens

    def add(self, rows: Iterable[Row]) -> list[Packed]:
        """Take rows in, numbered on from the last ones, and return the micro-steps now due.

        Rows that share much (of one execution, of one group) belong in one call: what has left is not shared with. A
        row longer than the budget never waits. Raises `BadRow`; then nothing was changed.
        """
        numbered = [row.numbered(number) for number, row in enumerate(rows, self._numbered)]
        kept = usable(numbered, self.budget)
        self._numbered += len(numbered)
        for row in kept:
            self._waiting.add(row)
        limit = self.window * self.budget
        if self.pending < limit and all(len(row) <= self.budget for row in kept):
            return []
        bins = sorted(assign(self._waiting, self.budget), key=load, reverse=True)
        waiting = sum(map(load, bins))
        due: list[Packed] = []
        left: list[int] = []
        for placed in bins:
            if load(placed) <= self.budget and waiting < limit:
                break
            waiting -= load(placed)
            due.append(lay_out(self._waiting, placed, self.budget))
            left.extend(places(placed))
        self._waiting.remove(left)
        return due

    def flush(self) -> list[Packed]:
        """Return what waits, balanced, and begin the next batch: rows are numbered from 0 again."""
        due = [lay_out(self._waiting, placed, self.budget) for placed in balance(self._waiting, self.budget)]
        self._start()
        return due
