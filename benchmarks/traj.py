"""gyre-traj measured against others on one long, branching execution; see docs/benchmarks.md.

    uv run --with verifiers==0.4.0 --with trl==1.16.0 python benchmarks/traj.py
    uv run python benchmarks/traj.py --only stream --executions 100

Every measurement is made in a process of its own; rounds go through the peers in turn, so that a busy machine is busy
for all of them. Peers that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from traj_gyre import J_MAX
from traj_peers import PEERS, missing
from traj_stream import log_costs, status, stream
from traj_workload import Turn, chain, execution, record

from gyre_traj import Tree, select

INSTALL = "uv run --with verifiers==0.4.0 --with trl==1.16.0 python benchmarks/traj.py"
PARTS = ("pipeline", "adds", "stream", "log")
ADDERS = ("gyre-traj", "gyre-traj, whole prompts", "verifiers", "verifiers, short texts", "naive lists")
STAGES = ("build", "select", "pack", "arrays")


def drawn(turns: list[Turn]) -> list[str]:
    """The leaves gyre-traj draws, for the peers to take too."""
    tree = Tree("bench")
    for turn in turns:
        tree.add(record(turn))
    return [trajectory.call for trajectory in select(tree, J_MAX, seed=0).trajectories]


def stages(name: str, turns: list[Turn], budget: int, scratch: Path, traced: bool) -> dict[str, Any]:
    """Run one peer's stages: seconds, and bytes above what was there before, at the end of each and at most.

    Bytes are Python's and NumPy's allocations when `traced` (which costs time), else resident memory.
    """
    peer = PEERS[name](turns, drawn(turns), scratch)
    wanted = getattr(peer, "stages", STAGES)
    result: dict[str, Any] = {}
    if traced:
        tracemalloc.start()
    before = traced_or_resident(traced)
    for stage in STAGES:
        if stage not in wanted or not hasattr(peer, stage):
            continue
        tracemalloc.reset_peak()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        seconds = sum(peer.add()) if stage == "build" else 0.0
        start = perf_counter()
        peer.pack(budget) if stage == "pack" else getattr(peer, stage)()
        seconds += perf_counter() - start
        peak = tracemalloc.get_traced_memory()[1] if traced else status("VmHWM")
        result[stage] = {"seconds": seconds, "kept": traced_or_resident(traced) - before, "peak": peak - before}
    result["size"] = list(peer.size())
    return result


def traced_or_resident(traced: bool) -> int:
    """Bytes in use once everything free has been given back."""
    gc.collect()
    if traced:
        return tracemalloc.get_traced_memory()[0]
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


def work(part: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One measurement, in this process."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        scratch = Path(folder)
        if part == "stream":
            return stream(options.executions, options.stream_calls, options.stream_tokens, options.budget, scratch)
        if part == "log":
            return log_costs(options.calls, options.tokens, scratch)
        if part == "adds":
            for turns in (chain(20, 2000), chain(options.calls, options.tokens)):  # the first one warms up
                times = list(PEERS[name](turns, [], scratch).add())
            return {"times": times}
        stages(name, execution(40, 20_000), options.budget, scratch, traced=False)  # imports and caches
        turns = execution(options.calls, options.tokens)
        return stages(name, turns, options.budget, scratch, traced=part == "memory")


def spawn(part: str, name: str) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", part, name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | QUIET)
    if done.returncode:
        raise SystemExit(f"measuring {part} of {name!r} failed with status {done.returncode}; its error is above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


QUIET = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, the first column to the left."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def pipeline_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Median milliseconds a stage."""
    rows = []
    for name, results in runs.items():
        times = {stage: median(r[stage]["seconds"] for r in results) for stage in STAGES if stage in results[0]}
        cells = [f"{1e3 * times[stage]:,.1f}" if stage in times else "" for stage in STAGES]
        rows.append([name, *cells, f"{1e3 * sum(times.values()):,.1f}"])
    return table(["ms", *STAGES, "sum"], rows)


def memory_table(traced: dict[str, dict[str, Any]], runs: dict[str, list[dict[str, Any]]], unique: int) -> str:
    """Bytes a unique token: allocated at the end of each stage and at most, and the most resident memory."""
    rows = []
    for name, result in traced.items():
        kept = [f"{result[stage]['kept'] / unique:,.1f}" if stage in result else "" for stage in STAGES]
        most = max(result[stage]["peak"] for stage in STAGES if stage in result)
        resident = median(max(r[stage]["peak"] for stage in STAGES if stage in r) for r in runs[name])
        rows.append([name, *kept, f"{most / unique:,.1f}", f"{resident / unique:,.1f}"])
    return table(["bytes a unique token", *(f"after {s}" for s in STAGES), "at most", "resident, at most"], rows)


def adds_table(runs: dict[str, list[dict[str, Any]]], calls: int) -> str:
    """Median microseconds of the calls around the k-th, over all rounds."""
    places = [*(k for k in (10, 100, 200) if k < calls), calls]
    rows = []
    for name, results in runs.items():
        cells = [name]
        for k in places:
            near = slice(max(0, k - 10), k)
            cells.append(f"{1e6 * median(t for r in results for t in r['times'][near]):,.0f}")
        rows.append(cells)
    return table(["µs a call", *(f"{max(1, k - 9)}-{k}" for k in places)], rows)


