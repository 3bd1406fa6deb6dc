"""New weights for an engine: a snapshot's manifest in, a version served out.

    manifest ──pull──▶ memory ──prepare──▶ a folder, or shared memory ──▶ paused engine loads it ──▶ label, checksums
               (the engine generates on)   (`loading`)                    (requests stay open)       (`verify`)

Requests in flight are either retracted (put back into the queue, computed again under the new weights; the prefix cache
is flushed) or stopped in place (they go on with the KV they have; the cache is kept apart by weights). None is aborted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from gyre_sched.engine import verify
from gyre_sched.engine.client import EngineClient
from gyre_sched.engine.config import EngineConfig, Pause
from gyre_sched.engine.loading import Disk, Tensors
from gyre_sched.errors import EngineError, RefreshError, WeightsUnknown
from gyre_transport.errors import TransportError
from gyre_transport.snapshot import Manifest, pull

log = logging.getLogger(__name__)

_ROOM = 1.1  # free space needed, relative to the snapshot


def decode(manifest: bytes, version: int) -> Manifest:
    """The manifest of `version`. Raises `RefreshError` if it is another's, or no manifest."""
    if not manifest:
        raise RefreshError(f"version {version} was asked for without a manifest; the core must publish it first")
    try:
        decoded = msgspec.msgpack.decode(manifest, type=Manifest)
    except msgspec.DecodeError as e:
        raise RefreshError(f"the manifest of version {version} does not decode: {e}; is the core another Gyre?") from e
    if decoded.version != version:
        raise RefreshError(f"expected the manifest of version {version}, got that of version {decoded.version}")
    return decoded


def same_weights(a: Manifest, b: Manifest) -> bool:
    """Whether two snapshots hold the same bytes: a core that was restored makes a version a second time."""
    return a.version == b.version and a.entries == b.entries


def shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a Hugging Face folder, from the headers of its .safetensors files.

    Raises `RefreshError`.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(model.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        except (OSError, ValueError) as e:
            raise RefreshError(f"cannot read the tensors of {str(path)!r}: {e}; is the model folder whole?") from e
        found |= {name: tuple(t["shape"]) for name, t in header.items() if name != "__metadata__"}
    return found


def check(manifest: Manifest, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise `RefreshError` unless the snapshot has every tensor of the model.

    SGLang keeps the old values of a tensor that a folder lacks, which would be a mix of versions, and cannot undo a
    load that stops half-way.
    """
    given = {e.name: e.shape for e in manifest.entries}
    for name, shape in expected.items():
        if name not in given and _derived(name, expected):
            continue
        if given.get(name) != shape:
            came = f"shape {given[name]}" if name in given else "no such tensor"
            raise RefreshError(
                f"version {manifest.version} of {manifest.model!r} has another {name!r} than the model folder: "
                f"expected shape {shape}, got {came}; do trainer and engine start from the same model?"
            )


def _derived(name: str, expected: dict[str, tuple[int, ...]]) -> bool:
    """Tensors some folders carry although the model computes or ties them: a trainer has no place for them."""
    tied = name == "lm_head.weight" and expected.get("model.embed_tokens.weight") == expected[name]
    return tied or name.endswith("rotary_emb.inv_freq")


def scratch_folder(configured: str, nbytes: int) -> Path:
    """Where to write `nbytes`: the configured folder, else a memory file system with room, else the temporary folder.

    Raises `RefreshError` when there is no room.
    """
    if configured:
        candidates = [Path(configured)]
    else:
        memory = (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm")  # noqa: S108  (a memory file system, by its name)
        candidates = [Path(c) for c in (*memory, tempfile.gettempdir()) if c]
    for folder in candidates:
        if folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > nbytes * _ROOM:
            return folder
    raise RefreshError(
        f"no room for {nbytes:,} bytes of weights in {', '.join(map(repr, map(str, candidates)))}; free some, or name "
        "a folder in engine.scratch"
    )


def label(manifest: Manifest) -> str:
    """What an engine calls these weights: their version, and a digest of what they are.

    A core that was restored makes a version a second time, with other bytes: KV pages of the first must not be taken
    for pages of the second.
    """
    content = msgspec.msgpack.encode([(e.name, e.checksum) for e in manifest.entries])
    return f"{manifest.version}-{hashlib.blake2b(content, digest_size=4).hexdigest()}"


async def refresh(
    engine: EngineClient, manifest: Manifest, model: Path, config: EngineConfig, *, cuda: bool = False, deadline: float
) -> None:
    """Give `engine`, which serves the folder `model`, the weights of `manifest`, and check that it serves them.

    Raises `RefreshError` when nothing was changed, and `WeightsUnknown` when the update failed: the engine is then left
    paused, with its requests, and must be ended.
    """
    end = time.monotonic() + deadline
    check(manifest, await asyncio.to_thread(shapes, model))
    way: Disk | Tensors | None = None
    try:
        try:
            snapshot = await asyncio.to_thread(pull, manifest, deadline=deadline)
            if config.refresh == "disk":
                way = Disk(engine, snapshot, model, scratch_folder(config.scratch, manifest.nbytes))
            else:
                way = Tensors(engine, snapshot, config, cuda=cuda)
            await way.prepare()
            checksums = {}
            if verify.possible(config, cuda=cuda):
                checksums = await asyncio.to_thread(verify.expected, snapshot, config.dtype)
        except (TransportError, OSError) as e:
            raise RefreshError(
                f"engine {engine.name} cannot get version {manifest.version}: {type(e).__name__}: {e}"
            ) from e
        await _load(engine, way, label(manifest), checksums, config.refresh_pause, end)
    finally:
        if way is not None:
            await way.close()


async def _load(
    engine: EngineClient, way: Disk | Tensors, name: str, checksums: dict[str, str], pause: Pause, end: float
) -> None:
    try:
        await engine.pause(pause)
        # Requests that stay where they are keep their pages, so the cache is not flushed; it is kept apart by weights.
        await way.load(name, flush=pause == "retract", deadline=max(end - time.monotonic(), 1.0))
        if (served := await engine.weight_version()) != name:
            raise WeightsUnknown(f"engine {engine.name} loaded {name}, but says it serves {served!r}")
        if checksums:
            verified = verify.compare(checksums, await engine.checksum(), engine.name, name)
            log.info("engine %s has the weights %s: %d tensors verified", engine.name, name, verified)
        await engine.resume()
    except Exception as e:  # whatever it was: the engine is paused, with some weights or other
        why = str(e) if isinstance(e, EngineError) else f"{type(e).__name__}: {e}"
        raise WeightsUnknown(f"updating engine {engine.name} to {name} failed: {why}") from e
