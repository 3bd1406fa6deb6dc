"""Whether an engine's weights are those of a snapshot, by the checksums `/weights_checker` gives.

An engine keeps some tensors together that a snapshot has apart, and rounds the vocabulary up. Where it computes on the
CPU and alone, a checksum is the beginning of a SHA-256 of the bytes, which can be had from the snapshot as well; on a
GPU it is a hash of its own, and with tensor parallelism of a part. There nothing is verified here.
"""

from __future__ import annotations

import hashlib
from typing import Any

from gyre_sched.engine.config import EngineConfig
from gyre_sched.errors import WeightsUnknown
from gyre_transport.snapshot import Snapshot

_TOGETHER = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_ROWS = 64  # the engine's vocabulary is a multiple of it
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def possible(config: EngineConfig, *, cuda: bool) -> bool:
    """Whether an engine's checksums can be foretold."""
    return config.verify and not cuda and config.tensor_parallel == 1


def expected(snapshot: Snapshot, dtype: str) -> dict[str, str]:
    """The checksums of an engine that keeps its weights in `dtype`, by the engine's names.

    Tensors of another dtype are left out: they are rounded on loading.
    """
    given = {name: value for name, value in snapshot.items() if _DTYPES.get(value[0]) == dtype}
    found = {}
    for name in given:
        whole, parts = _place(name)
        if name != parts[0] or any(part not in given for part in parts):
            continue
        digest = hashlib.sha256()
        for part in parts:
            digest.update(given[part][2])
        if name in _VOCABULARY:
            shape, data = given[name][1], given[name][2]
            digest.update(bytes(-shape[0] % _ROWS * (data.nbytes // max(shape[0], 1))))
        found[whole] = digest.hexdigest()[:16]
    return found


def _place(name: str) -> tuple[str, tuple[str, ...]]:
    """(the engine's name of the tensor that `name` is in, the snapshot's names of its parts in order)."""
    for whole, parts in _TOGETHER.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(part, whole), tuple(name.replace(part, other) for other in parts)
    return name, (name,)


def compare(expected: dict[str, str], ranks: list[Any], engine: str, label: str) -> int:
    """How many tensors have the expected checksum. Raises `WeightsUnknown` if one has another."""
    (rank,) = ranks
    found: dict[str, str] = rank["checksums"]
    for name, checksum in expected.items():
        if name in found and found[name] != checksum:
            raise WeightsUnknown(
                f"engine {engine} loaded {label}, but its {name!r} has checksum {found[name]}, the snapshot's has "
                f"{checksum}; the engine must be restarted"
            )
    return len(expected.keys() & found.keys())
