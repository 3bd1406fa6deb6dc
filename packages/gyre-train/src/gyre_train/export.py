"""A checkpoint as a Hugging Face folder, without Megatron."""

from __future__ import annotations

from pathlib import Path

import torch

from gyre_train import architecture, checkpoint, hf


def export_checkpoint(path: Path, model: Path, out: Path) -> Path:
    """Write `path` (step-<n>) as the folder `out`, with `model`'s config and tokenizer, in the dtype it was trained in.

    Raises `CheckpointError`, `UnsupportedModel`, `WeightsError`.
    """
    arch = architecture.read(model)
    meta = checkpoint.read_meta(path)
    dtype = torch.bfloat16 if meta.dtype == "bf16" else torch.float32
    tensors = {
        key: tensor.to(dtype)
        for name, main in checkpoint.read_part(path, "main").items()
        for key, tensor in hf.from_megatron(arch, name, main)
    }
    return hf.write_folder(model, out, tensors)
