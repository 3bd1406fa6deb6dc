"""What a Hugging Face folder's config.json says about a dense decoder, refused where the trainer would not be exact.

Supported: `llama`, `qwen2` and `qwen3` (dense), plain or llama3-scaled RoPE, tied or untied embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from gyre_train.errors import UnsupportedModel

SUPPORTED = ("llama", "qwen2", "qwen3")


class Llama3Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3.1's frequency scaling; names as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder. Sizes in elements."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    groups: int  # key/value heads
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    theta: float  # RoPE base
    scaling: Llama3Rope | None
    tied: bool  # output layer = input embedding
    qk_norm: bool
    qkv_bias: bool
    max_positions: int


def read(folder: str | Path) -> Architecture:
    """Read `folder`/config.json; raises `UnsupportedModel` for what cannot be reproduced exactly."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise UnsupportedModel(f"cannot read the model config {str(path)!r}: {e}; give a Hugging Face folder") from e
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"{str(path)!r}: model_type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    _refuse(path, config)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        theta, scaling = _rope(path, config)
        return Architecture(
            model_type=kind,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            groups=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            theta=theta,
            scaling=scaling,
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
            max_positions=int(config.get("max_position_embeddings", 2048)),
        )
    except KeyError as e:
        raise UnsupportedModel(f"{str(path)!r} has no {e.args[0]!r}; is it a complete model config?") from e


def _refuse(path: Path, config: dict[str, Any]) -> None:
    wanted: dict[str, tuple[Any, Any]] = {  # key: (value here, the only value supported)
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "mlp_bias": (bool(config.get("mlp_bias", False)), False),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
        "attention_dropout": (float(config.get("attention_dropout") or 0.0), 0.0),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for key, (value, supported) in wanted.items():
        if value != supported:
            raise UnsupportedModel(f"{str(path)!r}: {key}={value!r} is not supported, only {supported!r}")


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """(theta, scaling) in today's spelling (`rope_parameters`) or the older one (`rope_theta`, `rope_scaling`)."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModel(f"{str(path)!r}: rope_type {kind!r} is not supported; supported: default, llama3")
    return theta, msgspec.convert({k: rope[k] for k in Llama3Rope.__struct_fields__}, Llama3Rope, strict=False)
