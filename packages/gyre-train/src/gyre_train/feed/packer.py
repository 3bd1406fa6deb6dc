"""The streaming packing buffer: rows in as groups arrive, micro-steps out with a bounded delay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from gyre_traj.packing import Row, pack_forests, pack_rows


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A micro-step ready to be claimed: msgpack of `gyre_traj.packing.Packed`, and its size."""

    data: bytes
    tokens: int
    targets: int


class Packer:
    """Rows of one batch wait here until a micro-step's worth is there or the batch has all its groups.

    What waits is always less than one budget of tokens, so a trainer is never kept from more work than that. Which rows
    share a micro-step depends on the order of the groups alone, not on who claims when.
    """

    def __init__(self, budget: int, layout: Literal["rows", "forests"] = "rows") -> None:
        self.budget = budget
        self._pack = pack_forests if layout == "forests" else pack_rows
        self._rows: list[Row] = []
        self._numbered = 0

    @property
    def pending(self) -> int:
        """Tokens that wait."""
        return sum(r.ids.size for r in self._rows)

    def push(self, rows: list[Row], *, last: bool) -> list[PackedStep]:
        """Add a group's rows, numbered in the batch; return the micro-steps now due.

        last: no group will follow, so everything is due.
        """
        for row in rows:
            self._rows.append(replace(row, trajectory=self._numbered))
            self._numbered += 1
        if not self._rows or (not last and self.pending < self.budget):
            return []
        due = self._pack(self._rows, self.budget)
        self._rows = []
        return [PackedStep(msgspec.msgpack.encode(p), p.tokens, p.targets) for p in due]
