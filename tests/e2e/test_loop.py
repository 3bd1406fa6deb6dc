"""The whole loop on a 2-layer random Qwen3: real SGLang engines, a real Megatron replica a cell, real agent runs.

One run of four steps in two bursts; every test looks at what it left.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from gyre_agent_proxy.runner.ledger import Ledger
from gyre_launch import summary as summaries
from gyre_sched.cli import main as sched
from gyre_sched.journal import read_journal
from gyre_traj.log import Log, read_log
from gyre_traj.records import unpack_ids, unpack_logprobs
from gyre_traj.tree import Tree
from gyre_transport.run import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.megatron, pytest.mark.timeout(1200)]

HARNESS = Path(__file__).with_name("harness.py")
VERIFIER = """
import json, os, pathlib
text = pathlib.Path("answer.txt").read_text()
share = sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))
pathlib.Path(os.environ["LOGS_DIR"], "verifier", "reward.json").write_text(json.dumps(share))
"""
STEPS, GROUPS, SIZE, PER_BURST = 4, 2, 4, 2


def write_tasks(folder: Path) -> None:
    for name in ("quick", "patient"):
        (folder / name / "tests").mkdir(parents=True)
        (folder / name / "task.toml").write_text('[metadata]\nartifacts = ["answer.txt"]\n')
        (folder / name / "instruction.md").write_text(f"hello world, be {name}")
        (folder / name / "tests" / "verify.py").write_text(VERIFIER)


def write_config(folder: Path, model: Path) -> Path:
    config = folder / "run.toml"
    config.write_text(f"""
