"""One execution: budget, process tree, clean environment, and what a verifier can say or fail to say."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_agent_proxy.runner import scoring
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import HarnessError
from gyre_agent_proxy.runner.execution import fill, finish, harness, start
from gyre_agent_proxy.runner.scoring import EvaluatorFailed, Scorer, read_reward
from gyre_agent_proxy.runner.tasks import Task, load_task
from gyre_agent_proxy.runner.workspace import prepare
from gyre_traj.intake import Ending

REWARD = """
import json, os, pathlib
def reward(value):
    pathlib.Path(os.environ["LOGS_DIR"], "verifier", "reward.json").write_text(json.dumps(value))
"""


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    """make_task(verify, toml="") -> a task whose tests/verify.py is `verify`, with `reward(value)` at hand."""

    def make(verify: str, toml: str = "", script: str = "verify.py") -> Task:
        folder = tmp_path / "tasks" / "t"
        for name, text in {
            "task.toml": toml,
            "instruction.md": "Write {answer}.txt",
            "environment/given.txt": "given",
            f"tests/{script}": (REWARD + verify) if script == "verify.py" else verify,
            "tests/secret.txt": "the hidden answer",
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return load_task(folder)

    return make


async def run(tmp_path: Path, task: Task, source: str, stop_at: str = "") -> tuple[str, Path, str]:
    """Run a harness written as Python `source`; returns (why it ended, workspace, its log).

    stop_at: its budget ends when this file is in the workspace."""
    (tmp_path / "agent.py").write_text(source)
    config = RunnerConfig(
        folder=str(tmp_path), harness=("{python}", "{folder}/agent.py", "{instruction}"), env={"NOTE": "{task}!"}
    )
    instructions = tmp_path / "instructions"
    instructions.mkdir(exist_ok=True)
    (instructions / "t.md").write_text(task.instruction)
    command = harness(config, "policy", "http://127.0.0.1:9/", instructions)
    workspace, log = tmp_path / "run" / "workspaces" / "b0-g00-e0", tmp_path / "run" / "b0-g00-e0.log"
    prepare(task, workspace)
    child = await start(command, task, "b0-g00-e0", "sk-gyre-b0-g00-e0.sig", workspace, log)
    while stop_at and not (workspace / stop_at).exists():
        await asyncio.sleep(0.02)
    end = await finish(child, 0.05 if stop_at else 60.0)
    return end.why, workspace, log.read_text()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_the_environment_is_clean(
    tmp_path: Path, make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_RUNNER", "x")
    source = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], os.getcwd()]))"
    why, workspace, log = await run(tmp_path, make_task("reward(1)"), source)
    env, argv, cwd = json.loads(log)
    assert why == "exit 0"
    assert argv == ["Write {answer}.txt"]
    assert (cwd, env.pop("HOME")) == (str(workspace), str(workspace))
    assert env.pop("PATH") == os.environ["PATH"]
    assert Path(env.pop("GYRE_INSTRUCTION")).read_text() == "Write {answer}.txt"
    env.pop("LC_CTYPE", None)  # Python's own
    assert env == {
        "LANG": "C.UTF-8",
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": "sk-gyre-b0-g00-e0.sig",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_AUTH_TOKEN": "sk-gyre-b0-g00-e0.sig",
        "GYRE_MODEL": "policy",
        "GYRE_TASK": "t",
        "GYRE_EXECUTION": "b0-g00-e0",
        "NOTE": "t!",
    }


async def test_hidden_tests_are_not_in_what_the_harness_can_see(tmp_path: Path, make_task: Callable[..., Task]) -> None:
    """Nothing below the workspace, and no path it is given, holds or leads to the tests."""
    task = make_task("reward(1)")
    source = """
import os, pathlib
seen = [str(p.resolve()) for p in pathlib.Path(".").rglob("*")] + list(os.environ.values())
for text in seen:
    print(text)
for folder in {str(pathlib.Path(text).parent) for text in seen if text.startswith("/") and ":" not in text}:
    print(*(str(p) for p in pathlib.Path(folder).glob("*")), sep="\\n")
