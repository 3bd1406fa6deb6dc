"""Where each task's programs run: in the sandbox of this machine, or in a container made of the task's own image.

    sandbox = "auto"        in a container if the task brings an image, else as "bubblewrap" where that works
    sandbox = "container"   in a container: of the task's image, else of container_image
    otherwise               in the sandbox; environment/ is copied into the workspace, whatever is in it

An image is fetched or built when its task is first met, two at a time, and what it has in its working directory becomes
what workspaces of that task begin with: <run>/environments/<task>-<image>.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from gyre_agent_proxy.runner import containers
from gyre_agent_proxy.runner import sandbox as sandboxes
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.container import Container
from gyre_agent_proxy.runner.containers import RUN, Client, ContainerError, Image
from gyre_agent_proxy.runner.errors import SandboxError, TaskError
from gyre_agent_proxy.runner.sandbox import NOBODY, Sandbox
from gyre_agent_proxy.runner.tasks import Task
from gyre_agent_proxy.runner.workspace import full

log = logging.getLogger(__name__)

_WORKSPACE = "/workspace"  # where an image names no working directory
_TRIES = 3  # of an image, before its task's executions fail without one
_AT_ONCE = 2
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

Place = Sandbox | Container


class Places:
    """Where the tasks of a run are at home; `find` makes it."""

    def __init__(
        self, config: RunnerConfig, folder: Path, *, sandbox: Sandbox, client: Client | None = None, owner: str = ""
    ) -> None:
        self.sandbox = sandbox
        self.client = client
        self.owner = owner
        self.port = 0
        self.network = True
        self.socket: Path | None = None
        self._config = config
        self._folder = folder
        self._made: dict[str, tuple[Task, Container]] = {}
        self._failed: dict[str, list[ContainerError]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def of(self, task: Task) -> tuple[Task, Place]:
        """The task as it is there, and where that is. Raises `ContainerError` when its image cannot be had."""
        if not contained(self._config, task):
            return task, self.sandbox
        async with self._locks.setdefault(task.name, asyncio.Lock()):
            failed = self._failed.setdefault(task.name, [])
            if task.name not in self._made:
                if len(failed) >= _TRIES:
                    raise failed[-1]
                try:
                    async with self._slots:
                        self._made[task.name] = await self._make(task)
                except (ContainerError, OSError) as e:
                    if isinstance(e, OSError) and full(e):
                        raise  # which ends the run, as elsewhere
                    error = ContainerError(f"the image of task {task.name!r} cannot be had: {e}")
                    failed.append(error)
                    raise error from e
            return self._made[task.name]

    async def clean(self) -> None:
        """Remove what containers an earlier runner of this run left. Raises `ContainerError`."""
        if self.client is None:
            return
        if found := await containers.remove(self.client, {RUN: self.owner}):
            names = ", ".join(sorted(set(found.values()))) or "no execution"
            log.warning("removed %d containers that an earlier runner of this run left: %s", len(found), names)

    async def _make(self, task: Task) -> tuple[Task, Container]:
        assert self.client is not None  # noqa: S101  (`find` looked for one)
        image = await self._image(self.client, task)
        workdir = task.machine.workdir or image.workdir
        if not workdir or workdir == "/":
            workdir = _WORKSPACE
        elif task.machine.named:
            seed = self._folder / "environments" / f"{task.name}-{image.id.removeprefix('sha256:')[:12]}"
            if not seed.is_dir():
                await containers.extract(self.client, image, workdir, seed, {RUN: self.owner})
            task = msgspec.structs.replace(task, seed=seed)
        if task.machine.named and task.seed is None:  # nothing of environment/ is meant for the workspace
            empty = self._folder / "environments" / "empty"
            empty.mkdir(parents=True, exist_ok=True)
            task = msgspec.structs.replace(task, seed=empty)
        user, uid = whom(self._config.container_user, self.client, os.geteuid(), os.getegid())
        return task, Container(
            client=self.client,
            image=image.id,
            workdir=Path(workdir),
            owner=self.owner,
            user=user,
            uid=uid,
            network=self.network,
            evaluator_network=self._config.evaluator_network == "host",
            port=self.port,
            socket=self.socket,
            interpreter=self._config.container_python,
            read=sandboxes.shown(self._config),
            env={
                **({} if self._config.container_python else Container.libraries(image.env)),
                **resolved(task, task.machine.env, self._config.env),
            },
            verifier_env=resolved(task, task.machine.verifier_env, self._config.env),
            cpus=task.machine.cpus,
            memory_mb=task.machine.memory_mb,
            pids=self._config.container_pids,
            file_limit=self._config.workspace_limit_mb << 20,
        )

    async def _image(self, client: Client, task: Task) -> Image:
        said = self._folder / "logs" / "images" / f"{task.name}.log"
        said.parent.mkdir(parents=True, exist_ok=True)
        if task.machine.dockerfile and not task.machine.image:
            log.info("building the image of task %s; its log is %s", task.name, said)
            folder = task.folder.resolve() / "environment"
            labels = {"gyre.task": task.name}
            return await containers.built(client, folder, tag(task), labels, task.machine.build_timeout, said)
        reference = task.machine.image or self._config.container_image
        return await containers.fetched(client, reference, task.machine.build_timeout, said)


async def find(
    config: RunnerConfig,
    tasks: Iterable[Task],
    folder: Path,
    *,
    owner: str = "",
    base_url: str = "",
    socket: Path | None = None,
) -> Places:
    """What `tasks` need of this machine, tried once.

    folder: the run's, for what is taken from images; owner, base_url, socket: as in sandbox.py.
    Raises `SandboxError` for what cannot be had, `TaskError` for a task that asks for what containers here do not give.
    """
    tasks = tuple(tasks)
    inside = [task for task in tasks if contained(config, task)]
    bare = [task for task in inside if not task.machine.named]
    if bare and not config.container_image:
        raise TaskError(
            f'runner.sandbox is "container", but task {bare[0].name!r} ({len(bare)} in all) brings no image; add '
            "environment/Dockerfile, or set runner.container_image"
        )
    if odd := [task for task in inside if task.machine.unsupported]:
        raise TaskError(
            f"task {odd[0].name!r} ({len(odd)} in all) asks for {odd[0].machine.unsupported}, which containers here do "
            "not give; leave it out with runner.tasks_except"
        )
    for task in inside:
        resolved(task, {**task.machine.env, **task.machine.verifier_env}, config.env)
    client = await _client(config, inside) if inside else None
    outside = len(inside) < len(tasks)
    sandbox = await sandboxes.find(config, base_url=base_url, socket=socket) if outside else Sandbox()
    made = Places(config, folder, sandbox=sandbox, client=client, owner=owner)
    if inside:
        sandboxes.shown(config)
        made.port, made.network = sandboxes.reach(config, base_url, socket)
        made.socket = socket
    return made


async def _client(config: RunnerConfig, tasks: list[Task]) -> Client:
    try:
        return await containers.find(config.container_client)
    except SandboxError as e:
        hint = (
            ""
            if config.sandbox == "container"
            else ('; or set runner.sandbox to "bubblewrap", which copies environment/ as it is')
        )
        raise SandboxError(
            f"task {tasks[0].name!r} ({len(tasks)} in all) is to run in a container, and {e}{hint}"
        ) from e


def contained(config: RunnerConfig, task: Task) -> bool:
    """Whether the task's programs run in a container."""
    return config.sandbox == "container" or (config.sandbox == "auto" and task.machine.named)


