"""The same executions under three schedules, on real cells: Colocate, Async and elastic; and as the simulator has them.

Each is a run of its own: two cells with a real SGLang engine and a real Megatron replica each, a model of four layers,
96 scripted executions (turns and tool times follow from their place in the run, so they are the same in every run).
Told from the journals: wall time, what cells did, how long switches took. The simulator is calibrated on the Colocate
run alone (its calls, the pace of its engines and trainers, its switches), so what it says of the others is foretold.

    python benchmarks/schedules.py [--steps 6] [--keep FOLDER] [--json]

With --keep, runs that are there already are only told of.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from gyre_sched.journal import read_journal
from gyre_sched.protocol import Event
from gyre_sched.simulate.run import run as simulate
from gyre_sched.simulate.scenario import Fleet, Length, Scenario, Switch, Training, Workload
from gyre_sched.simulate.schedules import SCHEDULES as SIMULATED
from gyre_sched.simulate.schedules import Schedule
from gyre_sched.simulate.trace import load_trace
from gyre_traj import read_log
from gyre_transport.run import RunDir

CELLS, CAPACITY, GROUPS, SIZE = 2, 8, 4, 4
# settings of [sched], batches a burst, and the same for the simulator
SCHEDULES: dict[str, tuple[str, int, Schedule]] = {
    "colocate": ('schedule = "colocate"', 1, SIMULATED["colocate"]),
    "async": ('schedule = "async"\ntrainers = 1', 1, Schedule(says="Async", settings={"schedule": "async"})),
    "elastic": ("core_stays = false", 2, SIMULATED["elastic-2"]),
}
SEEDS = 8  # simulations of each schedule
SHARES = ("sampling", "idle slots", "training", "idle trainers", "switching")
HARNESS = """
import json, os, pathlib, random, re, sys, time, urllib.request
burst, group, member = map(int, re.match(r"b(\\d+)-g(\\d+)-e(\\d+)", os.environ["GYRE_EXECUTION"]).groups())
dice = random.Random(f"{burst * int(sys.argv[2]) + group}-{member}")
turns = 1 + int(min(8, dice.paretovariate(1.1)))
history = [{"role": "user", "content": pathlib.Path(sys.argv[1]).read_text()}]
for turn in range(turns):
    body = {"model": os.environ["MODEL"], "messages": history, "max_tokens": dice.randint(32, 64), "temperature": 1.0}
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)
    text = json.load(urllib.request.urlopen(asked, timeout=600))["choices"][0]["message"]["content"] or ""
    result = " ".join(dice.choices(["return", "number", "function", "is_even", "answer", "result", "python"], k=70))
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}: {result}"}]
    time.sleep(min(6.0, dice.lognormvariate(0.0, 0.8)))
pathlib.Path("answer.txt").write_text(text)
"""
VERIFIER = """
import json, os, pathlib
text = pathlib.Path("answer.txt").read_text()
share = sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))
pathlib.Path(os.environ["LOGS_DIR"], "verifier", "reward.json").write_text(json.dumps(share))
"""


def write(folder: Path, model: Path, schedule: str, steps: int) -> Path:
    """A run's config, tasks and harness."""
    settings, per_burst, _ = SCHEDULES[schedule]
    folder.mkdir(parents=True)
    for n in range(GROUPS):
        task = folder / "tasks" / f"t{n}"
        (task / "tests").mkdir(parents=True)
        (task / "task.toml").write_text('[metadata]\nartifacts = ["answer.txt"]\n')
        (task / "instruction.md").write_text(f"hello world {n}")
        (task / "tests" / "verify.py").write_text(VERIFIER)
    (folder / "harness.py").write_text(HARNESS)
    config = folder / "run.toml"
    config.write_text(f"""
[run]
dir = "{folder / "run"}"
steps = {steps}
[model]
source = "{model}"
[batch]
groups = {GROUPS}
group_size = {SIZE}
per_burst = {per_burst}
[sched]
cells = {CELLS}
capacity = {CAPACITY}
{settings}
[engine]
context_length = 4096
max_tokens = 32768
max_running = {CAPACITY}
[feed]
tokens = 512
[train]
optimizer = {{ lr = 1e-4 }}
[runner]
tasks = "tasks"
harness = ["{{python}}", "{folder / "harness.py"}", "{{instruction_file}}", "{GROUPS * per_burst}"]
env = {{ MODEL = "{{model}}" }}
budget = 600
sandbox = "none"
""")
    return config


