"""Containers: what the client is told, their life with a scripted `docker`, and the same with a real podman."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre_agent_proxy.runner import containers, enter, limits, places
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.container import Container
from gyre_agent_proxy.runner.containers import EXECUTION, RUN, Client, ContainerError
from gyre_agent_proxy.runner.errors import SandboxError, TaskError
from gyre_agent_proxy.runner.execution import End, Harness, finish, start
from gyre_agent_proxy.runner.places import Places
from gyre_agent_proxy.runner.sandbox import View, host_path
from gyre_agent_proxy.runner.scoring import Scorer
from gyre_agent_proxy.runner.tasks import Machine, Task, load_task
from gyre_agent_proxy.runner.workspace import prepare, produced
from gyre_traj.intake import Ending
from gyre_transport.errors import ProcessError

DOCKER = Client(path="/usr/bin/docker", kind="docker")
PODMAN = Client(path="/usr/bin/podman", kind="podman")

# --- what the client is told ----------------------------------------------------------------------------------------


def options(command: list[str]) -> dict[str, list[str]]:
    """The options of a `run` by name; "" are the image and what follows."""
    found: dict[str, list[str]] = {}
    i = 1
    while command[i].startswith("-"):
        flag = command[i] == "--interactive"
        found.setdefault(command[i], []).append("" if flag else command[i + 1])
        i += 1 if flag else 2
    return {**found, "": command[i:]}


@pytest.fixture
def box(tmp_path: Path) -> Container:
    return Container(
        client=DOCKER,
        image="sha256:abc",
        workdir=Path("/app"),
        owner="0123456789abcdef0123",
        user="65534:65534",
        port=8100,
        socket=tmp_path / "proxy" / "http",
        env={"LEVEL": "3"},
        verifier_env={"JUDGE": "none"},
        cpus=1.5,
        memory_mb=512,
        file_limit=1 << 20,
    )


ENV = {"PATH": host_path(), "HOME": "/data/x", "OPENAI_API_KEY": "sk-gyre-secret", "DOCKER_HOST": "tcp://mine"}
WORKSPACE = Path("/run/w/b0-g00-e0")
HARNESS = View(cwd=WORKSPACE, write=(WORKSPACE,), places={WORKSPACE: Path("/app")}, execution="b0-g00-e0", proxy=True)


def test_a_harness_s_container(box: Container) -> None:
    said = options(box.run(["agent", "{}"], ENV, HARNESS))
    assert said[""] == [
        "sha256:abc", "-I", "-S", "/run/gyre/enter.py", "-1", "8100", "/run/gyre/proxy/http", "1048576", "agent", "{}",
    ]  # fmt: skip
    assert {name: values for name, values in said.items() if name not in ("", "--mount", "--env")} == {
        "--name": ["gyre-0123456789ab-b0-g00-e0"],
        "--label": ["gyre.run=0123456789abcdef0123", "gyre.execution=b0-g00-e0"],
        "--pull": ["never"],
        "--log-driver": ["none"],
        "--network": ["none"],
        "--cap-drop": ["ALL"],
        "--security-opt": ["no-new-privileges", "label=disable"],
        "--pids-limit": ["4096"],
        "--user": ["65534:65534"],
        "--cpus": ["1.5"],
        "--memory": ["512m"],
        "--memory-swap": ["512m"],
        "--workdir": ["/app"],
        "--entrypoint": [box.python],
    }
    assert set(said["--mount"]) == {
        f"type=bind,source={enter.__file__},target=/run/gyre/enter.py,readonly",
        f"type=bind,source={limits.__file__},target=/run/gyre/limits.py,readonly",
        f"type=bind,source={Path(sys.base_prefix).resolve()},target=/run/gyre/python,readonly",
        f"type=bind,source={box.socket.parent},target=/run/gyre/proxy,readonly",  # type: ignore[union-attr]
        f"type=bind,source={WORKSPACE},target=/app",
    }
    assert box.python.startswith("/run/gyre/python/bin/python")


def test_no_value_that_others_must_not_read_is_on_the_command_line(
    box: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client reads itself stays its own."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1/docker.sock")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the runner's own")
    command, env = box.launch(["agent"], ENV, HARNESS)
    assert not any("sk-gyre-secret" in part for part in command)
    assert env["OPENAI_API_KEY"] == "sk-gyre-secret"
    assert env["DOCKER_HOST"] == "unix:///run/user/1/docker.sock"
    assert (env["PATH"], env["HOME"]) == (os.environ["PATH"], os.environ["HOME"])
    assert "AWS_SECRET_ACCESS_KEY" not in env
    said = options(command[command.index("run") :])["--env"]
    assert said == ["DOCKER_HOST=tcp://mine", "HOME=/data/x", "LEVEL=3", "OPENAI_API_KEY"], "no PATH: the image's"
    script = msgspec.structs.replace(box, env={"BASH_ENV": "$(touch /x)"})
    command, env = script.launch(["agent"], ENV, HARNESS)
    assert "BASH_ENV" not in env, "the client may be a script"
    assert "BASH_ENV=$(touch /x)" in command
    assert "PATH=/own/bin" in options(box.run(["agent"], {**ENV, "PATH": "/own/bin"}, HARNESS))["--env"]


def test_a_verifier_s_container(box: Container, tmp_path: Path) -> None:
    """Harbor's places; the task's variables for verifiers, no proxy, a name of its own."""
    folder = tmp_path / "e-2"
    seen = box.places(folder / "workspace", folder / "tests", folder / "logs")
    view = View(cwd=folder / "workspace", write=(folder,), places=seen, execution="e", part="2")
    said = options(box.run(box.limited(60, 1 << 20, ["bash", "/tests/test.sh"]), {"HOME": "/logs"}, view))
    assert said[""] == [
        "sha256:abc", "-I", "-S", "/run/gyre/enter.py", "-1", "0", "", "1048576",
        box.python, "-I", "-S", "/run/gyre/limits.py", "60", str(512 << 20), "bash", "/tests/test.sh",
    ]  # fmt: skip
    written = [mount for mount in said["--mount"] if not mount.endswith(",readonly")]
    assert written == [
        f"type=bind,source={folder / name},target={target}"
        for name, target in (("workspace", "/app"), ("tests", "/tests"), ("logs", "/logs"))
    ]
    assert said["--env"] == ["HOME=/logs", "JUDGE=none", "LEVEL=3"]
    assert said["--name"] == ["gyre-0123456789ab-e-2"]
    assert not any("target=/run/gyre/proxy" in mount for mount in said["--mount"])


@pytest.mark.parametrize(
    ("change", "view", "expected"),
    [
        ({}, {}, "none"),
        ({"network": True}, {}, "host"),
        ({"evaluator_network": True}, {}, "none"),
        ({"evaluator_network": True}, {"proxy": False}, "host"),
    ],
)
def test_the_network(box: Container, change: dict[str, Any], view: dict[str, Any], expected: str) -> None:
    made = msgspec.structs.replace(box, **change)
    assert options(made.run(["x"], {}, msgspec.structs.replace(HARNESS, **view)))["--network"] == [expected]


def test_what_is_mounted_is_not_the_system_and_covers_no_workspace(box: Container, tmp_path: Path) -> None:
    """The image has its own system; a folder asked for in the configuration is mounted even so."""
    program = tmp_path / "venv" / "bin" / "agent"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    made = msgspec.structs.replace(box, read=(Path("/usr/share"), tmp_path / "data"))
    view = msgspec.structs.replace(
        HARNESS, read=(Path("/usr/bin"), Path("/app"), tmp_path / "venv", tmp_path / "data" / "x"), stdin=True
    )
    said = options(made.run([str(program)], {}, view))
    targets = [mount.split("target=")[1] for mount in said["--mount"] if "/run/gyre" not in mount]
    assert targets == [f"{tmp_path}/data,readonly", f"{tmp_path}/venv,readonly", "/usr/share,readonly", "/app"]
    assert said[""][-1] == str(program)
    assert "--interactive" in said
    with pytest.raises(SandboxError, match="cannot be mounted: commas and quotes"):
        box.run(["x"], {}, msgspec.structs.replace(HARNESS, read=(tmp_path / "a,b",)))


def test_what_is_hidden_in_a_folder_that_is_shown(box: Container, tmp_path: Path) -> None:
    """As in the sandbox: an installation that holds the tasks and the run is shown without them."""
    run, tasks = tmp_path / "runs", tmp_path / "tasks"
    view = View(
        cwd=run / "w",
        write=(run / "w", run / "home"),
        places={run / "w": Path("/app")},
        read=(tmp_path, tmp_path / "agent.py", run / "instructions" / "t.md"),
        hidden=(run, tasks, Path("/elsewhere")),
        proxy=True,
    )
    said = options(box.run(["x"], {}, view))["--mount"]
    assert [mount for mount in said if mount.startswith("type=tmpfs")] == [
        f"type=tmpfs,target={run}",
        f"type=tmpfs,target={tasks}",
    ]
    targets = [mount.split("target=")[1] for mount in said if "/run/gyre" not in mount and "tmpfs" not in mount]
    assert targets == [f"{tmp_path},readonly", f"{run}/instructions/t.md,readonly", f"{run}/home", "/app"]


def test_a_python_with_a_shared_library_finds_it(box: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    image = ("PATH=/bin", "LD_LIBRARY_PATH=/own/lib")
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1)
    assert box.libraries(image) == {"LD_LIBRARY_PATH": "/run/gyre/python/lib:/own/lib"}
    assert box.libraries(()) == {"LD_LIBRARY_PATH": "/run/gyre/python/lib"}
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 0)
    assert box.libraries(image) == {}


def test_an_image_s_own_python(box: Container) -> None:
    python = Path(sys.base_prefix).resolve()
    said = options(box.run(["x"], {}, msgspec.structs.replace(HARNESS, read=(python,))))
    assert sum(f"source={python}," in mount for mount in said["--mount"]) == 2, (
        "for enter.py, and where a harness looks"
    )
    made = msgspec.structs.replace(box, interpreter="/usr/bin/python3")
    said = options(made.run(["x"], {}, HARNESS))
    assert said["--entrypoint"] == ["/usr/bin/python3"]
    assert not any("/run/gyre/python" in mount for mount in said["--mount"])


@pytest.mark.parametrize(
    ("said", "client", "uid", "expected"),
    [
        ("", DOCKER, 0, ("65534:65534", 65534)),
        ("", DOCKER, 1000, ("1000:100", -1)),
        ("", msgspec.structs.replace(PODMAN, rootless=True), 1000, ("0:0", -1)),
        ("0:0", DOCKER, 0, ("0:0", 0)),
        ("image", DOCKER, 0, ("", -1)),
        ("agent", DOCKER, 0, ("agent", -1)),
        ("7:7", DOCKER, 1000, ("7:7", -1)),
    ],
)
def test_whom_programs_run_as(said: str, client: Client, uid: int, expected: tuple[str, int]) -> None:
    assert places.whom(said, client, uid, 100) == expected


def test_podman_does_not_wait_before_it_kills() -> None:
    assert containers.removal("docker", "a", "b") == ["rm", "--force", "--volumes", "a", "b"]
    assert containers.removal("podman", "a") == ["rm", "--force", "--volumes", "--time", "0", "a"]


def test_variables_of_a_task_take_nothing_from_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "the runner's own")
    task = Task(name="t", folder=tmp_path, instruction="", verifier="")
    assert places.resolved(task, {"A": "1", "B": "${X}-${Y:-y}-${Z:-}"}, {"X": "x"}) == {"A": "1", "B": "x-y-"}
    with pytest.raises(TaskError, match=r"task 't' wants the variable 'TOKEN'; set it in \[runner.env\]"):
        places.resolved(task, {"A": "${TOKEN}"}, {})


def test_tags_are_valid_and_tell_tasks_apart(tmp_path: Path) -> None:
    names = ["Fix_it", "acme__Fix.it", "!!"]
    tags = [places.tag(Task(name=name, folder=tmp_path / name, instruction="", verifier="")) for name in names]
    assert [tag.rpartition(":")[0] for tag in tags] == [
        "localhost/gyre-task/fix-it",
        "localhost/gyre-task/acme-fix-it",
        "localhost/gyre-task/task",
    ]
    assert tags[0] != places.tag(Task(name="Fix_it", folder=tmp_path / "other", instruction="", verifier=""))


# --- which tasks run where ------------------------------------------------------------------------------------------


def bare(name: str, **machine: Any) -> Task:
    return Task(name=name, folder=Path(name), instruction="x", verifier="verify.py", machine=Machine(**machine))


@pytest.mark.parametrize(
    ("sandbox", "machine", "expected"),
    [
        ("auto", {}, False),
        ("auto", {"image": "x"}, True),
        ("auto", {"dockerfile": True}, True),
        ("container", {}, True),
        ("bubblewrap", {"image": "x"}, False),
        ("none", {"dockerfile": True}, False),
    ],
)
def test_where_a_task_runs(sandbox: Any, machine: dict[str, Any], expected: bool) -> None:
    assert places.contained(RunnerConfig(sandbox=sandbox), bare("t", **machine)) is expected


@pytest.mark.parametrize(
    ("config", "machine", "says"),
    [
        ({"sandbox": "container"}, {}, "task 't' .1 in all. brings no image; add environment/Dockerfile"),
        ({}, {"image": "x", "unsupported": "GPUs"}, "asks for GPUs, which containers here do not give; leave it out"),
        ({}, {"image": "x", "env": {"A": "${B}"}}, "wants the variable 'B'"),
    ],
)
async def test_a_task_that_cannot_run_is_noticed_first(
    tmp_path: Path, config: dict[str, Any], machine: dict[str, Any], says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        await places.find(RunnerConfig(**config), [bare("t", **machine)], tmp_path)


async def test_without_a_container_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    task = bare("t", image="x")
    both = r"there is no 'docker' on PATH; there is no 'podman' on PATH; install podman"
    with pytest.raises(
        SandboxError, match=f"task 't' .* to run in a container, and .*{both}.*or set runner.sandbox to"
    ):
        await places.find(RunnerConfig(), [task], tmp_path)
    with pytest.raises(SandboxError, match="no 'nerdctl' on PATH"):
        await places.find(RunnerConfig(sandbox="container", container_client="nerdctl"), [task], tmp_path)


# --- the life of a container ----------------------------------------------------------------------------------------

OWNER = "run-a-0123456789"


class Bench:
    """A task in a container, and what is needed to run and to score it."""

    def __init__(self, folder: Path, script: Callable[..., None], **config: Any) -> None:
        self.folder = folder
        self.script = script
        self.url = "http://127.0.0.1:9"
        self.config = RunnerConfig(**{"sandbox": "container", "harness": ("x",), "container_user": "image", **config})

    def task(self, name: str = "t", **files: str) -> Task:
        written = {
            "task.toml": "[environment]\nmemory_mb = 256\n",
            "instruction.md": "Do it",
            "environment/Dockerfile": "FROM scratch\nWORKDIR /app\nCOPY . /app\n",
            "environment/seed.txt": "seed",
            "tests/test.sh": "grep -q done answer.txt && echo 1 > $LOGS_DIR/verifier/reward.txt",
            **files,
        }
        for file, text in written.items():
            (self.folder / "tasks" / name / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "tasks" / name / file).write_text(text)
        return load_task(self.folder / "tasks" / name)

    async def places(self, *tasks: Task) -> Places:
        made = await places.find(self.config, tasks, self.folder / "run", owner=OWNER)
        made.network = False
        return made

    async def start(self, task: Task, where: Container, *command: str, budget: float = 60.0) -> tuple[End, str]:
        """Run `command` as the harness; (its end, what was printed)."""
        child = await self.begin(task, where, *command)
        end = await finish(child, budget)
        await where.ended("e0")
        return end, child.log.read_text()

    async def begin(self, task: Task, where: Container, *command: str) -> Any:
        harness = Harness(
            command=command,
            env={},
            folder=str(self.folder),
            model="policy",
            base_url=self.url,
            instructions=self.folder / "instructions",
            sandbox=where,
            owner=OWNER,
            hidden=(self.folder / "tasks",),
        )
        harness.instructions.mkdir(exist_ok=True)
        (harness.instructions / f"{task.name}.md").write_text(task.instruction)
        prepare(task, self.workspace)
        return await start(harness, task, "e0", "the-key", self.workspace, self.folder / "harness.log")

    @property
    def workspace(self) -> Path:
        return self.folder / "run" / "workspaces" / "e0"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """docker(**script): the scripted client's state; `docker` on PATH is it."""
    home = tmp_path / "docker"
    (home / "pulled").mkdir(parents=True)
    (home / "pulled" / "seed.txt").write_text("pulled")
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    part = Path(__file__).parent / "parts" / "docker.py"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{part}" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_SCRIPTED", str(home))

    def script(**said: Any) -> Path:
        (home / "script.json").write_text(json.dumps(said))
        return home

    script()
    return script