[run]
dir = "{folder / "run"}"
steps = {STEPS}
[model]
source = "{model}"
[batch]
groups = {GROUPS}
group_size = {SIZE}
per_burst = {PER_BURST}
[sched]
capacity = {GROUPS * SIZE}
[engine]
context_length = 1024
max_running = 16
incremental = false  # so that the engines' own logs hold whole answers, and can be the witness
args = ["--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"]
[proxy]
kv_wait = 60  # the machine may be busy
[feed]
tokens = 128
[train]
dtype = "bf16"
checkpoint_every = 2
optimizer = {{ lr = 1e-3 }}
[runner]
tasks = "tasks"
harness = ["{{python}}", "{HARNESS}", "{{instruction_file}}"]
env = {{ MODEL = "{{model}}" }}
budget = 300
""")
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunDir:
    folder = tmp_path_factory.mktemp("loop")
    write_tasks(folder / "tasks")
    config = write_config(folder, tiny_model)
    with (folder / "out").open("w+") as out:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "gyre_launch.cli", "run", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        )
        try:
            kill_scheduler(launcher, RunDir(folder / "run"))
            code = launcher.wait(timeout=1100)
        finally:
            launcher.kill()
        out.seek(0)
        assert code == 0, out.read()[-12_000:]
    return RunDir(folder / "run")


def kill_scheduler(launcher: subprocess.Popen, run: RunDir) -> None:
    """As soon as the core trains while executions go on."""
    while launcher.poll() is None:
        if run.journal.is_file() and any(e.kind == "entered" for e in read_journal(run.journal).events):
            for child in psutil.Process(launcher.pid).children():
                if child.cmdline()[-4:-2] == ["gyre_sched.cli", "serve"]:
                    child.kill()
                    return
        time.sleep(0.2)


@pytest.fixture(scope="module")
def summary(run: RunDir) -> dict:
    return json.loads(run.summary.read_text())


@pytest.fixture(scope="module")
def logs(run: RunDir) -> list[Log]:
    return [read_log(path) for path in sorted(run.calls.glob("*.gtraj"))]


def test_every_execution_ends_once(summary: dict, run: RunDir) -> None:
    executions = summary["run"]["executions"]
    assert executions["dispatched"] == STEPS * GROUPS * SIZE
    assert executions["trained"] + executions["placeholder"] + executions["excluded"] == executions["dispatched"]
    assert executions["without_fate"] == 0
    assert executions["excluded"] == 0, executions["excluded_reasons"]
    by_step = Counter(row.trained_step for row in Ledger(run.ledger).rows())
    assert by_step == dict.fromkeys(range(1, STEPS + 1), GROUPS * SIZE)


def test_the_scheduler_was_killed_and_another_went_on(run: RunDir) -> None:
    started = [e.numbers["term"] for e in read_journal(run.journal).events if e.kind == "scheduler_started"]
    assert started == [1, 2]


def test_the_journal_is_replayed_under_its_own_rules_and_others(run: RunDir, capsys: pytest.CaptureFixture) -> None:
    def replayed(*overrides: str) -> dict:
        changes = [word for override in overrides for word in ("--set", override)]
        assert sched(["replay", str(run.journal), "--json", *changes]) == 0
        return json.loads(capsys.readouterr().out)

    assert replayed("sched.leave=water")["differences"] == []
    kept = replayed("sched.core_stays=false", "sched.dwell=1e6")  # nobody leaves rollout
    assert {d["recorded"]["kind"] for d in kept["differences"] if d["changed"] is None} >= {"transfer"}


def test_the_report_is_the_runs_page(run: RunDir) -> None:
    assert "burst_granted" in run.report.read_text()


def test_no_call_failed_and_some_moved(summary: dict, logs: list[Log]) -> None:
    assert summary["run"]["calls_failed"] == 0
    assert summary["run"]["calls"] == sum(len(log.calls) for log in logs) > STEPS * GROUPS * SIZE * 5
    assert any(len(call.attempts) > 1 for log in logs for call in log.calls)
    assert summary["run"]["calls_moved"] > 0


def test_kv_pages_went_with_the_requests_that_moved(summary: dict, logs: list[Log]) -> None:
    kv = summary["kv"]
    assert kv["requests"] >= summary["run"]["calls_moved"] > 0
    assert kv["moves_failed"] == 0, kv
    assert kv["pages"]["fetched"] > 0
    assert kv["pages"]["leases_expired"] == 0
    lost = 17  # tokens of a context that never move: up to a page, and the last one
    assert kv["recomputed"] <= lost * kv["requests"]
    assert kv["recomputed"] < kv["recomputed_without_moves"]
    moved = [attempt for log in logs for call in log.calls for attempt in call.attempts[1:]]
    assert all(attempt.cached is not None for attempt in moved)


def test_both_cells_train_and_weights_advance(summary: dict) -> None:
    steps = summary["steps"]
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert any(len([n for n in s["micro_steps"].values() if n]) == 2 for s in steps)
    assert all(s["tokens_unique"] < s["tokens_total"] for s in steps)
    assert summary["run"]["weight_versions"] == list(range(STEPS + 1))
    assert all(s["grad_norm"] > 0 for s in steps)


def test_engines_served_the_weights_of_their_burst(logs: list[Log]) -> None:
    served = {span.version for log in logs for call in log.calls for span in call.versions}
    assert served == {0, PER_BURST}


def test_every_transfer_obeyed_the_water_level(run: RunDir) -> None:
    transfers = [e for e in read_journal(run.journal).events if e.kind == "transfer"]
    assert {e.cell for e in transfers} == {0, 1}
    for e in transfers:
        assert e.numbers["w"] <= e.numbers["C_R"] - e.numbers["C_e"], e


def test_ids_sent_are_ids_recorded_and_children_extend_their_parents(logs: list[Log]) -> None:
    children = 0
    for log in logs:
        for call in log.calls:
            output, logprobs = unpack_ids(call.output), unpack_logprobs(call.logprobs)
            assert len(output) == len(logprobs) > 0
            assert sum(a.tokens for a in call.attempts) == len(output)
            assert call.versions[0].start == 0
            assert call.versions[-1].end == len(output)
            if call.parent is not None:
                children += 1
                parent = log.full_ids(call.parent)
                assert (log.full_prompt(call.call)[: len(parent)] == parent).all()
        tree = Tree.from_log(log)
        assert len(tree.leaves) >= 3  # the summary's turn, the reviewer, the turn after the compaction
    assert children == len(logs) * 2  # the second turn and the summary


def engine_records(run: RunDir) -> dict[str, dict]:
    """What the engines themselves logged, by request id: the ids they were sent and the ids they sampled."""
    records: dict[str, dict] = {}
    for path in run.logs.glob("engine-*.log"):
        for line in path.read_text().split("\n"):  # what a model samples may hold any other line break
            if '"request.received"' in line or '"request.finished"' in line:
                event = json.loads(line[line.index("{") :])
                records.setdefault(event["rid"], {}).update(event)
    return records


def test_ids_recorded_are_the_ids_the_engines_saw(run: RunDir, logs: list[Log]) -> None:
    witnessed = engine_records(run)
    checked = 0
    for log in logs:
        for call in log.calls:
            sent = log.full_prompt(call.call).tolist()
            output = unpack_ids(call.output).tolist()
            for attempt in call.attempts:
                if attempt.rid not in witnessed:
                    assert attempt.tokens == 0, attempt
                    continue
                seen = witnessed[attempt.rid]
                assert seen["obj"]["input_ids"] == sent
                got, output = output[: attempt.tokens], output[attempt.tokens :]
                assert seen["out"]["output_ids"][: len(got)] == got
                sent = sent + got
                checked += 1
            assert output == []
    assert checked >= sum(len(log.calls) for log in logs)


def test_the_policy_loads_and_has_moved(run: RunDir, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run.policy).state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_summary_can_be_made_again(run: RunDir, summary: dict) -> None:
    assert summaries.build(run) == summary
    assert summary["cells"]
    assert "role changes" in summaries.text(summary)


def test_nothing_is_left_behind(run: RunDir) -> None:
    marker = str(run.path)
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marker in command:
                left.append(command)
    assert not left