"""
    _, _, log = await run(tmp_path, task, source)
    assert "given.txt" in log
    assert str(task.folder) not in log
    assert "secret" not in log


async def test_budget_ends_the_tree_and_the_kept_workspace_is_scored(
    tmp_path: Path, make_task: Callable[..., Task]
) -> None:
    """A daemon (own session, parent gone) that the harness left is ended too; what was written is scored."""
    source = """
import os, pathlib, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("daemon.tmp").write_text(str(os.getpid()))
        os.rename("daemon.tmp", "daemon.pid")
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists("daemon.pid"):
    time.sleep(0.01)
pathlib.Path("half.txt").write_text("half")
pathlib.Path("own.tmp").write_text(str(os.getpid()))
os.rename("own.tmp", "own.pid")
time.sleep(600)
"""
    task = make_task("reward(0.5 if pathlib.Path('half.txt').read_text() == 'half' else 0)")
    why, workspace, _ = await run(tmp_path, task, source, stop_at="own.pid")
    assert why == "budget"
    assert all(gone(int((workspace / name).read_text())) for name in ("daemon.pid", "own.pid"))
    outcome = await Scorer(RunnerConfig(), tmp_path / "scoring").score(task, "e", workspace)
    assert (outcome.ending, outcome.score) == (Ending.SCORED, 0.5)
    assert (workspace / "half.txt").exists()


async def test_a_daemon_is_ended_when_the_harness_exits(tmp_path: Path, make_task: Callable[..., Task]) -> None:
    source = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid)
sys.exit(3)
"""
    why, _, log = await run(tmp_path, make_task("reward(1)"), source)
    assert why == "exit 3"
    assert gone(int(log))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "work.txt").write_text("7")
    return folder


async def test_a_partial_score(tmp_path: Path, make_task: Callable[..., Task], workspace: Path) -> None:
    """The verifier sees a copy, its tests and nothing of the runner; what it changes does not reach the workspace."""
    task = make_task("""
assert pathlib.Path.cwd() == pathlib.Path(os.environ["WORKSPACE"])
assert pathlib.Path(os.environ["TESTS_DIR"], "secret.txt").read_text() == "the hidden answer"
assert "OPENAI_API_KEY" not in os.environ
pathlib.Path("work.txt").write_text("spoilt")
reward({"reward": 0.75, "passed": 3})
""")
    outcome = await Scorer(RunnerConfig(), tmp_path / "scoring").score(task, "e", workspace)
    assert (outcome.ending, outcome.score, outcome.detail) == (Ending.SCORED, 0.75, '{"passed": 3}')
    assert (workspace / "work.txt").read_text() == "7"
    assert list((tmp_path / "scoring").iterdir()) == []


async def test_a_shell_verifier(tmp_path: Path, make_task: Callable[..., Task], workspace: Path) -> None:
    task = make_task('test "$(cat work.txt)" = 7 && echo 1 > "$LOGS_DIR/verifier/reward.txt"', script="test.sh")
    outcome = await Scorer(RunnerConfig(), tmp_path / "scoring").score(task, "e", workspace)
    assert (outcome.ending, outcome.score) == (Ending.SCORED, 1.0)


async def test_a_failing_evaluator_is_tried_again(
    tmp_path: Path, make_task: Callable[..., Task], workspace: Path
) -> None:
    count = tmp_path / "count"
    count.write_text("0")
    task = make_task(f"""
count = pathlib.Path({str(count)!r})
n = int(count.read_text()) + 1
count.write_text(str(n))
if n < 3:
    raise SystemExit("the database is away")
reward(0.25)
""")
    scorer = Scorer(RunnerConfig(evaluator_attempts=3), tmp_path / "scoring")
    outcome = await scorer.score(task, "e", workspace)
    assert (outcome.ending, outcome.score, scorer.failures) == (Ending.SCORED, 0.25, 2)