@pytest.fixture
def bench(tmp_path: Path, docker: Callable[..., Path]) -> Bench:
    return Bench(tmp_path, docker)


def calls(home: Path, command: str) -> list[list[str]]:
    return [call for line in (home / "calls").read_text().splitlines() if (call := json.loads(line))[0] == command]


def left(home: Path) -> list[str]:
    return [json.loads(path.read_text())["name"] for path in (home / "containers").glob("*.json")]


async def test_from_an_image_to_a_score(bench: Bench) -> None:
    task = bench.task()
    found = await bench.places(task)
    task, where = await found.of(task)
    assert isinstance(where, Container)
    assert (where.workdir, where.memory_mb) == (Path("/app"), 256)
    end, printed = await bench.start(task, where, "sh", "-c", "cat seed.txt && pwd && echo done > answer.txt")
    assert (end.why, printed) == ("exit 0", f"seed{bench.workspace}\n"), "the scripted client mounts nothing"
    assert produced(task, bench.workspace) == ["answer.txt"], "what came of the image was not made"
    outcome = await Scorer(bench.config, bench.folder / "scoring", where).score(task, "e0", bench.workspace)
    assert (outcome.ending, outcome.score) == (Ending.SCORED, 1.0), outcome.detail
    home = bench.script()
    assert left(home) == []
    assert [options(call)["--label"][1] for call in calls(home, "run")] == ["gyre.execution=e0"] * 2
    assert {call[-1] for call in calls(home, "build")} == {str(task.folder / "environment")}
    assert await (await bench.places(task)).of(task), "another runner takes what is there"
    assert len(calls(home, "cp")) == 1