def run(config: Path) -> None:
    """`gyre run`; its output beside the config."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    with config.with_name("out").open("w") as out:
        command = [sys.executable, "-m", "gyre_launch.cli", "run", str(config)]
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        sys.exit(f"the run of {config} ended with {code}: {config.with_name('out').read_text()[-2000:]}")


def spans(events: list[Event], end: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """(seconds, what held meanwhile) from event to event, from the first burst on."""
    now: dict[str, Any] = {"roles": {}, "running": 0, "work": False}
    begun = None
    for i, event in enumerate(events):
        n = event.numbers
        if event.kind == "role":
            now["roles"][event.cell] = n["to"]
        elif event.kind == "backlog":
            now["work"] = bool(n["micro_steps_left"] or n["open_batch"] is not None)
        elif event.kind == "burst_granted":
            begun = event.at if begun is None else begun
        elif event.kind in ("started", "terminated"):
            now["running"] += 1 if event.kind == "started" else -1
        until = min(events[i + 1].at if i + 1 < len(events) else end, end)
        if begun is not None and until > event.at:
            yield until - event.at, now


def told(journal: Path) -> dict[str, float]:
    """What a journal says of a run, from its first burst until its last weights: seconds, shares of the cells' time."""
    events = list(read_journal(journal).events)
    begun = next(e.at for e in events if e.kind == "burst_granted")
    end = max(e.at for e in events if e.kind == "published")
    spent = dict.fromkeys(SHARES, 0.0)
    for seconds, now in spans(events, end):
        rollout = sum(role == "rollout" for role in now["roles"].values())
        busy = min(rollout, now["running"] / CAPACITY)
        training = sum(role == "training" for role in now["roles"].values())
        spent["sampling"] += seconds * busy
        spent["idle slots"] += seconds * (rollout - busy)
        spent["training" if now["work"] else "idle trainers"] += seconds * training
        spent["switching"] += seconds * (CELLS - rollout - training)
    total = (end - begun) * CELLS
    return {"wall": end - begun, **{name: seconds / total for name, seconds in spent.items()}}


def switches(journal: Path) -> dict[str, list[float]]:
    """Seconds of every passage of a cell, by the role it passed through."""
    found: dict[str, list[float]] = {"draining": [], "entering": [], "leaving": [], "refreshing": []}
    for e in read_journal(journal).events:
        if e.kind == "role" and e.numbers["from"] in found:
            found[str(e.numbers["from"])].append(float(e.numbers["seconds"] or 0))
    return found


def pace(calls: Path) -> tuple[float, float]:
    """Milliseconds of a decode step: this, and this for every request at the engine; fitted to the calls."""
    made = [
        (a.engine, c.started, c.ended, a.tokens)
        for path in calls.glob("*.gtraj")
        for c in read_log(path).calls
        for a in c.attempts[:1]
        if len(c.attempts) == 1 and a.tokens
    ]
    rows, took = [], []
    for engine, started, ended, tokens in made:
        beside = sum(max(0.0, min(e, ended) - max(s, started)) for n, s, e, _ in made if n == engine)
        rows.append([tokens, tokens * beside / (ended - started)])  # beside: itself included
        took.append(ended - started)
    (base, request), *_ = np.linalg.lstsq(np.array(rows), np.array(took), rcond=None)
    return max(0.1, float(base) * 1e3), max(0.0, float(request) * 1e3)


