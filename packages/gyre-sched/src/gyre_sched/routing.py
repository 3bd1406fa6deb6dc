"""The routable engines, with what every decision asks of them kept up to date: order, capacity, versions.

With thousands of cells nothing here may be worked out anew at a step: a change costs a bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from gyre_sched.cell import Cell
from gyre_sched.protocol import Engine


class Routing:
    """Cells in rollout, in order of their index."""

    def __init__(self) -> None:
        self.capacity = 0  # C_R
        self.versions: Counter[int] = Counter()  # of the weights they serve
        self._cells: list[int] = []
        self._engines: list[Engine] = []

    def __iter__(self) -> Iterator[int]:
        """Indices of the cells, in order."""
        return iter(self._cells)

    def add(self, cell: Cell) -> None:
        """`cell` is routable from now on."""
        at = bisect_left(self._cells, cell.index)
        self._cells.insert(at, cell.index)
        self._engines.insert(at, _engine(cell))
        self._count(self._engines[at], 1)

    def remove(self, cell: Cell) -> None:
        """`cell` is not routable any more."""
        at = bisect_left(self._cells, cell.index)
        del self._cells[at]
        self._count(self._engines.pop(at), -1)

    def update(self, cell: Cell) -> None:
        """A routable cell's engine has changed: other weights."""
        at = bisect_left(self._cells, cell.index)
        self._count(self._engines[at], -1)
        self._engines[at] = _engine(cell)
        self._count(self._engines[at], 1)

    def engines(self) -> tuple[Engine, ...]:
        """As they are now."""
        return tuple(self._engines)

    def all_at(self, version: int) -> bool:
        """Whether every engine serves the weights of `version`."""
        return not self.versions or set(self.versions) == {version}

    def _count(self, engine: Engine, by: int) -> None:
        self.capacity += by * engine.capacity
        self.versions[engine.version] += by
        if not self.versions[engine.version]:
            del self.versions[engine.version]


def _engine(c: Cell) -> Engine:
    return Engine(engine=c.engine, url=c.url, capacity=c.capacity, version=c.version, lasting=c.index, kv=c.kv)
