"""Tasks: folders in the layout that Harbor uses, read without it.

    <task>/task.toml         optional keys: [agent] timeout_sec, [verifier] timeout_sec, [metadata] (any), and
                             [metadata] artifacts = ["globs of files without which there is nothing to score"];
                             for containers [environment] docker_image, workdir, cpus, memory_mb, env, build_timeout_sec
    <task>/instruction.md    what the agent is asked
    <task>/environment/      copied into the workspace before the harness starts (optional); or, with a Dockerfile,
                             what a container's image is built from
    <task>/tests/            test.sh or verify.py, never visible to the harness

Links are followed, as tasks may share files; in a task of others, none may lead out of it.

The verifier runs with the workspace (a copy) as its working directory and writes `$LOGS_DIR/verifier/reward.json`, a
number or an object with the number "reward", or `reward.txt`; the reward is in [0, 1].
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from gyre_agent_proxy.runner.errors import TaskError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a task says of the container it is made for."""

    image: str = ""  # a ready one
    dockerfile: bool = False  # there is environment/Dockerfile; `image` goes first
    workdir: str = ""  # where the workspace is in it; empty: the image's own
    cpus: float | None = None
    memory_mb: int | None = None
    build_timeout: float = 600.0  # seconds to build the image, or to fetch it
    env: dict[str, str] = {}  # of the harness and the verifier
    verifier_env: dict[str, str] = {}
    unsupported: str = ""  # what it asks for that containers here do not give; empty: nothing

    @property
    def named(self) -> bool:
        """Whether the task brings an image of its own."""
        return bool(self.image) or self.dockerfile


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task, validated."""

    name: str  # its folder's name, or what its dataset calls it
    folder: Path
    instruction: str
    verifier: str  # file name in tests/; empty: there is none, and nothing is scored
    agent_timeout: float | None = None  # seconds
    verifier_timeout: float | None = None  # seconds
    artifacts: tuple[str, ...] = ()  # globs relative to the workspace; empty: any file the harness made or changed
    metadata: dict[str, Any] = {}
    machine: Machine = Machine()
    seed: Path | None = None  # what the workspace begins as, when it is taken from an image

    @property
    def environment(self) -> Path:
        """The folder copied into the workspace; it may be absent."""
        return self.seed or self.folder / "environment"

    @property
    def tests(self) -> Path:
        """The folder of the verifier."""
        return self.folder / "tests"


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None
    env: dict[str, str] = {}
    environment: Any = None
    environment_mode: str | None = None


class _Environment(msgspec.Struct, frozen=True):
    docker_image: str | None = None
    os: str = "linux"
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str | None = None  # as in "2G": how older tasks say it
    gpus: int | None = None
    tpu: Any = None
    env: dict[str, str] = {}
    build_timeout_sec: float = 600.0


class _Toml(msgspec.Struct, frozen=True):
    """The keys of task.toml the runner reads; others belong to other tools."""

    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    metadata: dict[str, Any] = {}
    steps: tuple[Any, ...] = ()


def load_task(folder: Path, *, scored: bool = True, name: str = "", foreign: bool = False) -> Task:
    """Read one task folder; raises `TaskError` naming the task, what is wrong and the remedy.

    scored: it must have a verifier. name: what its dataset calls it; empty: as its folder. foreign: it was fetched, and
    its links must not lead out of it.
    """
    name = name or folder.resolve().name
    if name.startswith(".") or "/" in name or "\0" in name:  # files are named after it
        raise TaskError(f"a task cannot be named {name!r}; rename {str(folder)!r}")
    file = folder / "task.toml"
    try:
        toml = msgspec.convert(tomllib.loads(file.read_text()), _Toml)
        artifacts = msgspec.convert(toml.metadata.get("artifacts", ()), tuple[str, ...])
    except FileNotFoundError:
        raise TaskError(f"task {name!r} has no task.toml in {str(folder)!r}; add one (it may be empty)") from None
    except (OSError, UnicodeDecodeError) as e:
        raise TaskError(f"task {name!r}: {str(file)!r} cannot be read: {e}; check the file") from e
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise TaskError(f"task {name!r}: {str(file)!r} is not a valid task.toml: {e}; correct it") from e
    for glob in artifacts:
        if not glob or Path(glob).is_absolute() or ".." in Path(glob).parts:
            raise TaskError(f"task {name!r}: an artifact is a glob relative to the workspace, got {glob!r}")
    for what, limit in (("agent", toml.agent.timeout_sec), ("verifier", toml.verifier.timeout_sec)):
        if limit is not None and not 0 < limit < float("inf"):
            raise TaskError(f"task {name!r}: [{what}] timeout_sec must be a positive number of seconds, got {limit!r}")
    if toml.steps:
        raise TaskError(
            f"task {name!r} has {len(toml.steps)} steps, and only tasks of one step can be run; leave it out"
        )
    machine = _machine(name, folder, toml)
    if foreign:
        _contained(name, folder)
    try:
        instruction = (folder / "instruction.md").read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise TaskError(f"task {name!r} has no readable instruction.md ({e}); write what the agent is asked") from e
    if not instruction:
        raise TaskError(f"task {name!r}: instruction.md is empty; write what the agent is asked")
    verifier = next((v for v in ("test.sh", "verify.py") if (folder / "tests" / v).is_file()), None)
    if verifier is None and scored:
        raise TaskError(
            f"task {name!r} has no verifier; add tests/test.sh or tests/verify.py, which writes the reward in [0, 1] "
            "to $LOGS_DIR/verifier/reward.json"
        )
    return Task(
        name=name,
        folder=folder,
        instruction=instruction,
        verifier=verifier or "",
        agent_timeout=toml.agent.timeout_sec,
        verifier_timeout=toml.verifier.timeout_sec,
        artifacts=artifacts,
        metadata=toml.metadata,
        machine=machine,
    )


def _machine(name: str, folder: Path, toml: _Toml) -> Machine:
    said = toml.environment
    memory = said.memory_mb
    if memory is None and said.memory is not None:
        if (size := _SIZE.fullmatch(said.memory.strip())) is None:
            raise TaskError(f"task {name!r}: [environment] memory is a size such as '2G', got {said.memory!r}")
        memory = int(float(size[1]) * _MIB[size[2].upper()])
    for what, value in (("cpus", said.cpus), ("memory_mb", memory), ("build_timeout_sec", said.build_timeout_sec)):
        if value is not None and not 0 < value < float("inf"):
            raise TaskError(f"task {name!r}: [environment] {what} must be a positive number, got {value!r}")
    if said.workdir is not None and not _usable(said.workdir):
        raise TaskError(
            f"task {name!r}: [environment] workdir must be an absolute path of a folder, not /, got {said.workdir!r}"
        )
    if said.docker_image is not None and not re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", said.docker_image):
        raise TaskError(f"task {name!r}: [environment] docker_image names no image: {said.docker_image!r}; correct it")
    if odd := [key for key in (*said.env, *toml.verifier.env) if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)]:
        raise TaskError(f"task {name!r}: {odd[0]!r} cannot be an environment variable; rename it")
    asks = {
        f"the operating system {said.os!r}": said.os.lower() != "linux",
        "GPUs": bool(said.gpus),
        "a TPU": said.tpu is not None,
        "several services (compose)": any((folder / "environment" / file).is_file() for file in _COMPOSE),
        "a verifier in an environment of its own": toml.verifier.environment is not None
        or toml.verifier.environment_mode == "separate",
    }
    return Machine(
        image=said.docker_image or "",
        dockerfile=(folder / "environment" / "Dockerfile").is_file(),
        workdir=said.workdir or "",
        cpus=said.cpus,
        memory_mb=memory,
        build_timeout=said.build_timeout_sec,
        env=said.env,
        verifier_env=toml.verifier.env,
        unsupported=", ".join(what for what, asked in asks.items() if asked),
    )


def _usable(workdir: str) -> bool:
    path = PurePosixPath(workdir)
    return path.is_absolute() and len(path.parts) > 1 and ".." not in path.parts and "," not in workdir


def _contained(name: str, folder: Path) -> None:
    """What a task's folders hold is copied with links followed: somebody else's must not take files of this machine.

    Raises `TaskError`.
    """
    around = folder.resolve()
    for part in ("environment", "tests"):
        for root, folders, files in os.walk(folder / part):
            for entry in (*folders, *files):
                path = Path(root) / entry
                if path.is_symlink() and not path.resolve().is_relative_to(around):
                    raise TaskError(f"task {name!r}: the link {str(path)!r} leads out of it; leave the task out")


def task_folders(folder: Path) -> dict[str, Path]:
    """The task folders in `folder` by name; raises `TaskError` when there is none."""
    if not folder.is_dir():
        raise TaskError(
            f"runner.tasks names {str(folder)!r}, which is not a folder; give the folder of the task folders"
        )
    found = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    if not found:
        raise TaskError(f"runner.tasks names {str(folder)!r}, which holds no task folder; add one")
    return {entry.name: entry for entry in found}


def load_tasks(folder: Path) -> tuple[Task, ...]:
    """Read every task folder in `folder`, by name; raises `TaskError` when there is none or one is wrong."""
    return tuple(load_task(entry) for entry in task_folders(folder).values())
