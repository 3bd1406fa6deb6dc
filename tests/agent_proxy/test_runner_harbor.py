"""Tasks of Harbor datasets: what is asked, what the real library finds, and the error when it is not there.

Without the `harbor` package the tests that need it skip. In an environment of its own:

    uv run --isolated --no-default-groups --group dev --package gyre-launch --with harbor \
        pytest tests/agent_proxy/test_runner_harbor.py
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_agent_proxy.runner import harbor, sources
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import TaskError
from gyre_agent_proxy.runner.sources import Request

TASK = {
    "task.toml": 'schema_version = "1.1"\n[task]\nname = "{org}/{name}"\n[environment]\ncpus = 1\nmemory_mb = 2048\n'
    "[agent]\ntimeout_sec = 120.0\n[verifier]\ntimeout_sec = 60.0\n",
    "instruction.md": "Do {name}.\n",
    "environment/Dockerfile": "FROM scratch\nWORKDIR /app\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
}


def write(folder: Path, name: str, org: str = "acme") -> Path:
    for file, text in TASK.items():
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text(text.replace("{name}", name).replace("{org}", org))
    return folder / name


# --- without the library --------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "registry.json").write_text("[]")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset.toml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("source", "registry", "expected"),
    [
        ("harbor:hello@1.0", "", {"name": "hello@1.0"}),
        ("harbor:acme/hello@1.0", "", {"name": "acme/hello@1.0"}),
        ("harbor:hello", "registry.json", {"name": "hello", "registry": "{base}/registry.json"}),
        ("harbor:hello", "https://example.org/r.json", {"name": "hello", "registry": "https://example.org/r.json"}),
        ("harbor:./set", "", {"folder": "{base}/set"}),
        ("harbor:./set/dataset.toml", "", {"folder": "{base}/set"}),
    ],
)
def test_what_is_asked(files: Path, source: str, registry: str, expected: dict[str, str]) -> None:
    filled = {key: value.replace("{base}", str(files)) for key, value in expected.items()}
    assert sources.request(source, registry, files) == Request(**filled)


@pytest.mark.parametrize(
    ("source", "registry", "says"),
    [
        ("harbor:", "", "names no dataset"),
        ("harbor:./", "", "has no dataset.toml"),
        ("harbor:./absent", "", "has no dataset.toml"),
        ("harbor:hello", "absent.json", "there is no"),
    ],
)
def test_what_cannot_be_asked(files: Path, source: str, registry: str, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        sources.request(source, registry, files)


def test_which_tasks_are_taken() -> None:
    names = ["git-a", "git-b", "net-a"]
    assert sources.select(names, (), ()) == names
    assert sources.select(names, ("git-*",), ()) == ["git-a", "git-b"]
    assert sources.select(names, ("git-*", "net-a"), ("*-b",)) == ["git-a", "net-a"]


def test_a_folder_needs_no_library_and_takes_the_same_patterns(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / "tasks", name)
    config = RunnerConfig(folder=str(tmp_path), tasks_except=("b",))
    assert [task.name for task in sources.load(config)] == ["a"]
    with pytest.raises(TaskError, match="leave none of 2 tasks, the first of which is 'a'"):
        sources.load(RunnerConfig(folder=str(tmp_path), tasks_only=("c*",)))


def test_names_are_files_names_and_told_apart() -> None:
    assert harbor.named([("acme/a", Path("1")), ("b", Path("2"))]) == {"acme__a": "1", "b": "2"}
    with pytest.raises(TaskError, match="two of its tasks are named 'a'"):
        harbor.named([("a", Path("1")), ("a", Path("2"))])
    with pytest.raises(TaskError, match="no tasks"):
        harbor.named([])


@pytest.mark.skipif(importlib.util.find_spec("harbor") is not None, reason="the package is installed")
def test_without_the_library_the_error_names_the_extra(files: Path) -> None:
    with pytest.raises(TaskError, match=r"needs the extra \[harbor\].*pip install 'gyre-agent-proxy\[harbor\]'"):
        sources.load(RunnerConfig(folder=str(files), tasks="harbor:hello@1.0", harbor_registry="registry.json"))


# --- with it --------------------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> None:
    pytest.importorskip("harbor", reason="the extra [harbor] is not installed")


@pytest.fixture
def config(tmp_path: Path, library: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunnerConfig]:
    """config(**runner): a configuration in a folder with a registry of two tasks, one of them in a git repository."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where Harbor's cache is
    write(tmp_path / "registry" / "local", "one")
    repository = tmp_path / "repository"
    write(repository, "two")
    for command in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "tasks"),
    ):
        subprocess.run(["git", *command], cwd=repository, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True)
    dataset = {
        "name": "hello",
        "version": "1.0",
        "description": "two tasks",
        "tasks": [
            {"name": "one", "path": "local/one"},
            {
                "name": "two",
                "git_url": repository.as_uri(),
                "git_commit_id": commit.stdout.strip(),
                "path": "two",
            },
        ],
    }
    empty = {**dataset, "version": "2.0", "tasks": []}
    (tmp_path / "registry" / "registry.json").write_text(json.dumps([dataset, empty]))

    def make(**runner: object) -> RunnerConfig:
        options = {"folder": str(tmp_path), "harbor_registry": "registry/registry.json", **runner}
        return RunnerConfig(**options)  # type: ignore[arg-type]

    return make


def test_a_dataset_of_a_registry_file(config: Callable[..., RunnerConfig], tmp_path: Path) -> None:
    one, two = sources.load(config(tasks="harbor:hello@1.0"))
    assert (one.name, one.folder, one.instruction, one.verifier) == (
        "one", tmp_path / "registry" / "local" / "one", "Do one.", "test.sh",
    )  # fmt: skip
    assert (two.name, two.instruction) == ("two", "Do two.")
    assert two.folder.is_relative_to(tmp_path / "home"), "fetched into Harbor's cache"
    assert (two.machine.dockerfile, two.machine.cpus, two.machine.memory_mb) == (True, 1.0, 2048)
    (tmp_path / "repository").rename(tmp_path / "moved")
    assert sources.load(config(tasks="harbor:hello@1.0", tasks_only=("two",))) == (two,), "what is there is not fetched"


def test_what_the_library_says_is_passed_on(config: Callable[..., RunnerConfig]) -> None:
    for name, says in (
        ("hello@3", "3 of dataset hello"),
        ("bye", "bye not found"),
        ("hello@2.0", "no tasks"),
    ):
        with pytest.raises(TaskError, match=f"dataset 'harbor:{name}' cannot be had: .*{says}"):
            sources.load(config(tasks=f"harbor:{name}"))


def test_a_dataset_beside_its_tasks_is_what_it_pins(config: Callable[..., RunnerConfig], tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write(folder, "one")
    write(folder, "unlisted")
    digest = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys, pathlib; from harbor.publisher.packager import Packager as P; "
            "print(P.compute_content_hash(pathlib.Path(sys.argv[1]))[0])",
            str(folder / "one"),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (folder / "dataset.toml").write_text(
        f'[dataset]\nname = "acme/set"\n[[tasks]]\nname = "acme/one"\ndigest = "sha256:{digest}"\n'
    )
    assert [(task.name, task.folder) for task in sources.load(config(tasks="harbor:./set"))] == [
        ("acme__one", folder / "one")
    ]
    (folder / "one" / "tests" / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    with pytest.raises(TaskError, match=r"dataset.toml pins acme/one to sha256:.* but .* is sha256:"):
        sources.load(config(tasks="harbor:./set"))