def calibrated(directory: RunDir, steps: int) -> Scenario:
    """The simulator's scenario of a Colocate run."""
    seen, passed = told(directory.journal), switches(directory.journal)
    trained = [json.loads(line) for line in (directory.metrics / "steps.jsonl").read_text().splitlines()]
    base, request = pace(directory.calls)
    return Scenario(
        workload=Workload(
            trace=str(directory.calls), alike=0, groups=GROUPS, group_size=SIZE, score_seconds=1, merge=1
        ),
        fleet=Fleet(
            cells=CELLS,
            slots=CAPACITY,
            context=4096,
            kv_tokens=32768,
            prefill=5000,
            step_ms=base,
            step_ms_request=request,
            step_ms_kilotoken=0,
        ),
        training=Training(
            rate=sum(s["tokens_unique"] for s in trained) / (seen["training"] * seen["wall"] * CELLS),
            micro_step=512,
            optimizer=fmean(s["optimizer_seconds"] for s in trained),
            publish=0.2,
            join=0.2,
        ),
        switch=Switch(
            drain=median(passed["draining"]),
            enter=median(passed["entering"]),
            leave=median(passed["leaving"]),
            refresh=median(passed["refreshing"]),
            move_seconds=0.1,
        ),
        length=Length(steps=steps, warmup=0),
    )


def foretold(scenario: Scenario, schedule: str) -> dict[str, float]:
    """What the simulator says of `schedule`: the mean over seeds, in the terms of `told`."""
    runs = load_trace(scenario.workload.trace)
    made = []
    for seed in range(SEEDS):
        length = Length(steps=scenario.length.steps, warmup=0, seed=seed)
        r = simulate(
            Scenario(
                workload=scenario.workload,
                fleet=scenario.fleet,
                training=scenario.training,
                switch=scenario.switch,
                length=length,
            ),
            runs,
            SCHEDULES[schedule][2],
        )
        shares = (r.sampling, r.sampling_idle, r.training, r.training_idle, r.switching)
        made.append((r.step_seconds * r.steps, *shares))
    return dict(zip(("wall", *SHARES), map(fmean, zip(*made, strict=True)), strict=True))


def make_model(folder: Path) -> Path:
    """Four random layers, with the tests' tokenizer: training costs as much time as sampling does, not more."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = Path(__file__).parents[1] / "tests" / "conftest.py"
    spec = importlib.util.spec_from_file_location("gyre_test_parts", path)
    assert spec is not None
    assert spec.loader is not None
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)
    folder.mkdir(parents=True)
    parts.make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=parts.VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    names = ["wall", *SHARES]
    lines = [f"| | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for title, row in rows.items():
        told_so = " | ".join(f"{row[n]:.0f} s" if n == "wall" else f"{row[n]:.0%}" for n in names)
        lines.append(f"| {title} | {told_so} |")
    return "\n".join(lines)


def main() -> None:
    """Run all, print what was measured beside what is simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=6, help="optimizer steps, 16 executions each; default: %(default)s"
    )
    parser.add_argument("--keep", type=Path, help="where the runs stay; default: nowhere")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-") as scratch:
        folder = (arguments.keep or Path(scratch)).resolve()
        model = folder / "model"
        if not model.exists():
            make_model(model)
        for schedule in SCHEDULES:
            if not (folder / schedule / "run" / "summary.json").exists():
                print(f"{schedule}: running", file=sys.stderr)
                run(write(folder / schedule, model, schedule, arguments.steps))
        runs = {schedule: RunDir(folder / schedule / "run") for schedule in SCHEDULES}
        rows: dict[str, dict[str, float]] = {}
        scenario = calibrated(runs["colocate"], arguments.steps)
        for schedule, directory in runs.items():
            rows[schedule] = told(directory.journal)
            rows[f"{schedule}, simulated"] = foretold(scenario, schedule)
        passed = {schedule: switches(directory.journal) for schedule, directory in runs.items()}
    if arguments.json:
        print(json.dumps({"rows": rows, "switches": passed}, indent=2))
        return
    print(table(rows))
    print("\n| switch | times | median | longest |\n| --- | --- | --- | --- |")
    for role in ("draining", "entering", "leaving", "refreshing"):
        seconds = [s for found in passed.values() for s in found[role]]
        print(f"| {role} | {len(seconds)} | {median(seconds):.2f} s | {max(seconds):.2f} s |")


if __name__ == "__main__":
    main()
