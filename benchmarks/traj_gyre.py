"""gyre-traj as a peer of `traj.py`: calls in; tree, selected trajectories and packed batches out.

A peer is fed the calls one by one, in the form it wants; making that form is not timed. Each stage is a method:

    add(...)      once a call: find where it belongs
    build()       whatever is left to do once all calls are there
    select()      five trajectories with their ids, target flags and log-probabilities; each sampled token once
    pack(budget)  the packed batch
    arrays()      every array of it written out, where pack does not do that

gyre-traj draws its trajectories itself; the others are told which leaves it drew, so that all pack the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from traj_workload import Turn, record, whole_records

from gyre_traj import (
    Delivered,
    Header,
    LogWriter,
    Packed,
    PackedArrays,
    Row,
    Tree,
    pack_forests,
    pack_rows,
    read_log,
    select,
    weigh,
)

J_MAX = 5


class Size(NamedTuple):
    """What a peer made of the execution; the same for all of them."""

    leaves: int
    targets: int


class Gyre:
    """gyre-traj fed with call records: what each call adds to its parent."""

    requires = ""

    def __init__(self, turns: list[Turn], chosen: list[str], scratch: Path) -> None:
        self.turns = turns
        self.tree = Tree("bench")
        self.rows: tuple[Row, ...] = ()
        self.packed: list[Packed] = []
        self.written: list[PackedArrays] = []

    def add(self) -> Iterator[float]:
        """Feed call by call; yield the seconds each took."""
        for turn in self.turns:
            call = record(turn)
            start = perf_counter()
            self.tree.add(call)
            yield perf_counter() - start

    def build(self) -> None:
        self.tree.view()

    def select(self) -> None:
        self.rows = weigh(select(self.tree, J_MAX, seed=0), advantage=1.0).rows

    def pack(self, budget: int) -> None:
        self.packed = pack_forests(self.rows, budget)

    def arrays(self) -> None:
        self.written = [packed.arrays() for packed in self.packed]

    def size(self) -> Size:
        return Size(len(self.tree.leaves), sum(int(row.target.sum()) for row in self.rows))


class GyreRows(Gyre):
    """gyre-traj, packed as rows: prefixes are not shared."""

    def pack(self, budget: int) -> None:
        self.packed = pack_rows(self.rows, budget)


class GyreWhole(Gyre):
    """gyre-traj fed with whole prompts and no word about parents."""

    def add(self) -> Iterator[float]:
        for _, call in whole_records(self.turns):
            start = perf_counter()
            self.tree.add(call)
            yield perf_counter() - start


class GyreLog(Gyre):
    """gyre-traj fed with a log file, in the page cache."""

    def __init__(self, turns: list[Turn], chosen: list[str], scratch: Path) -> None:
        super().__init__(turns, chosen, scratch)
        self.path = scratch / "bench.gtraj"
        self.path.unlink(missing_ok=True)
        with LogWriter(self.path) as log:
            log.append(Header(execution="bench"))
            for turn in turns:
                log.append(record(turn))
                log.append(Delivered(call=turn.name))

    def add(self) -> Iterator[float]:
        yield from ()

    def build(self) -> None:
        self.tree = Tree.from_log(read_log(self.path))
        self.tree.view()
