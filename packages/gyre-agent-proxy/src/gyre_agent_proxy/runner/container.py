"""One task's container: what docker or podman is told, so that a program in it sees what it would in the sandbox.

    its image       all of its file system, thrown away at the end but for
    the workspace   mounted where the image has its working directory, and a private home
    network         none; the proxy's unix socket is mounted, and bridged to its port on 127.0.0.1 (enter.py)
    limits          processors, memory, processes and the size of a file; no capabilities, no new privileges
    labels          gyre.run and gyre.execution

The first program is enter.py under this runner's own Python, mounted for it, or under one that the image has. What the
runner gives a program as environment goes through the client's own, not on its command line, which others can read;
what a task says goes on the command line, since a client that is a script must not be told `BASH_ENV` by it.
`contained.py` runs the client and removes the container when it ends, is told to end, or its guard is.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gyre_agent_proxy.runner import contained, containers, enter, installs, limits
from gyre_agent_proxy.runner.containers import EXECUTION, RUN, Client
from gyre_agent_proxy.runner.errors import SandboxError
from gyre_agent_proxy.runner.sandbox import View, give, host_path

_GYRE = Path("/run/gyre")  # in the container: enter.py, limits.py, proxy/, python/
_LIBRARIES = "LD_LIBRARY_PATH"
TESTS, LOGS = Path("/tests"), Path("/logs")  # where Harbor's verifiers look


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """How programs of one task are shut in; see the module."""

    client: Client
    image: str  # its id
    workdir: Path = Path("/workspace")
    owner: str = ""  # the run's owner name
    user: str = ""  # UID:GID inside; empty: the image's
    uid: int = -1  # whom workspaces are given to; -1: they stay this user's
    network: bool = False  # the machine's
    evaluator_network: bool = False  # verifiers have the machine's
    port: int = 0  # of the proxy, as programs are told …
    socket: Path | None = None  # … and where it is reached, in a folder of its own
    interpreter: str = ""  # a Python the image has; empty: this runner's own is mounted
    read: tuple[Path, ...] = ()  # shown, too
    env: dict[str, str] = {}
    verifier_env: dict[str, str] = {}
    cpus: float | None = None
    memory_mb: int | None = None
    pids: int = 4096
    file_limit: int = 0  # bytes; 0: none

    @property
    def python(self) -> str:
        """The Python that is there in the container whatever the image holds."""
        if self.interpreter:
            return self.interpreter
        base, program = Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()
        return str(_GYRE / "python" / program.relative_to(base)) if program.is_relative_to(base) else str(program)

    @staticmethod
    def libraries(image: Sequence[str]) -> dict[str, str]:
        """What this runner's own Python needs to find its library there; image: the NAME=VALUE that the image sets."""
        if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
            return {}
        own = [each.partition("=")[2] for each in image if each.startswith(f"{_LIBRARIES}=")]
        return {_LIBRARIES: ":".join((str(_GYRE / "python" / "lib"), *own))}

    def places(self, workspace: Path, tests: Path | None = None, logs: Path | None = None) -> dict[Path, Path]:
        """Where a program sees these folders."""
        found = {workspace: self.workdir, tests: TESTS, logs: LOGS}
        return {path: inside for path, inside in found.items() if path is not None}

    def limited(self, seconds: int, memory: int, program: Sequence[str]) -> list[str]:
        """`program` with limits (limits.py); memory: bytes of address space, or what the task says if it is more."""
        memory = max(memory, (self.memory_mb or 0) << 20)
        return [self.python, "-I", "-S", str(_GYRE / "limits.py"), str(seconds), str(memory), *program]

    def launch(self, argv: Sequence[str], env: Mapping[str, str], view: View) -> tuple[list[str], dict[str, str]]:
        """(`argv` in the container, the environment of the command that starts it)."""
        name = self.name(view)
        command = [self.client.path, *self.run(argv, env, view)]
        program = [sys.executable, "-I", "-S", contained.__file__, self.client.kind, self.client.path, name, *command]
        return program, {**containers.environment(), **{n: v for n, v in env.items() if not containers.own(n)}}

    def name(self, view: View) -> str:
        """The container's."""
        return "-".join(part for part in ("gyre", self.owner[:12], view.execution, view.part) if part)

    def run(self, argv: Sequence[str], env: Mapping[str, str], view: View) -> list[str]:
        """The client's arguments."""
        network = self.network or (self.evaluator_network and not view.proxy)
        bridged = view.proxy and not self.network and self.socket is not None
        out = ["run", "--name", self.name(view), "--label", f"{RUN}={self.owner}"]
        out += ["--label", f"{EXECUTION}={view.execution}", "--pull", "never", "--log-driver", "none"]
        out += ["--network", "host" if network else "none", "--cap-drop", "ALL"]
        out += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        out += ["--pids-limit", str(self.pids)]
        out += ["--user", self.user] if self.user else []
        out += ["--cpus", f"{self.cpus:g}"] if self.cpus is not None else []
        if self.memory_mb is not None:
            out += ["--memory", f"{self.memory_mb}m", "--memory-swap", f"{self.memory_mb}m"]
        out += ["--interactive"] if view.stdin else []
        out += ["--workdir", str(view.places.get(view.cwd, view.cwd)), "--entrypoint", self.python]
        for target, (source, readonly) in self._mounts(view, bridged=bridged).items():
            out += ["--mount", _mount(source, target, readonly=readonly)]
        empty = ",notmpcopyup" if self.client.kind == "podman" else ""  # it would copy what it is to hide
        for path in sorted(self._masks(view)):
            out += ["--mount", f"type=tmpfs,target={_named(path)}{empty}"]
        for key, value in sorted(self._env(env, view).items()):
            out += ["--env", key if key in env and not containers.own(key) else f"{key}={value}"]
        out += [self.image, "-I", "-S", str(_GYRE / "enter.py"), "-1"]
        out += [str(self.port), str(_GYRE / "proxy" / self.socket.name)] if bridged and self.socket else ["0", ""]
        return [*out, str(self.file_limit), *self._program(argv)]

    def give(self, *folders: Path) -> None:
        """Make what is in `folders` the program's own, if it does not run as this user."""
        if self.uid >= 0:
            give(self.uid, *folders)

    async def ended(self, execution: str) -> None:
        """Be sure that nothing of `execution` runs. Raises `ContainerError`."""
        await containers.remove(self.client, {RUN: self.owner, EXECUTION: execution})

    def _env(self, env: Mapping[str, str], view: View) -> dict[str, str]:
        task = self.env if view.proxy else {**self.env, **self.verifier_env}
        return {**task, **{n: v for n, v in env.items() if (n, v) != ("PATH", host_path())}}  # the image has its own

    def _program(self, argv: Sequence[str]) -> list[str]:
        """A program that is installed outside the system's folders is mounted where it is, and found there."""
        found = shutil.which(argv[0])
        if found is None or installs.within(Path(os.path.abspath(found)), installs.SYSTEM):
            return list(argv)
        return [os.path.abspath(found), *argv[1:]]

    def _mounts(self, view: View, *, bridged: bool) -> dict[Path, tuple[Path, bool]]:
        """What is mounted: where -> (path, whether read-only)."""
        mounts = {_GYRE / "enter.py": (Path(enter.__file__), True), _GYRE / "limits.py": (Path(limits.__file__), True)}
        if not self.interpreter:
            mounts[_GYRE / "python"] = (Path(sys.base_prefix).resolve(), True)
        if bridged and self.socket is not None:
            mounts[_GYRE / "proxy"] = (self.socket.parent, True)
        write = {path: path for path in view.write if not any(place.is_relative_to(path) for place in view.places)}
        write |= view.places
        read, masks = self._read(view), self._masks(view)
        for path in sorted(read):
            there = installs.within(path, read - {path}) and not installs.within(path, masks)
            if not there and not any(inside.is_relative_to(path) for inside in view.places.values()):
                mounts[path] = (path, True)
        return mounts | {inside: (path, False) for path, inside in write.items()}

    def _read(self, view: View) -> set[Path]:
        """What is shown of this machine: nothing of the system, which the image has itself, unless it is asked for."""
        return {*self.read, *(path for path in view.read if not installs.within(path, installs.SYSTEM))}

    def _masks(self, view: View) -> set[Path]:
        """What is not to be seen in a folder that is shown."""
        read = self._read(view)
        return {path for path in view.hidden if installs.within(path, read)}


def _mount(source: Path, target: Path, *, readonly: bool) -> str:
    return f"type=bind,source={_named(source)},target={_named(target)}" + (",readonly" if readonly else "")


def _named(path: Path) -> Path:
    if any(c in str(path) for c in ',"\n'):
        raise SandboxError(f"{str(path)!r} cannot be mounted: commas and quotes are not possible; rename it")
    return path