def stream_table(result: dict[str, Any]) -> str:
    rows = [
        [f"{int(mark):,}", f"{at['resident'] / 2**20:,.0f}", f"{at['peak'] / 2**20:,.0f}"]
        for mark, at in result["marks"].items()
    ]
    seconds = result["seconds"]
    return (
        table(["executions", "resident MiB", "at most MiB"], rows)
        + f"\n\n{result['executions']:,} executions, {result['tokens_unique']:,} unique tokens, "
        f"{result['log_bytes'] / 2**20:,.0f} MiB of logs, {result['micro_steps']:,} micro-steps with "
        f"{result['tokens_packed']:,} tokens in {seconds:,.1f} s: {result['tokens_unique'] / seconds / 1e6:,.1f} M "
        f"tokens/s, {result['executions'] / seconds:,.1f} executions/s."
    )


def log_table(results: list[dict[str, float]]) -> str:
    at = {key: median(r[key] for r in results) for key in results[0]}
    raw, size, records = at["ids_bytes"] + at["logprob_bytes"], at["file_bytes"], at["records"]
    rows = [
        ["file", f"{size / 1e6:,.2f} MB; ids and log-probabilities alone {raw / 1e6:,.2f} MB (+{size / raw - 1:.1%})"],
        ["append", f"{1e6 * at['append'] / records:,.0f} µs a record, {size / 1e6 / at['append']:,.0f} MB/s"],
        ["append, each call synced", f"{1e6 * at['append_sync'] / (records / 2):,.0f} µs a call"],
        ["read", f"{1e3 * at['read']:,.1f} ms, {size / 1e6 / at['read']:,.0f} MB/s"],
        ["open for appending", f"{1e3 * at['reopen']:,.1f} ms"],
    ]
    return table(["log", ""], rows)


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    found = {
        "cpu": f"{model}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": platform.python_version(),
    }
    for package in ("gyre-traj", "numpy", "msgspec", "verifiers", "trl", "torch", "datasets", "pyarrow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400, help="calls of the execution")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="its unique tokens")
    parser.add_argument("--budget", type=int, default=1 << 20, help="token budget of a micro-step")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; medians are shown")
    parser.add_argument("--executions", type=int, default=1000, help="executions of the stream")
    parser.add_argument("--stream-calls", type=int, default=100, help="calls of each")
    parser.add_argument("--stream-tokens", type=int, default=100_000, help="unique tokens of each")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="peers to run")
    parser.add_argument("--scratch", help="folder for log files; default: the system's for temporary files")
    parser.add_argument("--json", action="store_true", help="print every measurement instead of tables")
    parser.add_argument("--worker", nargs=2, metavar=("PART", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        warnings.simplefilter("ignore")
        part, name = options.worker
        print(json.dumps(work(part, name, options)))
        return

    skipped = {name: missing(name) for name in options.peers if missing(name)}
    names = [name for name in options.peers if name not in skipped]
    everything: dict[str, Any] = {
        "machine": machine(),
        "skipped": skipped,
        "options": {k: v for k, v in vars(options).items() if k not in ("worker", "json")},
    }
    pipeline: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    adds: dict[str, list[dict[str, Any]]] = {name: [] for name in names if name in ADDERS}
    memory: dict[str, dict[str, Any]] = {}
    logs: list[dict[str, Any]] = []
    for turn in range(options.repeat):
        print(f"round {turn + 1} of {options.repeat}", file=sys.stderr)
        for name in names if "pipeline" in options.only else ():
            pipeline[name].append(spawn("pipeline", name))
            if not turn:
                memory[name] = spawn("memory", name)
        for name in adds if "adds" in options.only else ():
            adds[name].append(spawn("adds", name))
        if "log" in options.only:
            logs.append(spawn("log", ""))
    everything |= {"pipeline": pipeline, "memory": memory, "adds": adds, "log": logs}
    if "stream" in options.only:
        everything["stream"] = spawn("stream", "")
    if options.json:
        print(json.dumps(everything))
        return

    print("\n".join(f"{key}: {value}" for key, value in everything["machine"].items()))
    for package in sorted(set(skipped.values())):
        print(f"skipped: {', '.join(n for n, p in skipped.items() if p == package)}: no {package}; with it: {INSTALL}")
    if "pipeline" in options.only:
        turns = execution(options.calls, options.tokens)
        tree = Tree("bench")
        for call in turns:
            tree.add(record(call))
        print(
            f"\n## One execution: {len(turns)} calls, {tree.tokens_unique:,} unique tokens, {tree.trainable:,} "
            f"trainable, {len(tree.leaves)} leaves, longest call {max(call.end for call in turns):,} tokens\n"
        )
        print(pipeline_table(pipeline), memory_table(memory, pipeline, tree.tokens_unique), sep="\n\n")
        sizes = {tuple(result["size"]) for results in pipeline.values() for result in results}
        if len(sizes) > 1:
            raise SystemExit(f"the peers disagree on (leaves, targets): {sizes}; they did not do the same job")
        print(f"\n(leaves, targets) of every peer: {sizes.pop()}")
    if "adds" in options.only:
        print(f"\n## Adding the k-th call of a thread of {options.calls} calls and {options.tokens:,} tokens\n")
        print(adds_table(adds, options.calls))
    if "stream" in options.only:
        print(f"\n## Stream of executions of {options.stream_calls} calls and {options.stream_tokens:,} tokens\n")
        print(stream_table(everything["stream"]))
    if "log" in options.only:
        print("\n## Log\n")
        print(log_table(logs))


if __name__ == "__main__":
    main()
