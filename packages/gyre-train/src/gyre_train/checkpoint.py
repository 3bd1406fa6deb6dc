"""Checkpoints: step-<n>/ folders that exist whole or not at all, and resume bit for bit.

step-12/main.safetensors      fp32 parameters, Megatron names
        <moment>.safetensors  one an optimizer moment, same names
        meta.json             version, dtype, model folder, Adam's step, the generator's state
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gyre_train.errors import CheckpointError
from gyre_train.hf import publish

_FOLDER = re.compile(r"step-(\d+)")


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """meta.json"""

    version: int  # optimizer steps taken
    model: str  # Hugging Face folder the run started from
    dtype: str  # of the parameters: "bf16" or "fp32"
    adam_step: float  # updates Adam has made
    parts: tuple[str, ...]  # the safetensors files, without suffix
    generator: bytes  # CPU generator state
    format: int = 1


State = dict[str, dict[str, torch.Tensor]]  # part -> parameter name -> fp32 tensor


def save(folder: Path, meta: Meta, state: Mapping[str, Mapping[str, torch.Tensor]], *, keep: int) -> Path:
    """Write `folder`/step-<version> beside, sync, rename; then delete all but the newest `keep`.

    Raises `CheckpointError`.
    """
    out = folder / f"step-{meta.version}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder, prefix=".partial-"))
        try:
            for part in meta.parts:
                save_file(
                    {n: t.detach().cpu().contiguous() for n, t in state[part].items()}, partial / f"{part}.safetensors"
                )
            (partial / "meta.json").write_bytes(msgspec.json.encode(meta))
            publish(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(
            f"cannot write the checkpoint {str(out)!r}: {e}; free space, lower train.keep_checkpoints, or use another "
            "run directory"
        ) from e
    for old in _all(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return out


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`, None when there is none."""
    found = _all(folder)
    return found[-1] if found else None


def read_meta(path: Path) -> Meta:
    """Raises `CheckpointError`."""
    try:
        return msgspec.json.decode((path / "meta.json").read_bytes(), type=Meta)
    except (OSError, msgspec.MsgspecError) as e:
        raise CheckpointError(f"{str(path)!r} is not a checkpoint: {e}; name a step-<n> folder") from e


def read_part(path: Path, part: str) -> dict[str, torch.Tensor]:
    """One part of a checkpoint: parameter name -> fp32 tensor. Raises `CheckpointError`."""
    try:
        tensors: dict[str, torch.Tensor] = load_file(path / f"{part}.safetensors")
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"cannot read {part!r} of the checkpoint {str(path)!r}: {e}; resume from another") from e
    return tensors


def _all(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first; left-overs of interrupted writes are not among them."""
    found = [
        (int(m[1]), p)
        for p in folder.glob("step-*")
        if (m := _FOLDER.fullmatch(p.name)) and (p / "meta.json").is_file()
    ]
    return [path for _, path in sorted(found)]
