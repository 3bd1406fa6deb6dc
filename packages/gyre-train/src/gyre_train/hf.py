"""A Hugging Face folder's weights <-> Megatron parameters, bit for bit, and writing a folder.

Two layouts differ beyond names. `linear_qkv` interleaves by key/value group: [q of the group, k, v] for each group,
heads of `head_dim` rows. `linear_fc1` stacks [gate, up].
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gyre_train.architecture import Architecture
from gyre_train.errors import WeightsError

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def to_megatron(arch: Architecture, name: str, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The Megatron parameter `name`, made of the Hugging Face tensors that `get` returns by name."""
    if name in _TOP:
        return get(_TOP[name])
    prefix, rest = _layer(name)
    if rest in _LAYER:
        return get(prefix + _LAYER[rest])
    block, _, suffix = rest.rpartition(".")
    if block == "self_attention.linear_qkv":
        q, k, v = (get(f"{prefix}self_attn.{x}_proj.{suffix}") for x in "qkv")
        rows = (arch.heads // arch.groups * arch.head_dim, arch.head_dim, arch.head_dim)
        parts = [t.reshape(arch.groups, n, *t.shape[1:]) for t, n in zip((q, k, v), rows, strict=True)]
        return torch.cat(parts, dim=1).flatten(0, 1)
    if block == "mlp.linear_fc1":
        return torch.cat([get(f"{prefix}mlp.{x}_proj.{suffix}") for x in ("gate", "up")])
    raise WeightsError(f"no Hugging Face tensor is known for the Megatron parameter {name!r}")


def from_megatron(arch: Architecture, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors, named, that the Megatron parameter `name` holds; contiguous."""
    if name in _TOP:
        yield _TOP[name], value.contiguous()
        return
    prefix, rest = _layer(name)
    if rest in _LAYER:
        yield prefix + _LAYER[rest], value.contiguous()
        return
    block, _, suffix = rest.rpartition(".")
    if block == "self_attention.linear_qkv":
        rows = (arch.heads // arch.groups * arch.head_dim, arch.head_dim, arch.head_dim)
        grouped = value.reshape(arch.groups, sum(rows), *value.shape[1:])
        for x, part in zip("qkv", grouped.split(rows, dim=1), strict=True):
            yield f"{prefix}self_attn.{x}_proj.{suffix}", part.flatten(0, 1).contiguous()
        return
    if block == "mlp.linear_fc1":
        for x, part in zip(("gate", "up"), value.chunk(2), strict=True):
            yield f"{prefix}mlp.{x}_proj.{suffix}", part.contiguous()
        return
    raise WeightsError(f"no Hugging Face tensor is known for the Megatron parameter {name!r}")


def _layer(name: str) -> tuple[str, str]:
    if (found := _NAME.fullmatch(name)) is None:
        raise WeightsError(f"no Hugging Face tensor is known for the Megatron parameter {name!r}")
    return f"model.layers.{found[1]}.", found[2]


def load(
    arch: Architecture, parameters: Iterable[tuple[str, torch.nn.Parameter]], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy Hugging Face `tensors` into Megatron `parameters`, converting the dtype.

    Every shape is checked before the first value is written, and every tensor must be used: a failure changes nothing.
    Raises `WeightsError`.
    """
    used: set[str] = set()

    def get(name: str) -> torch.Tensor:
        if name not in tensors:
            raise WeightsError(f"the weights hold no {name!r}; have they been saved completely, for {arch.model_type}?")
        used.add(name)
        return tensors[name]

    made = []
    for name, parameter in parameters:
        value = to_megatron(arch, name, get)
        if value.shape != parameter.shape:
            raise WeightsError(f"{name!r} should have shape {tuple(parameter.shape)}, got {tuple(value.shape)}")
        made.append((parameter, value))
    ignorable = {"lm_head.weight"} if arch.tied else set()
    if unused := sorted(n for n in set(tensors) - used - ignorable if not n.endswith("rotary_emb.inv_freq")):
        raise WeightsError(f"weights the model has no place for: {unused[:5]} ({len(unused)} in all)")
    with torch.no_grad():
        for parameter, value in made:
            parameter.copy_(value)


def read_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, by name. Raises `WeightsError`."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            with safe_open(str(folder / name), framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118  (not a mapping)
        except (OSError, SafetensorError) as e:
            raise WeightsError(
                f"cannot read {str(folder / name)!r}: {e}; the folder must hold safetensors weights, as "
                "save_pretrained writes them"
            ) from e
    return tensors


def write_folder(source: str | Path, out: str | Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write `tensors` with `source`'s config and tokenizer as the Hugging Face folder `out`, whole or not at all.

    The folder is written beside `out`, synced and renamed; an `out` that exists is replaced. Raises `WeightsError`.
    """
    source, out = Path(source), Path(out)
    partial = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
        for file in sorted(source.iterdir()):
            if file.is_file() and not _holds_weights(file.name):
                shutil.copyfile(file, partial / file.name)
        config = json.loads((source / "config.json").read_text())
        dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors.values()}
        for key in ("dtype", "torch_dtype"):
            if key in config and len(dtypes) == 1:
                config[key] = next(iter(dtypes))
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(contiguous, partial / "model.safetensors", metadata={"format": "pt"})
        publish(partial, out)
    except (OSError, SafetensorError) as e:
        raise WeightsError(f"cannot write the model folder {str(out)!r}: {e}; make room, or name another place") from e
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def publish(partial: Path, out: Path) -> None:
    """Sync the files of `partial` and rename it to `out`, replacing what is there; both on one file system."""
    for file in partial.iterdir():
        _sync(file)
    _sync(partial)
    partial.chmod(0o755)  # temporary folders are private
    if out.exists():
        old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-old-"))
        out.rename(old / out.name)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(out)
    _sync(out.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _holds_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt", ".pth"))