async def test_one_image_a_task_whoever_asks_at_once(bench: Bench) -> None:
    task = bench.task()
    found = await bench.places(task)
    made = await asyncio.gather(*(found.of(task) for _ in range(5)))
    assert len(calls(bench.script(), "build")) == 1
    assert all(place is made[0][1] for _, place in made)


async def test_a_ready_image_is_fetched_once_and_brings_the_workspace(bench: Bench) -> None:
    one = bench.task("one", **{"task.toml": '[environment]\ndocker_image = "example.org/app:1"\n'})
    two = bench.task("two", **{"task.toml": '[environment]\ndocker_image = "example.org/app:1"\nworkdir = "/app"\n'})
    found = await bench.places(one, two)
    for task in (one, two):
        task, _ = await found.of(task)
        assert (task.environment / "seed.txt").read_text() == "pulled"
    home = bench.script()
    assert len(calls(home, "pull")) == 1
    assert calls(home, "build") == []


async def test_a_task_without_an_image_in_the_configured_one(bench: Bench) -> None:
    bench.config = msgspec.structs.replace(bench.config, container_image="example.org/tools:1")
    task = bench.task()
    (task.folder / "environment" / "Dockerfile").unlink()
    task = load_task(task.folder)
    task, where = await (await bench.places(task)).of(task)
    assert isinstance(where, Container)
    assert task.environment == task.folder / "environment"
    assert where.workdir == Path("/app"), "the image's"


