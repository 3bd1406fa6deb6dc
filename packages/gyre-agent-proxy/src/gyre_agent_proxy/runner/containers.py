"""Docker or podman, by its command line: which one works here, images, and the end of containers by their labels.

Every call has a deadline, after which its client is ended. Containers carry the labels `gyre.run`, which is the run's
owner name (owner.py), and `gyre.execution`; only what carries this run's own is ever removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from gyre_agent_proxy.runner.errors import SandboxError

RUN, EXECUTION = "gyre.run", "gyre.execution"  # labels
_CALL = 60.0  # seconds
_REMOVE = 120.0  # seconds for containers to be gone
_PAUSE = 0.5
_SHOWN = 2000  # characters of what a client printed, in an error


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """A container program of this machine that works."""

    path: str
    kind: Literal["docker", "podman"]
    rootless: bool = False  # root in a container is this runner's user outside


class ContainerError(SandboxError):
    """The container program refused, failed, or did not end in time."""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image that is on this machine."""

    id: str
    workdir: str = ""  # empty: it names none
    env: tuple[str, ...] = ()  # NAME=VALUE


async def find(name: str = "") -> Client:
    """The container program `name`, or the first that works of docker and podman. Raises `SandboxError`."""
    problems = []
    for each in (name,) if name else ("docker", "podman"):
        try:
            return await _probe(each)
        except ContainerError as e:
            problems.append(str(e))
    raise SandboxError(
        f"no container can be started: {'; '.join(problems)}; install podman (Debian, Ubuntu: apt-get install podman), "
        "start docker, or name one that works in runner.container_client"
    )


async def _probe(name: str) -> Client:
    path = shutil.which(name)
    if path is None:
        raise ContainerError(f"there is no {name!r} on PATH")
    kind: Literal["docker", "podman"] = "podman" if "podman" in (await call(path, "--version")).lower() else "docker"
    if kind == "podman":  # also one that calls itself docker
        said = await call(path, "info", "--format", "{{.Host.Security.Rootless}}")
        return Client(path=path, kind=kind, rootless=said.strip() == "true")
    said = await call(path, "info", "--format", "{{json .SecurityOptions}}")
    return Client(path=path, kind=kind, rootless="name=rootless" in said)


async def call(path: str, *arguments: str, within: float = _CALL, log: Path | None = None) -> str:
    """Run the client; returns what it prints. log: a file that takes it as it comes, instead.

    Raises `ContainerError` with the end of its error output.
    """
    what = f"{os.path.basename(path)} {' '.join(arguments[:2])}"
    pipe = asyncio.subprocess.PIPE
    out = log.open("ab") if log is not None else None
    try:
        process = await asyncio.create_subprocess_exec(
            path,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out or pipe,
            stderr=out or pipe,
            start_new_session=True,
        )
    except OSError as e:
        raise ContainerError(f"{what} cannot be run: {e}") from e
    finally:
        if out is not None:
            out.close()
    try:
        async with asyncio.timeout(within):
            printed, errors = await process.communicate()
    except TimeoutError:
        raise ContainerError(f"{what} did not end in {within:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = _end(log) if log is not None else errors.decode(errors="replace")
        raise ContainerError(f"{what} ended with exit code {process.returncode}: {said.strip()[-_SHOWN:]}")
    return "" if log is not None else printed.decode(errors="replace")


def _end(log: Path) -> str:
    with log.open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - _SHOWN))
        return f.read().decode(errors="replace")


# --- images ---------------------------------------------------------------------------------------------------------


async def image(client: Client, reference: str) -> Image | None:
    """What is known of an image of this machine; None: it is not there."""
    try:
        printed = await call(client.path, "image", "inspect", reference)
    except ContainerError:
        return None
    try:
        (said,) = msgspec.json.decode(printed, type=list[dict[str, Any]])
        config = said.get("Config") or {}
        return Image(id=said["Id"], workdir=config.get("WorkingDir") or "", env=tuple(config.get("Env") or ()))
    except (msgspec.DecodeError, ValueError, KeyError) as e:
        raise ContainerError(f"{client.path} image inspect {reference} said {printed[:200]!r}: {e}") from e