def whom(said: str, client: Client, uid: int, gid: int) -> tuple[str, int]:
    """(whom programs run as in a container, whom workspaces are given to outside; -1: nobody).

    said: runner.container_user. Root inside is this runner's user outside where containers need no root; elsewhere it
    would be this machine's root, so they run as the runner, or as nobody where that is root.
    """
    if said:
        user = said.partition(":")[0]
        return ("" if said == "image" else said), (
            int(user) if user.isdigit() and not uid and not client.rootless else -1
        )
    if client.rootless:
        return "0:0", -1
    return (f"{NOBODY}:{NOBODY}", NOBODY) if not uid else (f"{uid}:{gid}", -1)


def resolved(task: Task, env: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """`env` of a task with ${NAME} and ${NAME:-default} replaced from `known`: nothing of this process's environment.

    Raises `TaskError` for a name without a value.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] in known:
            return known[found[1]]
        if found[2] is None:
            raise TaskError(
                f"task {task.name!r} wants the variable {found[1]!r}; set it in [runner.env], which harnesses see, "
                "too, or leave the task out with runner.tasks_except"
            )
        return found[2]

    return {name: _TEMPLATE.sub(value, text) for name, text in env.items()}


def tag(task: Task) -> str:
    """What the image that is built for a task is called: two tasks of the same name in other places are told apart."""
    name = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-") or "task"
    where = hashlib.sha256(str(task.folder.resolve()).encode()).hexdigest()[:12]
    return f"localhost/gyre-task/{name}:{where}"