@pytest.mark.parametrize(
    ("verify", "says"),
    [
        ("raise RuntimeError('broken')", "exit code 1"),
        ("pass", "neither reward.json nor reward.txt"),
        ("reward(float('nan'))", "reward.json holds"),
        ("reward(1.5)", "expected a number in [0, 1]"),
        ("import time; time.sleep(600)", "did not end in 1 s"),
        ("import ctypes; ctypes.string_at(0)", "exit code 139"),
        ("bytearray(3 << 30)", "MemoryError"),
    ],
)
async def test_no_score_is_not_a_score_of_zero(
    tmp_path: Path, make_task: Callable[..., Task], workspace: Path, verify: str, says: str
) -> None:
    config = RunnerConfig(evaluator_attempts=2, evaluator_timeout=20, evaluator_memory_mb=2048)
    task = make_task(verify, toml="[verifier]\ntimeout_sec = 1\n" if "sleep" in verify else "")
    scorer = Scorer(config, tmp_path / "scoring")
    outcome = await scorer.score(task, "e", workspace)
    assert (outcome.ending, outcome.score, scorer.failures) == (Ending.EVALUATOR_FAILED, None, 2)
    assert says in outcome.detail
    assert "attempt 2 of 2" in outcome.detail


async def test_nothing_to_score(tmp_path: Path, make_task: Callable[..., Task]) -> None:
    """An untouched workspace is not shown to the verifier; files the task asks for decide when it names them."""
    scorer = Scorer(RunnerConfig(), tmp_path / "scoring")
    task = make_task("reward(1)")
    prepare(task, tmp_path / "w")
    outcome = await scorer.score(task, "e", tmp_path / "w")
    assert (outcome.ending, outcome.score) == (Ending.NOTHING_TO_SCORE, None)
    (tmp_path / "w" / "notes.txt").write_text("I could not do it")
    named = make_task("reward(1)", toml='[metadata]\nartifacts = ["answer.py"]\n')
    assert (await scorer.score(named, "e", tmp_path / "w")).detail == "no file matches answer.py"
    assert (await scorer.score(task, "e", tmp_path / "w")).ending is Ending.SCORED


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"reward.json": "0.5"}, (0.5, "")),
        ({"reward.json": '{"reward": 1, "lint": 0.2}'}, (1.0, '{"lint": 0.2}')),
        ({"reward.json": '{"accuracy": 0.25}'}, (0.25, "")),
        ({"reward.json": "0.5", "reward.txt": "0.1"}, (0.5, "")),
        ({"reward.txt": " 0.125\n"}, (0.125, "")),
        ({"reward.json": '{"a": 0.1, "b": 0.2}'}, "expected 'reward' or a single one"),
        ({"reward.json": "true"}, "says True"),
        ({"reward.json": '{"reward": "1"}'}, "says '1'"),
        ({"reward.json": "0.5 and more"}, "reward.json holds"),
        ({"reward.txt": "inf"}, "says inf"),
        ({"reward.txt": "nan"}, "says nan"),
        ({"reward.txt": "-0.1"}, "says -0.1"),
        ({"reward.txt": ""}, "reward.txt holds"),
        ({}, "neither"),
    ],
)
def test_reward_files(tmp_path: Path, files: dict[str, str], expected: tuple[float, str] | str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if isinstance(expected, str):
        with pytest.raises(EvaluatorFailed) as e:
            read_reward(tmp_path)
        assert expected in str(e.value)
    else:
        assert read_reward(tmp_path) == expected


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ((), "runner.harness is empty"),
        (("no-such-agent", "-p", "{instruction}"), "'no-such-agent' is not on PATH"),
        (("{python}", "{folder}/missing.py"), "there is no"),
    ],
)
def test_a_harness_that_cannot_start_is_noticed_first(tmp_path: Path, command: tuple[str, ...], says: str) -> None:
    with pytest.raises(HarnessError) as e:
        harness(RunnerConfig(harness=command, folder=str(tmp_path)), "policy", "http://h", tmp_path)
    assert says in str(e.value)


async def test_exit_code_127_of_the_harness_itself_is_its_own(tmp_path: Path, make_task: Callable[..., Task]) -> None:
    why, _, _ = await run(tmp_path, make_task("reward(1)"), "raise SystemExit(127)")
    assert why == "exit 127"


