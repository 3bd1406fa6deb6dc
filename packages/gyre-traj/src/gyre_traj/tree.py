"""The trajectory tree of one execution: its calls, shared prefixes merged."""

from __future__ import annotations

from typing import Self

from gyre_traj.log import Log
from gyre_traj.records import Call


class Tree:
    """See the module. `add` in any order in which parents come before their children gives the same tree."""

    execution: str

    def __init__(self, execution: str) -> None:
        self.execution = execution

    @classmethod
    def from_log(cls, log: Log) -> Self:
        """Build the tree of a log's calls. Raises `LogError` without a header, `BrokenCall`, `UnknownCall`."""
        raise NotImplementedError

    def add(self, call: Call, delivered: bool = True) -> None:
        """Hang a call; the same record twice is a no-op. Raises `BrokenCall`, `UnknownCall`; then nothing changed."""
        raise NotImplementedError

    @property
    def tokens_total(self) -> int:
        """Sum of the lengths of all root-to-leaf paths."""
        raise NotImplementedError

    @property
    def tokens_unique(self) -> int:
        """Tokens on at least one root-to-leaf path."""
        raise NotImplementedError

    @property
    def trainable(self) -> int:
        """Sampled tokens with a log-probability."""
        raise NotImplementedError

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that sampled a token of this tree, ascending."""
        raise NotImplementedError
