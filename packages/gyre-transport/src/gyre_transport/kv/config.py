"""The [kv] section of a run's config, and what the linker of one engine is given."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from gyre_transport.run import TransportConfig

_SAMPLES, _SAMPLE = 16, 4096  # places of a weight file that are looked at, and bytes at each


class KvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[kv]: whether a request that changes its engine takes its KV pages along. Durations in seconds."""

    moves: bool = True
    page_size: int = 16  # tokens of a page; what is less than a page at the end is computed again
    store_bytes: int = 1 << 30  # host memory an engine process keeps pages in, at most
    lease: float = 30.0  # pages another engine is reading stay in place so long, unless it is done before
    hold: float = 120.0  # an engine that left rollout keeps its pages so long

    def __post_init__(self) -> None:
        for name in ("page_size", "store_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in ("lease", "hold"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)!r}")


class LinkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the linkers of one engine are given on its command line."""

    model: str  # identity of the weights the engine starts from, see `model_identity`
    addresses: tuple[str, ...]  # where the service of each rank listens, pipeline stage by stage
    page_size: int = 16
    store_bytes: int = 1 << 30
    lease: float = 30.0
    namespaces: bool = False  # requests of different weights never share a page: weights change under running requests
    counts: str = ""  # file for the counters, without ".json"; a rank beyond the first appends its number
    keys: str = ""  # file with the run's keys, for services that others reach
    transport: TransportConfig = TransportConfig()


def arguments(config: LinkerConfig) -> list[str]:
    """Command-line arguments of `sglang.launch_server` that load the linker."""
    linker = {
        "linker": "PageLinker",
        "linker_module_path": "gyre_transport.kv.linker",
        "linker_extra_config": msgspec.to_builtins(config),
    }
    return [
        *("--page-size", str(config.page_size), "--enable-unified-cache-external-linker"),
        *("--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(linker)),
    ]


def model_identity(folder: Path) -> str:
    """A digest of a Hugging Face folder's config and of samples of its weights: equal for equal copies, anywhere.

    Raises `OSError`.
    """
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(folder.glob("*")):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".gguf"):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for place in range(_SAMPLES):
                    file.seek(size * place // _SAMPLES)
                    digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def linker_config(raw: Any) -> LinkerConfig:
    """`linker_extra_config` as it arrives in the engine. Raises `msgspec.ValidationError`."""
    return msgspec.convert(raw or {}, LinkerConfig)
