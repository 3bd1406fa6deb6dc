"""The same executions under three schedules, on real cells: Colocate, Async and elastic.

Each is a run of its own: two cells with a real SGLang engine and a real Megatron replica each, a model of two layers,
96 scripted executions whose turns and tool times follow from their names, so that they are the same in every run. Told
from the journals: wall time, what cells and slots did, how long switches took.

    python benchmarks/schedules.py [--steps 6] [--keep FOLDER] [--json]
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
from typing import Any

from gyre_sched.journal import read_journal
from gyre_sched.protocol import Event
from gyre_transport.run import RunDir

CELLS, CAPACITY, GROUPS, SIZE = 2, 16, 4, 4
SCHEDULES = {
    "colocate": 'schedule = "colocate"',
    "async": 'schedule = "async"\ntrainers = 1',
    "elastic": "",
}
HARNESS = """
import json, math, os, pathlib, random, sys, time, urllib.request
dice = random.Random(pathlib.Path.cwd().name)
turns = 2 + int(min(10, dice.paretovariate(1.1)))
history = [{"role": "user", "content": pathlib.Path(sys.argv[1]).read_text()}]
for turn in range(turns):
    body = {"model": os.environ["MODEL"], "messages": history, "max_tokens": dice.randint(24, 64), "temperature": 1.0}
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)
    text = json.load(urllib.request.urlopen(asked, timeout=600))["choices"][0]["message"]["content"] or ""
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"result {turn}"}]
    time.sleep(min(8.0, dice.lognormvariate(0.3, 0.8)))
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
per_burst = 2
[sched]
cells = {CELLS}
capacity = {CAPACITY}
{SCHEDULES[schedule]}
[engine]
context_length = 2048
max_running = {CAPACITY}
[feed]
tokens = 256
[train]
optimizer = {{ lr = 1e-4 }}
[runner]
tasks = "tasks"
harness = ["{{python}}", "{folder / "harness.py"}", "{{instruction_file}}"]
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
    now: dict[str, Any] = {"roles": {}, "running": 0, "water": 0, "work": False}
    begun = None
    for i, event in enumerate(events):
        n = event.numbers
        if event.kind == "role":
            now["roles"][event.cell] = n["to"]
        elif event.kind == "backlog":
            now["work"] = bool(n["micro_steps_left"] or n["open_batch"] is not None)
        elif event.kind == "burst_granted":
            begun = event.at if begun is None else begun
            now["water"] = n["w"]
        elif event.kind in ("started", "terminated"):
            now["running"] += 1 if event.kind == "started" else -1
            now["water"] = n.get("w", now["water"])
        until = min(events[i + 1].at if i + 1 < len(events) else end, end)
        if begun is not None and until > event.at:
            yield until - event.at, now


def told(journal: Path) -> dict[str, float]:
    """What a journal says of a run, from its first burst until its last weights."""
    events = list(read_journal(journal).events)
    begun = next(e.at for e in events if e.kind == "burst_granted")
    end = max(e.at for e in events if e.kind == "published")
    cell, slot_free, slots = {"sampling": 0.0, "training": 0.0, "idle": 0.0, "between": 0.0}, 0.0, 0.0
    for seconds, now in spans(events, end):
        rollout = sum(role == "rollout" for role in now["roles"].values())
        slots += seconds * rollout * CAPACITY
        slot_free += seconds * max(0, rollout * CAPACITY - now["running"])
        for role in now["roles"].values():
            if role == "rollout":
                cell["sampling" if now["running"] else "idle"] += seconds
            elif role == "training":
                cell["training" if now["work"] else "idle"] += seconds
            else:
                cell["between"] += seconds
    total = sum(cell.values())
    entered = [float(e.numbers["seconds"] or 0) for e in events if e.kind == "entered"]
    back = [
        float(e.numbers["seconds"] or 0)
        for e in events
        if e.kind == "role"
        and e.numbers["from"] in ("leaving", "refreshing")
        and e.numbers["to"] in ("refreshing", "rollout")
    ]
    returns = sum(e.kind == "role" and e.numbers["from"] == "refreshing" for e in events)
    return {
        "wall": end - begun,
        **{name: seconds / total for name, seconds in cell.items()},
        "free slots": slot_free / slots,
        "transfers": float(sum(e.kind == "transfer" for e in events)),
        "to training": sum(entered) / len(entered) if entered else 0.0,
        "to rollout": sum(back) / returns if returns else 0.0,
    }


def tiny_model(folder: Path) -> Path:
    """The tests' model: two layers, random."""
    path = Path(__file__).parents[1] / "tests" / "conftest.py"
    spec = importlib.util.spec_from_file_location("gyre_test_parts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Path = module.make_model(folder / "tiny")
    return made


def main() -> None:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps, 16 executions each")
    parser.add_argument("--only", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--keep", type=Path, help="where the runs stay; default: nowhere")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = tiny_model(folder)
        found = {}
        for schedule in arguments.only:
            config = write(folder / schedule, model, schedule, arguments.steps)
            print(f"{schedule}: running", file=sys.stderr)
            run(config)
            found[schedule] = told(RunDir(folder / schedule / "run").journal)
            print(f"{schedule}: {found[schedule]['wall']:.0f} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    names = list(next(iter(found.values())))
    print("".join(name.rjust(13) for name in ["", *names]))
    for schedule, row in found.items():
        cells = [
            f"{v:.1f}" if n in ("wall", "transfers", "to training", "to rollout") else f"{v:.1%}"
            for n, v in row.items()
        ]
        print("".join(text.rjust(13) for text in [schedule, *cells]))


if __name__ == "__main__":
    main()
