"""Two ways for weights into a running engine, whose generation is paused meanwhile.

    disk      a Hugging Face folder in a memory file system, which the engine reads
    tensor    shared memory, bucket by bucket: on a GPU device memory by CUDA IPC, else files of torch's own

Either labels the weights with its last step, and flushes the prefix cache in the same step if told to: nothing runs
in between.
"""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_sched.engine.client import EngineClient
from gyre_sched.engine.config import EngineConfig
from gyre_transport.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BUCKET = 1 << 30  # bytes; what the weights take beside the engine's own, on their way by `tensor`


def write_folder(snapshot: Snapshot, model: Path, folder: Path) -> None:
    """Make `folder` a Hugging Face folder of the snapshot; everything but the weights is linked from `model`.

    Raises `DataError` (no room), `OSError`.
    """
    for path in model.iterdir():
        if path.is_file() and not path.name.endswith((*_WEIGHTS, ".index.json")):
            (folder / path.name).symlink_to(path.resolve())
    snapshot.write_safetensors(folder / "model.safetensors")


class Disk:
    """Weights as a folder below `root`, removed by `close`."""

    def __init__(self, engine: EngineClient, snapshot: Snapshot, model: Path, root: Path) -> None:
        self._engine, self._snapshot, self._model = engine, snapshot, model
        self._folder = Path(tempfile.mkdtemp(dir=root, prefix=f"gyre-{engine.name}-v{snapshot.version}-"))

    async def prepare(self) -> None:
        """Write it, while the engine generates."""
        await asyncio.to_thread(write_folder, self._snapshot, self._model, self._folder)

    async def load(self, label: str, *, flush: bool, deadline: float) -> None:
        """Have the engine read it."""
        await self._engine.update_weights_from_disk(str(self._folder), label, flush=flush, deadline=deadline)

    async def close(self) -> None:
        """Remove it."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


class Tensors:
    """Weights handed over in memory."""

    def __init__(self, engine: EngineClient, snapshot: Snapshot, config: EngineConfig, *, cuda: bool) -> None:
        self._engine, self._snapshot, self._cuda, self._ranks = engine, snapshot, cuda, config.tensor_parallel

    async def prepare(self) -> None:
        """Import torch, while the engine generates."""
        await asyncio.to_thread(__import__, "torch.multiprocessing")

    async def load(self, label: str, *, flush: bool, deadline: float) -> None:
        """Hand the buckets over, one at a time."""
        await self._engine.begin_weight_update()
        buckets = list(_buckets(self._snapshot))
        for number, names in enumerate(buckets):
            last = number == len(buckets) - 1
            tensors, payload = await asyncio.to_thread(_share, self._snapshot, names, self._cuda)
            await self._engine.update_weights_from_tensor(
                [payload] * self._ranks, label if last else None, flush=flush and last, deadline=deadline
            )
            del tensors  # the engine has copied them
        await self._engine.end_weight_update()

    async def close(self) -> None:
        """Nothing is left."""


def _buckets(snapshot: Snapshot) -> Iterator[list[str]]:
    """Names of the tensors, some at a time."""
    names: list[str] = []
    size = 0
    for name, (_, _, data) in snapshot.items():
        if names and size + data.nbytes > _BUCKET:
            yield names
            names, size = [], 0
        names.append(name)
        size += data.nbytes
    yield names


def _share(snapshot: Snapshot, names: list[str], cuda: bool) -> tuple[list[tuple[str, torch.Tensor]], str]:
    """(tensors in memory that another process can open, how it does, as SGLang takes it).

    The latter is a pickle of handles, in base64: the engine's own format for this request.
    """
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing

    from gyre_transport.torch import tensors

    views = tensors(snapshot)
    chosen = [(name, views[name]) for name in names]
    if cuda:
        shared = [(name, view.to("cuda")) for name, view in chosen]
        torch.cuda.synchronize()
    else:
        torch.multiprocessing.set_sharing_strategy("file_system")  # the engine cannot be sent file descriptors
        shared = _in_one_file(chosen)
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(shared)
    return shared, base64.b64encode(buffer.getvalue()).decode()


def _in_one_file(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Copies that lie in one piece of shared memory."""
    import torch

    sizes = [-(-t.nbytes // 64) * 64 for _, t in tensors]
    memory: Any = torch.empty(max(sum(sizes), 1), dtype=torch.uint8).share_memory_()
    shared, at = [], 0
    for (name, tensor), size in zip(tensors, sizes, strict=True):
        copy = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        shared.append((name, copy))
        at += size
    return shared
