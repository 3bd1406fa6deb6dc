"""Tiny random policies as Hugging Face folders, and rows to train them on."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_traj.packing import Row

VOCAB = 128
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name: (model type, what differs from the base)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False, "rope_theta": 1000000.0}),
    "qwen3-tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 8}),
    "llama-scaled": ("llama", {"rope_parameters": _LLAMA3}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
}


def save_policy(folder: Path, family: str, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Save a random policy of `family`; its norms and biases are random too, so that a mix-up shows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**_BASE, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    return folder


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """policies(family, dtype="float32") -> a Hugging Face folder, made once a session."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, dtype: str = "float32") -> Path:
        key = (family, dtype)
        if key not in made:
            made[key] = save_policy(tmp_path_factory.mktemp("policy") / family, family, dtype=dtype)
        return made[key]

    return get


def random_rows(seed: int = 0, *, executions: int = 4, branches: int = 2) -> list[Row]:
    """Rows of some executions: `branches` trajectories each, sharing a prefix, all their own tokens targets."""
    rng = np.random.default_rng(seed)
    rows = []
    for e in range(executions):
        prefix = rng.integers(3, VOCAB, size=int(rng.integers(5, 20)))
        advantage = float(rng.normal())
        for b in range(branches):
            own = rng.integers(3, VOCAB, size=int(rng.integers(4, 24)))
            ids = np.concatenate([prefix, own]).astype(np.uint32)
            target = np.zeros(len(ids), dtype=bool)
            target[len(prefix) :] = rng.random(len(own)) < 0.8
            target[-1] = True
            rows.append(
                Row(
                    execution=f"e{e}",
                    trajectory=e * branches + b,
                    ids=ids,
                    target=target,
                    logprobs=np.where(target, rng.normal(-4.5, 0.3, size=len(ids)), 0).astype(np.float32),
                    weight=1.0 / 30,
                    advantage=advantage,
                )
            )
    return rows


@pytest.fixture
def rows() -> list[Row]:
    """Eight rows of four executions."""
    return random_rows()


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """`with full_disk():` no file can grow beyond 4 KiB; the kernel says so as it would of a full disk."""

    @contextmanager
    def limited() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
