"""What can be checked before any process starts, so that a run fails in a second and not after minutes."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import psutil

from gyre_agent_proxy.runner import sources
from gyre_agent_proxy.runner.execution import harness
from gyre_launch.config import Resolved
from gyre_launch.errors import LaunchError
from gyre_train import architecture

_GIB = 1 << 30


def weights_bytes(model: Path) -> int:
    """Bytes of the safetensors files in a Hugging Face folder (0 when there are none yet)."""
    return sum(f.stat().st_size for f in model.glob("*.safetensors"))


def disk_needed(resolved: Resolved) -> int:
    """Bytes a run may write: checkpoints (weights, fp32 weights and two fp32 moments: 7x bf16), the policy, logs."""
    weights = weights_bytes(Path(resolved.model.path))
    kept = (resolved.train.keep_checkpoints + 1) if resolved.train.checkpoint_every else 0
    return weights * (7 * kept + 2) + _GIB // 4


def check(resolved: Resolved) -> None:
    """Raise for what would make the run fail later: `LaunchError`, or the error of the package whose part is wrong."""
    run_dir = Path(resolved.run.dir)
    if run_dir.exists() and any(run_dir.iterdir()):
        raise LaunchError(f"run.dir {str(run_dir)!r} is not empty; choose another or remove it")
    sources.load(resolved.runner)
    harness(resolved.runner, resolved.model.name, "", run_dir)  # raises for a command that cannot start
    architecture.read(resolved.model.path)
    existing = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    free, needed = shutil.disk_usage(existing).free, disk_needed(resolved)
    if free < needed:
        raise LaunchError(
            f"the disk of {str(run_dir)!r} has {free / _GIB:.1f} GiB free, the run may need {needed / _GIB:.1f}; "
            "free some, set run.dir elsewhere, or keep fewer checkpoints (train.keep_checkpoints)"
        )
    for module, remedy in (("sglang", "uv sync --group engine"), ("megatron.core", "install gyre-train[megatron]")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise LaunchError(f"the package {module!r} is not installed; {remedy}")


def facts() -> dict[str, Any]:
    """What `gyre doctor` shows of this machine."""
    memory = psutil.virtual_memory()

    def version(distribution: str) -> str | None:
        from importlib import metadata

        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    return {
        "cores": psutil.cpu_count(),
        "memory_gib": round(memory.total / _GIB, 1),
        "memory_available_gib": round(memory.available / _GIB, 1),
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / _GIB, 1),
        "shm_free_gib": round(shutil.disk_usage("/dev/shm").free / _GIB, 1) if Path("/dev/shm").is_dir() else None,  # noqa: S108
        "gpu": Path("/proc/driver/nvidia/version").exists(),
        "sglang": version("sglang"),
        "megatron-core": version("megatron-core"),
        "torch": version("torch"),
    }
