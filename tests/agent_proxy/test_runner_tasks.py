"""Task folders: what is read, and the one clear error for each thing that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_agent_proxy.runner import dispatch
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import TaskError
from gyre_agent_proxy.runner.tasks import Machine, load_task, load_tasks
from gyre_agent_proxy.runner.workspace import WorkspaceTooLarge, copy, prepare, produced
from gyre_transport.config import section
from gyre_transport.errors import ConfigError
from gyre_transport.run import BatchConfig


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


GOOD = {"task.toml": "", "instruction.md": "Do it.\n", "tests/verify.py": "", "environment/seed.txt": "seed"}


def test_reads_the_folder(tmp_path: Path) -> None:
    toml = "[agent]\ntimeout_sec = 9\n[verifier]\ntimeout_sec = 3.5\n[other]\nx = 1\n"
    toml += '[metadata]\nlevel = 2\nartifacts = ["*.py"]\n'
    write(tmp_path / "b", {**GOOD, "task.toml": toml})
    write(tmp_path / "a", {**GOOD, "tests/test.sh": "true"})
    a, b = load_tasks(tmp_path)
    assert (a.name, a.verifier, a.agent_timeout, a.artifacts) == ("a", "test.sh", None, ())
    assert (b.verifier, b.agent_timeout, b.verifier_timeout, b.artifacts) == ("verify.py", 9.0, 3.5, ("*.py",))
    assert (b.instruction, b.metadata["level"]) == ("Do it.", 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task.toml": None}, "no task.toml"),
        ({"task.toml": "[agent"}, "not a valid task.toml"),
        ({"task.toml": "[agent]\ntimeout_sec = 'long'"}, "not a valid task.toml"),
        ({"task.toml": "[agent]\ntimeout_sec = 0"}, "positive number of seconds"),
        ({"task.toml": "[verifier]\ntimeout_sec = inf"}, "positive number of seconds"),
        ({"task.toml": "[metadata]\nartifacts = ['../x']"}, "relative to the workspace"),
        ({"task.toml": "[environment]\nmemory = 'much'"}, "memory is a size such as '2G', got 'much'"),
        ({"task.toml": "[environment]\ncpus = 0"}, "[environment] cpus must be a positive number, got 0.0"),
        ({"task.toml": "[environment]\nworkdir = '/'"}, "workdir must be an absolute path of a folder"),
        ({"task.toml": "[environment]\nworkdir = '/app/../etc'"}, "workdir must be an absolute path of a folder"),
        ({"task.toml": "[environment]\ndocker_image = '--privileged'"}, "docker_image names no image: '--privileged'"),
        ({"task.toml": "[environment.env]\n'A=B' = '1'"}, "'A=B' cannot be an environment variable"),
        ({"task.toml": "[[steps]]\nname = 'first'"}, "has 1 steps"),
        ({"instruction.md": None}, "instruction.md"),
        ({"instruction.md": " \n"}, "instruction.md is empty"),
        ({"tests/verify.py": None}, "no verifier; add tests/test.sh or tests/verify.py"),
    ],
)
def test_one_error_names_the_task_and_the_remedy(tmp_path: Path, change: dict[str, str | None], says: str) -> None:
    write(tmp_path / "broken", {k: v for k, v in {**GOOD, **change}.items() if v is not None})
    with pytest.raises(TaskError, match="task 'broken'") as e:
        load_tasks(tmp_path)
    assert says in str(e.value)


MACHINE = """
[environment]
docker_image = "registry.example.org/app:1"
workdir = "/app"
cpus = 2
memory = "1.5G"
build_timeout_sec = 30.0
gpus = 1
[environment.env]
LEVEL = "3"
[verifier]
environment_mode = "separate"
[verifier.env]
JUDGE = "none"
"""


def test_what_a_task_says_of_its_container(tmp_path: Path) -> None:
    write(tmp_path / "ready", {**GOOD, "task.toml": MACHINE})
    files = {"environment/Dockerfile": "FROM scratch", "environment/compose.yaml": ""}
    write(tmp_path / "built", {**GOOD, **files, "task.toml": "[environment]\nmemory_mb = 64"})
    write(tmp_path / "plain", GOOD)
    built, plain, ready = (task.machine for task in load_tasks(tmp_path))
    assert ready == Machine(
        image="registry.example.org/app:1",
        workdir="/app",
        cpus=2.0,
        memory_mb=1536,
        build_timeout=30.0,
        env={"LEVEL": "3"},
        verifier_env={"JUDGE": "none"},
        unsupported="GPUs, a verifier in an environment of its own",
    )
    assert (built.dockerfile, built.memory_mb, built.unsupported) == (True, 64, "several services (compose)")
    assert [machine.named for machine in (ready, built, plain)] == [True, True, False]


def test_links_lead_out_of_one_s_own_tasks_and_not_out_of_others(tmp_path: Path) -> None:
    """Links are followed when a workspace is made: a fetched task could take any file of this machine along."""
    (tmp_path / "shared.txt").write_text("x")
    task = write(tmp_path / "tasks" / "t", GOOD)
    (task / "environment" / "inside.txt").symlink_to("seed.txt")
    load_task(task, foreign=True)
    (task / "environment" / "outside.txt").symlink_to("../../../shared.txt")
    load_task(task)
    with pytest.raises(TaskError, match=r"the link '.*outside.txt' leads out of it"):
        load_task(task, foreign=True)


def test_no_tasks_at_all(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no task folder"):
        load_tasks(tmp_path)
    with pytest.raises(TaskError, match="not a folder"):
        load_tasks(tmp_path / "absent")


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., object]:
    def make(toml: str = "") -> object:
        write(tmp_path / "tasks" / "t", {**GOOD, "task.toml": toml})
        return load_tasks(tmp_path / "tasks")[0]

    return make


def test_a_workspace_holds_the_environment_and_never_the_tests(tmp_path: Path, task: Callable[..., object]) -> None:
    workspace = write(tmp_path / "w", {"left-over": "from an earlier start"})
    prepare(task(), workspace)
    assert [p.name for p in workspace.rglob("*")] == ["seed.txt"]
    assert not any(p.is_symlink() for p in workspace.rglob("*"))  # no link leads back to the task's folder


def test_what_there_is_to_score(tmp_path: Path, task: Callable[..., object]) -> None:
    anything, named = task(), task('[metadata]\nartifacts = ["src/**/*.py"]')
    workspace = tmp_path / "w"
    prepare(anything, workspace)
    assert produced(anything, workspace) == []
    write(workspace, {".cache/x": "HOME is the workspace, and programs leave such files in it"})
    assert produced(anything, workspace) == []
    write(workspace, {"seed.txt": "sEEd"})
    assert produced(anything, workspace) == ["seed.txt"]  # changed, though of the same length
    assert produced(named, workspace) == []
    write(workspace, {"src/deep/m.py": "", "m.py": ""})
    assert produced(named, workspace) == ["src/deep/m.py"]


def test_a_copy_takes_files_and_links_and_nothing_that_blocks(tmp_path: Path) -> None:
    import os

    workspace = write(tmp_path / "w", {"a/b.txt": "x" * 1000})
    (workspace / "link").symlink_to("a/b.txt")
    (workspace / "nowhere").symlink_to("gone")
    os.mkfifo(workspace / "pipe")
    copy(workspace, tmp_path / "copy", 1000)
    names = sorted(str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*"))
    assert names == ["a", "a/b.txt", "link", "nowhere"]
    assert (tmp_path / "copy/link").read_text() == "x" * 1000
    with pytest.raises(WorkspaceTooLarge, match="workspace_limit_mb"):
        copy(workspace, tmp_path / "small", 999)


def test_a_burst_covers_the_tasks_and_repeats_exactly() -> None:
    batch = BatchConfig(groups=2, group_size=3, per_burst=2)
    names = dispatch.order([f"t{i}" for i in range(6)], seed=7)
    assert names == dispatch.order([f"t{i}" for i in range(6)], seed=7)
    assert sorted(names) == [f"t{i}" for i in range(6)]
    bursts = [dispatch.burst(b, batch, names) for b in range(3)]
    executions = [p.execution for burst in bursts for p in burst]
    assert len(set(executions)) == 36
    assert executions[:4] == ["b0-g00-e0", "b0-g00-e1", "b0-g00-e2", "b0-g01-e0"]
    for burst in bursts:
        groups = {p.group: p.task for p in burst}
        assert len(groups) == 4
        assert len(set(groups.values())) == 4  # no task twice while others wait
        assert all(groups[p.group] == p.task for p in burst)
    drawn = [p.task for burst in bursts for p in burst]
    assert {drawn.count(name) for name in names} == {6}  # 12 groups over 6 tasks: two groups of 3 each


def test_listed_order() -> None:
    assert dispatch.order(["b", "a"], None) == ["b", "a"]


@pytest.mark.parametrize(
    ("key", "value"), [("budget", 0.0), ("evaluators", 0), ("concurrency", -1), ("evaluator_timeout", float("nan"))]
)
def test_impossible_numbers_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"\[runner\].*{key} must be"):
        section({"runner": {key: value}}, "runner", RunnerConfig)
