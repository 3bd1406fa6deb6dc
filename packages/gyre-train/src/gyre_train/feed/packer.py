"""The batch's packer: rows in as groups arrive, encoded micro-steps out with a bounded delay."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import msgspec

import gyre_traj
from gyre_traj.rows import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A micro-step ready to be claimed: msgpack of `gyre_traj.Packed`, and its size."""

    data: bytes
    tokens: int
    targets: int


class Packer:
    """`gyre_traj.Packer` for one batch, with the narrowest window: a trainer is kept from less than one budget.

    Which rows share a micro-step depends on the order of the groups alone, not on who claims when.
    """

    def __init__(self, budget: int, layout: Literal["rows", "forests"] = "rows") -> None:
        self._packer = gyre_traj.Packer(budget, layout, window=1)

    @property
    def pending(self) -> int:
        """Tokens that wait."""
        return self._packer.pending

    def push(self, rows: list[Row], *, last: bool) -> list[PackedStep]:
        """Add a group's rows, numbered in the batch; return the micro-steps now due.

        last: no group will follow, so everything is due.
        """
        due = self._packer.add(rows)
        if last:
            due += self._packer.flush()
        for packed in due:
            if packed.over_budget:
                log.warning(
                    "a micro-step has %d tokens: one trajectory of %r is longer than feed.tokens = %d; if it does not "
                    "fit into memory, lower the harness's context limit",
                    packed.tokens,
                    packed.executions[0],
                    packed.budget,
                )
        return [PackedStep(msgspec.msgpack.encode(p), p.tokens, p.targets) for p in due]