async def test_a_program_that_cannot_be_executed(tmp_path: Path, make_task: Callable[..., Task]) -> None:
    """Found by name, but its interpreter does not exist: noticed when it is started."""
    program = tmp_path / "agent"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    task = make_task("reward(1)")
    command = harness(RunnerConfig(harness=("{folder}/agent",), folder=str(tmp_path)), "m", "http://h", tmp_path)
    prepare(task, tmp_path / "w")
    child = await start(command, task, "e", "key", tmp_path / "w", tmp_path / "log")
    with pytest.raises(HarnessError, match=r"(?s)cannot be executed.*guard: cannot start"):
        await finish(child, 30.0)


def test_placeholders_are_filled_once_and_other_braces_stay() -> None:
    values = {"python": sys.executable, "instruction": "use {key}", "key": "k"}
    assert fill('{"a": "{key}"} {instruction} {unknown} {', values) == '{"a": "k"} use {key} {unknown} {'


async def test_a_workspace_that_is_too_large_is_not_tried_again(
    tmp_path: Path, make_task: Callable[..., Task], workspace: Path
) -> None:
    with (workspace / "large").open("wb") as f:
        f.truncate(2 << 20)
    scorer = Scorer(RunnerConfig(workspace_limit_mb=1), tmp_path / "scoring")
    outcome = await scorer.score(make_task("reward(1)"), "e", workspace)
    assert (outcome.ending, scorer.failures) == (Ending.EVALUATOR_FAILED, 1)
    assert "raise runner.workspace_limit_mb" in outcome.detail


async def test_work_that_is_locked_away_is_scored(
    tmp_path: Path, make_task: Callable[..., Task], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness that makes its files unreadable gets no other try, nor are they left out."""
    (workspace / "deep").mkdir()
    (workspace / "deep" / "secret.txt").write_text("7")
    (workspace / "deep" / "secret.txt").chmod(0)
    (workspace / "deep").chmod(0)
    (workspace / "work.txt").unlink()
    real = shutil.copy2

    def copy2(source: Path, target: Path) -> None:  # for a test that root runs, whom nothing stops
        if not source.stat().st_mode & stat.S_IRUSR:
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        real(source, target)

    monkeypatch.setattr(shutil, "copy2", copy2)
    task = make_task("reward(float(sorted(pathlib.Path('deep').iterdir()) == [pathlib.Path('deep/secret.txt')]))")
    outcome = await Scorer(RunnerConfig(), tmp_path / "scoring").score(task, "e", workspace)
    assert (outcome.ending, outcome.score) == (Ending.SCORED, 1.0), outcome.detail


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), shutil.Error([("a", "b", os.strerror(errno.ENOSPC))])]
)
async def test_a_full_disk_is_not_the_evaluator_s_failure(
    tmp_path: Path, make_task: Callable[..., Task], workspace: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """It ends the run with a clear error (test_runner_service.py), and no execution loses its result."""

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(scoring, "copy", full)
    with pytest.raises(type(error)):
        await Scorer(RunnerConfig(), tmp_path / "scoring").score(make_task("reward(1)"), "e", workspace)
    assert not any((tmp_path / "scoring").glob("*"))


def test_a_reward_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "reward.json").write_text("1")
    (tmp_path / "verifier").symlink_to("other")
    with pytest.raises(EvaluatorFailed, match="is a link"):
        read_reward(tmp_path / "verifier")


@pytest.mark.parametrize("kind", ["fifo", "link", "dangling", "folder"])
def test_a_reward_that_is_no_regular_file_is_no_reward(tmp_path: Path, kind: str) -> None:
    reward = tmp_path / "reward.txt"
    (tmp_path / "other").write_text("1")
    if kind == "fifo":
        os.mkfifo(reward)
    elif kind == "folder":
        reward.mkdir()
    else:
        reward.symlink_to("other" if kind == "link" else "nowhere")
    with pytest.raises(EvaluatorFailed, match=r"no regular file|cannot be read"):
        read_reward(tmp_path)