async def fetched(client: Client, reference: str, within: float, log: Path) -> Image:
    """The image `reference`, pulled if it is not there."""
    if (found := await image(client, reference)) is None:
        await call(client.path, "pull", reference, within=within, log=log)
        found = await image(client, reference)
    if found is None:
        raise ContainerError(f"{client.path} pulled {reference!r}, but does not know it; name it in full")
    return found


async def built(client: Client, folder: Path, tag: str, labels: Mapping[str, str], within: float, log: Path) -> Image:
    """The image of `folder`/Dockerfile, built with `folder` as its context."""
    await call(client.path, *build(folder, tag, labels), within=within, log=log)
    if (found := await image(client, tag)) is None:
        raise ContainerError(f"{client.path} built {tag!r}, but does not know it")
    return found


def build(folder: Path, tag: str, labels: Mapping[str, str]) -> list[str]:
    """The arguments that build it."""
    marks = [part for name, value in labels.items() for part in ("--label", f"{name}={value}")]
    return ["build", "--file", str(folder / "Dockerfile"), "--tag", tag, *marks, str(folder)]


async def extract(client: Client, image: Image, workdir: str, to: Path, labels: Mapping[str, str]) -> None:
    """Copy what `image` has in `workdir` to the new folder `to`, made whole or not at all."""
    partial = to.with_name(f"{to.name}.partial")
    await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
    partial.mkdir(parents=True)
    marks = [part for name, value in labels.items() for part in ("--label", f"{name}={value}")]
    # A container that is never started; the command is there for images that have none.
    made = (await call(client.path, "create", "--network", "none", *marks, image.id, "true")).split()[-1]
    try:
        await call(client.path, "cp", f"{made}:{workdir}/.", str(partial), within=10 * _CALL)
    finally:
        await call(client.path, *removal(client.kind, made))
    partial.rename(to)


# --- the end of containers ------------------------------------------------------------------------------------------


def removal(kind: str, *names: str) -> list[str]:
    """The arguments that end and remove containers at once; podman would wait ten seconds."""
    return ["rm", "--force", "--volumes", *(("--time", "0") if kind == "podman" else ()), *names]


async def labelled(client: Client, labels: Mapping[str, str]) -> dict[str, str]:
    """Containers that carry all of `labels`, running or not, and the execution each one belongs to."""
    filters = [part for name, value in labels.items() for part in ("--filter", f"label={name}={value}")]
    shown = (
        '{{.ID}} {{.Label "' + EXECUTION + '"}}'
        if client.kind == "docker"
        else '{{.ID}} {{index .Labels "' + (EXECUTION + '"}}')
    )
    lines = (await call(client.path, "ps", "--all", "--no-trunc", *filters, "--format", shown)).splitlines()
    return {words[0]: words[1] if len(words) > 1 else "" for line in lines if (words := line.split())}


async def remove(client: Client, labels: Mapping[str, str], within: float = _REMOVE) -> dict[str, str]:
    """End and remove what carries `labels`; returns what was there.

    Raises `ContainerError` when it is not gone in time: it would go on in a workspace that is scored.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + within
    found: dict[str, str] = {}
    while True:
        try:
            left = await labelled(client, labels)
            found |= left
            if not left:
                return found
            await call(client.path, *removal(client.kind, *left))
            continue
        except ContainerError as e:
            if clock() > end:
                names = ", ".join(sorted(set(found.values()))) or "its executions"
                raise ContainerError(
                    f"containers of {names} cannot be removed ({e}); remove what has the label "
                    f"{'='.join((RUN, labels[RUN]))!r}, then start again"
                ) from e
        await asyncio.sleep(_PAUSE)


def environment() -> dict[str, str]:
    """What the client itself needs of this process's environment."""
    return {name: value for name, value in os.environ.items() if own(name)}


def own(name: str) -> bool:
    """Whether the client itself reads this variable."""
    return name in _OWN or name.startswith(_OWN_PREFIXES)


_OWN = {"PATH", "HOME", "TMPDIR", "USER", "LOGNAME", "LANG", "SSH_AUTH_SOCK", "_CONTAINERS_USERNS_CONFIGURED"}
_OWN_PREFIXES = ("LD_", "DOCKER_", "CONTAINER_", "CONTAINERS_", "XDG_", "DBUS_", "STORAGE_", "BUILDAH_", "REGISTRY_")
