"""Tasks: folders in the layout that Harbor uses, read without it.

    <task>/task.toml         optional keys: [agent] timeout_sec, [verifier] timeout_sec, [metadata] (any), and
                             [metadata] artifacts = ["globs of files without which there is nothing to score"]
    <task>/instruction.md    what the agent is asked
    <task>/environment/      copied into the workspace before the harness starts (optional)
    <task>/tests/            test.sh or verify.py, never visible to the harness

The verifier runs with the workspace (a copy) as its working directory and writes `$LOGS_DIR/verifier/reward.json`, a
number or an object with the number "reward", or `reward.txt`; the reward is in [0, 1].
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from gyre_agent_proxy.runner.errors import TaskError


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task, validated."""

    name: str  # its folder's name
    folder: Path
    instruction: str
    verifier: str  # file name in tests/; empty: there is none, and nothing is scored
    agent_timeout: float | None = None  # seconds
    verifier_timeout: float | None = None  # seconds
    artifacts: tuple[str, ...] = ()  # globs relative to the workspace; empty: any file the harness made or changed
    metadata: dict[str, Any] = {}

    @property
    def environment(self) -> Path:
        """The folder copied into the workspace; it may be absent."""
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        """The folder of the verifier."""
        return self.folder / "tests"


class _Limits(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None


class _Toml(msgspec.Struct, frozen=True):
    """The keys of task.toml the runner reads; others belong to other tools."""

    agent: _Limits = _Limits()
    verifier: _Limits = _Limits()
    metadata: dict[str, Any] = {}


def load_task(folder: Path, *, scored: bool = True) -> Task:
    """Read one task folder; raises `TaskError` naming the task, what is wrong and the remedy.

    scored: it must have a verifier.
    """
    name = folder.resolve().name
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
    )


def load_tasks(folder: Path) -> tuple[Task, ...]:
    """Read every task folder in `folder`, by name; raises `TaskError` when there is none or one is wrong."""
    if not folder.is_dir():
        raise TaskError(
            f"runner.tasks names {str(folder)!r}, which is not a folder; give the folder of the task folders"
        )
    found = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    if not found:
        raise TaskError(f"runner.tasks names {str(folder)!r}, which holds no task folder; add one")
    return tuple(load_task(entry) for entry in found)
