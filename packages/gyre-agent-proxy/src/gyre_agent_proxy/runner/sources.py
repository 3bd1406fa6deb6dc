"""Where tasks come from: a folder of task folders, or a Harbor dataset.

    tasks = "tasks"                          a folder, relative to the config file's
    tasks = "harbor:NAME@VERSION"            of Harbor's registry, or of `harbor_registry`: a file, or its URL
    tasks = "harbor:ORG/NAME@VERSION"        a dataset package of Harbor's hub
    tasks = "harbor:./dataset"               a folder with a dataset.toml (./, ../, /): the tasks it lists, as pinned

A dataset is looked up and fetched by the `harbor` package (extra `[harbor]`) in a process of its own (harbor.py), into
Harbor's cache; what is there already is not fetched again.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import TaskError
from gyre_agent_proxy.runner.tasks import Task, load_task, task_folders

PREFIX = "harbor:"
_WITHIN = 3600.0  # seconds for fetching a dataset
_EXTRA = "pip install 'gyre-agent-proxy[harbor]'"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What harbor.py is asked: a dataset by name, or the folder of one."""

    name: str = ""
    folder: str = ""
    registry: str = ""  # a file or a URL; empty: Harbor's own


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer: task folders by name, in the dataset's order."""

    tasks: dict[str, str] = {}
    error: str = ""
    missing: bool = False  # the package


def load(config: RunnerConfig) -> tuple[Task, ...]:
    """Read the tasks that `config` names, those that it leaves out aside; fetches a dataset.

    Raises `TaskError` naming what is wrong and the remedy.
    """
    foreign = config.tasks.startswith(PREFIX)
    folders = _dataset(config) if foreign else task_folders(Path(config.folder, config.tasks))
    chosen = select(list(folders), config.tasks_only, config.tasks_except)
    if not chosen:
        raise TaskError(
            f"runner.tasks_only {list(config.tasks_only)} and tasks_except {list(config.tasks_except)} leave none of "
            f"{len(folders)} tasks, the first of which is {next(iter(folders))!r}; correct the patterns"
        )
    return tuple(load_task(folders[name], name=name, foreign=foreign) for name in chosen)


def select(names: list[str], only: tuple[str, ...], leave: tuple[str, ...]) -> list[str]:
    """Those of `names` that match a pattern of `only`, if there are any, and none of `leave`."""
    wanted = [name for name in names if not only or any(fnmatch.fnmatchcase(name, glob) for glob in only)]
    return [name for name in wanted if not any(fnmatch.fnmatchcase(name, glob) for glob in leave)]


def request(source: str, registry: str, base: Path) -> Request:
    """What is asked for "harbor:…"; paths are relative to `base`. Raises `TaskError`."""
    name = source.removeprefix(PREFIX)
    if name.startswith((".", "/")):
        path = Path(base, name).resolve()
        folder = path.parent if path.name == "dataset.toml" else path
        if not (folder / "dataset.toml").is_file():
            raise TaskError(
                f"runner.tasks names the Harbor dataset {str(folder)!r}, which has no dataset.toml; without one, name "
                f"the folder of the task folders itself, and for a registry file, set runner.harbor_registry"
            )
        return Request(folder=str(folder))
    if not name:
        raise TaskError(f"runner.tasks is {source!r} and names no dataset; write 'harbor:NAME@VERSION'")
    if registry and "://" not in registry:
        path = Path(base, registry).resolve()
        if not path.is_file():
            raise TaskError(f"runner.harbor_registry names {registry!r}, but there is no {str(path)!r}; correct it")
        registry = str(path)
    return Request(name=name, registry=registry)


def _dataset(config: RunnerConfig) -> dict[str, Path]:
    asked = request(config.tasks, config.harbor_registry, Path(config.folder).resolve())
    local = bool(asked.registry) and "://" not in asked.registry
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "gyre_agent_proxy.runner.harbor"],
            input=msgspec.json.encode(asked),
            stdout=subprocess.PIPE,
            cwd=Path(asked.registry).parent if local else asked.folder or None,  # a registry's paths are relative to it
            env={**os.environ, "HARBOR_TELEMETRY": "0"},
            timeout=_WITHIN,
            check=False,
        )
        found = msgspec.json.decode(done.stdout, type=Found)
    except subprocess.TimeoutExpired:
        raise TaskError(f"the dataset {config.tasks!r} was not there after {_WITHIN:g} s; fetch it by hand") from None
    except (OSError, msgspec.DecodeError) as e:
        raise TaskError(f"the dataset {config.tasks!r} could not be looked up: {e}; see what was printed above") from e
    if found.missing:
        raise TaskError(
            f"runner.tasks names the Harbor dataset {config.tasks!r}, which needs the extra [harbor] ({found.error}): "
            f"{_EXTRA}; or fetch it elsewhere with Harbor's own program and name the folder of its tasks"
        )
    if found.error:
        raise TaskError(
            f"the dataset {config.tasks!r} cannot be had: {found.error}; correct runner.tasks, or try again"
        )
    return {name: Path(folder) for name, folder in found.tasks.items()}
