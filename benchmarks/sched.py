"""gyre-sched measured: what a decision costs, and how many steps a second the journal takes; see docs/benchmarks.md.

    uv run python benchmarks/sched.py

A policy is driven through one burst of `--executions` on 10, 1,000 and 10,000 cells: every hello, start, end, backlog,
drain and agent's answer is a step, and the processor time of every step is taken. Then the journal writes the steps
of a run.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from gyre_sched import protocol as p
from gyre_sched.actions import Call, Input, Publish, Received, Record, Returned, Tick
from gyre_sched.config import SchedConfig
from gyre_sched.journal import Journal, read_journal
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role

GROUP = 8


class Drive:
    """A policy whose every step is timed, by the kind of input; `done` takes the answers of agents at once."""

    def __init__(self, cells: int, executions: int, leave: str) -> None:
        capacity = -(-executions // cells) + 1
        known = [(f"t{i}", 50.0 + i) for i in range(1000)]  # so that the deadline rule predicts from the first burst on
        config = SchedConfig(cells=cells, capacity=capacity, leave=leave)
        self.policy = Policy(config, per_burst=1, steps=4, past=known)
        self.capacity, self.cells = capacity, cells
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.at = 0.0
        self.steps: list[tuple[Input, list[Record]]] = []
        self.keep = 0
        self.calls: list[Call] = []

    def take(self, event: Input, kind: str) -> None:
        begin = thread_time()  # of this thread, so that a busy machine does not count
        actions = self.policy.step(event)
        taken = thread_time() - begin
        records = [a for a in actions if isinstance(a, Record)]
        moved = any(isinstance(a, Publish) for a in actions)
        self.seconds[f"{kind}, routes change" if moved else kind].append(taken)
        self.calls += [a for a in actions if isinstance(a, Call)]
        if len(self.steps) < self.keep:
            self.steps.append((event, records))

    def send(self, request: p.Request) -> None:
        self.at += 0.001
        self.take(Received(self.at, request), type(request).__name__)

    def settle(self, moves: int) -> None:
        """Let up to `moves` cells that leave rollout arrive in training."""
        for _ in range(moves):
            state = self.policy.state
            if state.moving is None:
                return
            if state.cells[state.moving.cell].role is Role.DRAINING:
                engine = state.cells[state.moving.cell].engine
                self.send(p.Drained(proxy="proxy", engine=engine, epoch=state.epoch, moved=1))
            calls, self.calls = self.calls, []
            for call in calls:
                self.at += 0.001
                self.take(Returned(self.at, call.cell, call.call, p.Done(seconds=1.0)), "Returned")


def burst(cells: int, executions: int, leave: str, *, moves: int, keep: int = 0) -> Drive:
    """A burst from the first hello until its last execution has ended. moves: cells that leave at most."""
    drive = Drive(cells, executions, leave)
    drive.keep = keep
    for i in range(cells):
        name = f"cell-{i}"
        drive.send(p.CellHello(cell=i, agent=name, engine=name, engine_url=f"http://{i}", capacity=drive.capacity))
    drive.send(p.ProxyHello(proxy="proxy", url="http://proxy"))
    backlog = {"open_batch": None, "batches_closed": 0, "executions_trained": 0, "executions_excluded": 0}
    drive.send(p.Backlog(waiting=0, micro_steps_left=0, **backlog))
    drive.send(p.OpenBurst(burst=0, executions=executions))
    for i in range(executions):
        drive.send(p.Started(execution=f"e{i}", task=f"t{i // GROUP}"))
        if i % 1000 == 0:
            drive.take(Tick(drive.at), "Tick")
    left = moves
    for i in range(executions):
        drive.send(p.Terminated(execution=f"e{i}"))
        if i % 50 == 0:
            work = {"work_left": 10.0 * i, "work_done": 1.0 * i}
            drive.send(p.Backlog(waiting=i + 1, micro_steps_left=1, batches_ready=1, **work, **backlog))
        if i % 1000 == 0:
            drive.take(Tick(drive.at), "Tick")
            state = p.CellState(cell=i % cells, engine_alive=True, trainer_alive=True, detail=str(i))
            drive.send(state)
        if left and drive.policy.state.moving is not None:
            before = len(drive.policy.state.by_role[Role.TRAINING])
            drive.settle(1)
            left -= len(drive.policy.state.by_role[Role.TRAINING]) - before
    return drive


def journal_rate(steps: list[tuple[Input, list[Record]]]) -> dict[str, float]:
    """Steps and bytes a second into a journal, and back out of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = Journal(path)
        begin = perf_counter()
        for event, records in steps:
            journal.append(event, records)
        written = perf_counter() - begin
        journal.close()
        size = path.stat().st_size
        begin = perf_counter()
        read = read_journal(path)
        back = perf_counter() - begin
        assert len(read.steps) == len(steps)
        return {
            "steps": len(steps), "steps_a_second": len(steps) / written, "bytes_a_second": size / written,
            "bytes_a_step": size / len(steps), "read_steps_a_second": len(steps) / back,
        }  # fmt: skip


def measured(drive: Drive) -> dict[str, Any]:
    """Microseconds a step, by kind."""
    kinds = {}
    for kind, seconds in sorted(drive.seconds.items()):
        ordered = sorted(s * 1e6 for s in seconds)
        kinds[kind] = {
            "steps": len(ordered),
            "median_us": median(ordered),
            "p99_us": ordered[int(len(ordered) * 0.99)],
            "most_us": ordered[-1],
        }
    everything = sorted(s for seconds in drive.seconds.values() for s in seconds)
    kinds["all"] = {
        "steps": len(everything),
        "median_us": median(everything) * 1e6,
        "p99_us": everything[int(len(everything) * 0.99)] * 1e6,
        "most_us": everything[-1] * 1e6,
    }
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[10, 1_000, 10_000])
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--moves", type=int, default=300, help="cells that leave rollout at most")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.platform(), "sizes": []}
    for cells in args.cells:
        for leave in ("water", "deadline"):
            gc.collect()
            gc.disable()  # its pauses are not the policy's
            drive = burst(cells, args.executions, leave, moves=args.moves, keep=20_000)
            gc.enable()
            size = {"cells": cells, "executions": args.executions, "leave": leave, "kinds": measured(drive)}
            found["sizes"].append(size)
            if not args.json:
                show(size)
            last = drive
    found["journal"] = journal_rate(last.steps)
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if args.json:
        print(json.dumps(found))
        return
    j = found["journal"]
    print(
        f"journal: {j['steps_a_second']:,.0f} steps/s written ({j['bytes_a_second'] / 1e6:.1f} MB/s, "
        f"{j['bytes_a_step']:.0f} bytes each), {j['read_steps_a_second']:,.0f} read; "
        f"peak memory {found['peak_mb']:.0f} MB"
    )


def show(size: dict[str, Any]) -> None:
    """One table."""
    print(f"{size['cells']} cells, {size['executions']} executions, leave = {size['leave']}: microseconds a step")
    for kind, n in size["kinds"].items():
        numbers = f"median {n['median_us']:8.1f}  p99 {n['p99_us']:8.1f}  most {n['most_us']:9.1f}"
        print(f"  {kind:<28} {n['steps']:>7}  {numbers}")


if __name__ == "__main__":
    main()
