"""Look up a Harbor dataset and fetch its tasks; a process of its own, since the library is large and prints.

    python -P -m gyre_agent_proxy.runner.harbor     stdin: sources.Request, stdout: sources.Found, both as JSON

A dataset by name comes from a registry (a file, a URL, or Harbor's own), or from the hub when it has an organisation. A
folder with a dataset.toml lists its tasks by name and digest: one that lies beside it must be what the digest says, any
other one is fetched by its digest.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from gyre_agent_proxy.runner.errors import TaskError
from gyre_agent_proxy.runner.sources import Found, Request


def main() -> None:
    """Answer one request."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what the library prints is no part of the answer
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
        found = Found(tasks=named(asyncio.run(_find(asked))))
    except ImportError as e:
        found = Found(error=str(e), missing=True)
    except TaskError as e:
        found = Found(error=str(e))
    except Exception as e:  # whatever the library and the network raise
        found = Found(error=f"{type(e).__name__}: {e}")
    with os.fdopen(answer, "wb") as out:
        out.write(msgspec.json.encode(found))


def named(tasks: list[tuple[str, Path]]) -> dict[str, str]:
    """Folders by a name that can be a file's; raises `TaskError` for two tasks of the same name."""
    folders: dict[str, str] = {}
    for full, folder in tasks:
        name = full.replace("/", "__")
        if name in folders:
            raise TaskError(f"two of its tasks are named {full!r}: {folders[name]!r} and {str(folder)!r}")
        folders[name] = str(folder)
    if not folders:
        raise TaskError("it has no tasks")
    return folders


async def _find(asked: Request) -> list[tuple[str, Path]]:
    if asked.folder:
        return await _listed(Path(asked.folder))
    items = await _client(asked).download_dataset(asked.name, on_task_download_start=_say)
    return [(item.id.get_name(), Path(item.downloaded_path).resolve()) for item in items]


def _client(asked: Request) -> Any:
    if "/" in asked.name and not asked.registry:
        from harbor.registry.client.package import PackageDatasetClient

        return PackageDatasetClient()
    from harbor.registry.client.factory import RegistryClientFactory

    if "://" in asked.registry:
        return RegistryClientFactory.create(registry_url=asked.registry)
    return RegistryClientFactory.create(registry_path=Path(asked.registry) if asked.registry else None)


async def _listed(folder: Path) -> list[tuple[str, Path]]:
    from harbor.models.dataset.manifest import DatasetManifest
    from harbor.models.task.config import TaskConfig
    from harbor.models.task.id import PackageTaskId
    from harbor.publisher.packager import Packager
    from harbor.tasks.client import TaskClient

    beside: dict[str, Path] = {}
    for file in sorted(folder.glob("*/task.toml")):
        said = TaskConfig.model_validate_toml(file.read_text())
        if said.task is not None:
            beside[said.task.name] = file.parent
    refs = DatasetManifest.from_toml_file(folder / "dataset.toml").get_unique_tasks()
    for ref in refs:
        if (path := beside.get(ref.name)) is None:
            continue
        is_ = f"sha256:{Packager.compute_content_hash(path)[0]}"
        if is_ != ref.digest:
            raise TaskError(
                f"dataset.toml pins {ref.name} to {ref.digest}, but {str(path)!r} is {is_}; restore it, or update the "
                "list with Harbor's own program"
            )
    absent = [ref for ref in refs if ref.name not in beside]
    ids = [PackageTaskId(org=ref.org, name=ref.short_name, ref=ref.digest) for ref in absent]
    fetched = (await TaskClient().download_tasks(ids, on_task_download_start=_say)).paths if ids else []
    paths = {**beside, **{ref.name: Path(path) for ref, path in zip(absent, fetched, strict=True)}}
    return [(ref.name, paths[ref.name]) for ref in refs]


def _say(task: Any) -> None:
    print(f"fetching {task.get_name()}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