async def test_links_of_an_image_stay_links(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("of this machine")
    task = bench.task("t", **{"task.toml": '[environment]\ndocker_image = "example.org/app:1"\n'})
    (bench.script() / "pulled" / "link").symlink_to(tmp_path / "secret.txt")
    task, _ = await (await bench.places(task)).of(task)
    prepare(task, bench.workspace)
    assert (bench.workspace / "link").is_symlink()


@pytest.mark.parametrize(
    ("files", "script", "says"),
    [
        ({"environment/Dockerfile": "FROM x\nRUN false\n"}, {}, "returned a non-zero code: 1"),
        ({"task.toml": '[environment]\ndocker_image = "absent:1"\n'}, {}, "pull access denied for absent:1"),
        ({"task.toml": '[environment]\nworkdir = "/nowhere"\n'}, {}, "Could not find the file /nowhere"),
        ({}, {"refuse": {"build": "no space left on device"}}, "no space left on device"),
        ({"task.toml": "[environment]\nbuild_timeout_sec = 0.2\n"}, {"hang": ["build"]}, "did not end in 0.2 s"),
    ],
)
async def test_an_image_that_cannot_be_had(
    bench: Bench, files: dict[str, str], script: dict[str, Any], says: str
) -> None:
    """Tried three times, in case it was the network's fault; nothing half-made is left."""
    task = bench.task(**files)
    found = await bench.places(task)
    bench.script(**script)
    for _ in range(4):
        with pytest.raises(ContainerError, match=f"(?s)the image of task 't' cannot be had.*{says}"):
            await found.of(task)
    home = bench.script()
    if "hang" not in script:  # which may be ended before it has noted that it was called
        assert len(calls(home, "build") or calls(home, "pull")) == 3
    assert left(home) == []
    assert not [p for p in (bench.folder / "run").glob("environments/*") if p.suffix != ".partial"]


async def test_the_budget_removes_the_container(bench: Bench) -> None:
    task = bench.task()
    task, where = await (await bench.places(task)).of(task)
    assert isinstance(where, Container)
    stubborn = "trap '' TERM; touch up; while :; do sleep 0.05; done"
    child = await bench.begin(task, where, "sh", "-c", stubborn)
    async with asyncio.timeout(60):
        while not (bench.workspace / "up").exists():
            await asyncio.sleep(0.02)
    home = bench.script()
    (name,) = left(home)
    assert name == f"gyre-{OWNER[:12]}-e0"
    end = await finish(child, 0.01)
    assert (end.why, left(home)) == ("budget", [])


async def test_a_guard_that_is_killed_leaves_a_container_for_the_label(bench: Bench) -> None:
    """The client's end is not the container's: what the runner does last, and the next one first, ends it."""
    task = bench.task()
    found = await bench.places(task)
    task, where = await found.of(task)
    assert isinstance(where, Container)
    child = await bench.begin(task, where, "sh", "-c", "touch up; while :; do sleep 0.05; done")
    async with asyncio.timeout(60):
        while not (bench.workspace / "up").exists():
            await asyncio.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        assert (await finish(child, 60.0)).why == "exit -9"
    home = bench.script()
    assert len(left(home)) == 1
    await found.clean()
    assert left(home) == []


async def test_only_this_run_s_containers_are_removed(bench: Bench) -> None:
    task = bench.task()
    found = await bench.places(task)
    task, where = await found.of(task)
    assert isinstance(where, Container)
    for run, execution in ((OWNER, "e0"), (OWNER, "e1"), ("run-b", "e0"), (OWNER + "x", "e0")):
        labels = ("--label", f"{RUN}={run}", "--label", f"{EXECUTION}={execution}")
        await containers.call(where.client.path, "create", "--name", f"{run}-{execution}", *labels, where.image, "true")
    await where.ended("e0")
    home = bench.script()
    assert sorted(left(home)) == [f"{OWNER}-e1", f"{OWNER}x-e0", "run-b-e0"]
    await found.clean()
    assert sorted(left(home)) == [f"{OWNER}x-e0", "run-b-e0"]


async def test_a_container_that_stays_is_removed_again_and_in_the_end_told(bench: Bench) -> None:
    task = bench.task()
    found = await bench.places(task)
    task, where = await found.of(task)
    assert isinstance(where, Container)
    labels = {RUN: OWNER, EXECUTION: "e0"}
    marks = [part for name, value in labels.items() for part in ("--label", f"{name}={value}")]
    await containers.call(where.client.path, "create", "--name", "x", *marks, where.image, "true")
    bench.script(forget=2)
    await where.ended("e0")
    assert left(bench.script()) == []
    bench.script(refuse={"ps": "the daemon is away"})
    with pytest.raises(ContainerError, match=rf"cannot be removed .*daemon is away.*the label '{RUN}={OWNER}'"):
        await containers.remove(where.client, labels, within=0.0)


@pytest.mark.parametrize("script", [{"refuse": {"run": "no space left on device"}}, {"fail_start": True}])
async def test_a_container_that_cannot_be_made_is_no_result(bench: Bench, script: dict[str, Any]) -> None:
    task = bench.task()
    task, where = await (await bench.places(task)).of(task)
    assert isinstance(where, Container)
    bench.script(**script)
    with pytest.raises(ProcessError, match=r"(?s)the sandbox could not be made.*Error response from daemon"):
        await bench.start(task, where, "true")
    assert left(bench.script()) == []


async def test_exit_codes_are_the_harness_s_own_and_memory_is_told(bench: Bench) -> None:
    task = bench.task()
    task, where = await (await bench.places(task)).of(task)
    assert isinstance(where, Container)
    for code in (3, 125):
        assert (await bench.start(task, where, "sh", "-c", f"exit {code}"))[0].why == f"exit {code}"
    bench.script(oom=True)
    end, printed = await bench.start(task, where, "sh", "-c", "exit 137")
    assert end.why == "exit 137"
    assert printed.endswith("sandbox: the container was out of memory\n")


async def test_a_client_that_does_not_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.script(hang=["info"])
    bench.config = msgspec.structs.replace(bench.config, container_client="docker")  # not the next one that works
    monkeypatch.setattr(containers, "_CALL", 0.2)
    monkeypatch.setattr(containers.call, "__kwdefaults__", {"within": 0.2, "log": None})
    with pytest.raises(SandboxError, match=r"docker .* did not end in 0\.2 s"):
        await bench.places(bench.task())


def test_a_rootless_docker(docker: Callable[..., Path]) -> None:
    docker(security=["name=rootless"])
    assert asyncio.run(containers.find("docker")).rootless


# --- a real container -----------------------------------------------------------------------------------------------


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A podman whose images are this test's, one of which has this machine's programs once /usr is shown in it."""
    with tempfile.TemporaryDirectory(prefix="gyre-") as short:  # its sockets are in there
        yield from _podman(tmp_path, Path(short), monkeypatch)


def _podman(tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    program = shutil.which("podman")
    if program is None:
        pytest.skip("there is no podman on PATH (Debian, Ubuntu: apt-get install podman)")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    (tmp_path / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits = ["nofile={min(soft, 1024)}:{min(soft, 1024)}", "nproc=1024:1024"]\n'
        f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        + ('runtime = "runc"\n' if shutil.which("runc") else "")
    )
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{short}/graph"\nrunroot = "{short}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    root = tmp_path / "root"
    for name in ("usr", "etc", "tmp", "root"):
        (root / name).mkdir(parents=True)
    (root / "root").chmod(0o700)
    (root / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    with tarfile.open(tmp_path / "root.tar", "w") as tar:
        tar.add(root, ".")
    for arguments in (
        ("import", str(tmp_path / "root.tar"), "localhost/gyre-test:1"),
        ("run", "--rm", "--network", "none", "--volume", "/usr:/usr:ro", "localhost/gyre-test:1", "true"),
    ):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"podman {arguments[0]} does not work here: {done.stderr.strip()[-300:]}")
    yield program


LOOK = """
import json, os, socket, sys, urllib.request
def refused(path):
    try:
        open(path, "w").close()
    except OSError:
        return True
print(json.dumps({
    "uid": os.getuid(), "cwd": os.getcwd(), "seed": open("seed.txt").read(), "key": os.environ["OPENAI_API_KEY"],
    "pid 1": os.path.exists("/proc/1/cmdline"), "level": os.environ["LEVEL"], "home": os.environ["HOME"],
    "interfaces": os.listdir("/sys/class/net"),
    "proxy": urllib.request.urlopen(os.environ["ANTHROPIC_BASE_URL"] + "/x", timeout=30).read().decode(),
    "hidden": [os.path.exists(p) for p in sys.argv[1:]], "read only": refused("/usr/x"),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")],
}))
with open("answer.txt", "w") as f:
    f.write("done")
if os.fork() == 0:
    os.setsid()
    import time
    time.sleep(600)
"""
REAL = {
    "task.toml": '[environment]\nmemory_mb = 256\ncpus = 0.5\n[environment.env]\nLEVEL = "3"\n',
    "environment/Dockerfile": "FROM localhost/gyre-test:1\nWORKDIR /app\nCOPY seed.txt /app/\n",
    "tests/test.sh": "set -e\ntest $PWD = /app\ngrep -q done answer.txt\ntest -f /tests/test.sh\n"
    "echo 0.5 > /logs/verifier/reward.txt\n",
}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = b"asked for " + (await reader.readuntil(b"\r\n\r\n")).split()[1]
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
    await writer.drain()
    writer.close()


async def test_a_real_container(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, podman: str) -> None:
    """Built, run, reached only by the proxy's socket, ended with all in it, scored in the same image."""
    bench = Bench(tmp_path, lambda: None, container_client=podman, container_user="", sandbox_read=("/usr",))
    task = bench.task(**REAL)
    found = await bench.places(task)
    task, where = await found.of(task)
    assert isinstance(where, Container)
    assert (task.environment / "seed.txt").read_text() == "seed"
    (tmp_path / "agent.py").write_text(LOOK)
    tmp_path.chmod(0o755)  # what is shown is shown with its permissions
    bench.url = "http://127.0.0.1:8123"
    socket = tmp_path_factory.mktemp("s") / "http"
    where = msgspec.structs.replace(where, read=(*where.read, tmp_path), port=8123, socket=socket)
    python = where.python
    async with await asyncio.start_unix_server(answer, socket):
        socket.chmod(0o666)
        socket.parent.chmod(0o755)
        end, printed = await bench.start(
            task, where, python, str(tmp_path / "agent.py"), str(tmp_path), str(task.tests)
        )
    assert end.why == "exit 0", printed
    said = json.loads(printed)
    assert said.pop("home") == "/app"
    assert said == {
        "uid": 65534 if os.geteuid() == 0 else said["uid"],
        "cwd": "/app",
        "seed": "seed",
        "key": "the-key",
        "pid 1": True,
        "level": "3",
        "interfaces": ["lo"],
        "proxy": "asked for /x",
        "hidden": [True, False],
        "read only": True,
        "capabilities": ["0000000000000000"],
    }
    assert produced(task, bench.workspace) == ["answer.txt"]
    outcome = await Scorer(bench.config, tmp_path / "scoring", where).score(task, "e0", bench.workspace)
    assert (outcome.ending, outcome.score) == (Ending.SCORED, 0.5), outcome.detail
    end, printed = await bench.start(task, where, python, "-c", "while True: pass", budget=0.5)
    assert end.why == "budget", printed
    end, printed = await bench.start(task, where, python, "-c", "b = bytearray(1 << 30)")
    assert end.why in ("exit 137", "exit 1"), printed
    assert await containers.labelled(where.client, {RUN: OWNER}) == {}
