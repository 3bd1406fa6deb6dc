"""Many executions through log, tree, selection, weights and packing, and the memory that takes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

from traj_workload import execution, record

from gyre_traj import (
    Delivered,
    Header,
    LogWriter,
    Packed,
    Packer,
    Tree,
    group_advantages,
    read_log,
    select,
    weigh,
)

GROUP = 8  # executions of a task
BATCH = 64  # executions of an optimizer step: what waits in the packer is flushed


def status(field: str) -> int:
    """A size from this process's status in bytes: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def write_log(path: Path, name: str, calls: int, tokens: int, seed: int) -> int:
    """Write an execution's log; return its size in bytes."""
    path.unlink(missing_ok=True)
    with LogWriter(path) as log:
        log.append(Header(execution=name))
        for turn in execution(calls, tokens, seed):
            log.append(record(turn, name))
            log.append(Delivered(call=turn.name))
    return path.stat().st_size


def stream(executions: int, calls: int, tokens: int, budget: int, scratch: Path) -> dict[str, Any]:
    """Group by group, write logs (not timed) and take them through the packer; a consumer drops each micro-step."""
    marks = {executions // 10, executions // 5, executions // 2, executions}
    seen: dict[int, dict[str, float]] = {}
    counts = dict.fromkeys(("tokens_unique", "tokens_packed", "targets", "micro_steps", "log_bytes"), 0)
    seconds = 0.0
    paths = [scratch / f"stream-{i}.gtraj" for i in range(GROUP)]
    packer = Packer(budget)

    def consume(steps: Iterable[Packed]) -> None:
        for packed in steps:
            counts["tokens_packed"] += len(packed.arrays().ids)
            counts["targets"] += packed.targets
            counts["micro_steps"] += 1

    for done in range(1, executions + 1):
        path = paths[(done - 1) % GROUP]
        counts["log_bytes"] += write_log(path, f"execution-{done}", calls, tokens, seed=done)
        if done % GROUP == 0 or done == executions:
            start = perf_counter()
            group = [Tree.from_log(read_log(path)) for path in paths[: (done - 1) % GROUP + 1]]
            advantages = group_advantages([float(i % 2) for i in range(len(group))], std=False)
            rows = [
                row
                for tree, advantage in zip(group, advantages, strict=True)
                for row in weigh(select(tree, 5, seed=0), advantage=float(advantage)).rows
            ]
            counts["tokens_unique"] += sum(tree.tokens_unique for tree in group)
            consume(packer.add(rows))
            if done % BATCH == 0 or done == executions:
                consume(packer.flush())
            del group, rows
            seconds += perf_counter() - start
        if done in marks:
            seen[done] = {"resident": status("VmRSS"), "peak": status("VmHWM")}
    return {"executions": executions, "marks": seen, "seconds": seconds, **counts}


def log_costs(calls: int, tokens: int, scratch: Path) -> dict[str, float]:
    """Time to write one execution's log, with and without syncing each record, and to read it."""
    turns = execution(calls, tokens)
    records = [record(turn, "log") for turn in turns]
    ids = 4 * sum(len(turn.prompt) + len(turn.output) for turn in turns)
    logprobs = 4 * sum(len(turn.output) for turn in turns)
    costs: dict[str, float] = {"ids_bytes": ids, "logprob_bytes": logprobs, "records": 2 * len(records)}
    for kind in ("append", "append_sync"):
        path = scratch / f"{kind}.gtraj"
        path.unlink(missing_ok=True)
        with LogWriter(path) as log:
            log.append(Header(execution="log"))
            start = perf_counter()
            for call in records:
                log.append(call)
                if kind == "append_sync":
                    log.sync()
                log.append(Delivered(call=call.call))
            costs[kind] = perf_counter() - start
        costs["file_bytes"] = path.stat().st_size
        start = perf_counter()
    read_log(path)
    costs["read"] = perf_counter() - start
    start = perf_counter()
    LogWriter(path).close()
    costs["reopen"] = perf_counter() - start
    for kind in ("append", "append_sync"):
        (scratch / f"{kind}.gtraj").unlink()
    return costs
