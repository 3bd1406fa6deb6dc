"""The command line and environment of an engine process; where it runs decides most of both.

CUDA      sglang.launch_server with its memory saver: releasing gives weights and KV pool back to the device.
no CUDA   `cpu/serve.py`, which is the same server with stand-ins for the compiled kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from gyre_sched.engine.config import EngineConfig
from gyre_sched.engine.keyed import KEY
from gyre_sched.errors import EngineStartError
from gyre_transport import ports
from gyre_transport.keys import load_token
from gyre_transport.kv import config as kv_config
from gyre_transport.kv.config import LinkerConfig
from gyre_transport.sockets import loopback_host

_CPU = Path(__file__).parent / "cpu"
_KEYED = Path(__file__).with_name("keyed.py")


def has_cuda() -> bool:
    """Whether a CUDA driver with a device answers here. Asks the driver itself: torch is not imported."""
    return _device_count() > 0


def _device_count() -> int:
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0


def uses_cuda(config: EngineConfig) -> bool:
    """Whether this engine runs on a GPU: what the config says, else what is found."""
    return has_cuda() if config.device == "auto" else config.device == "cuda"


def devices(cell: int, config: EngineConfig, environ: Mapping[str, str] | None = None) -> str:
    """CUDA_VISIBLE_DEVICES for the processes of `cell`: its own `tensor_parallel` of the devices visible here.

    Raises `EngineStartError` when there are too few.
    """
    listed = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    visible = [str(i) for i in range(_device_count())] if listed is None else [d for d in listed.split(",") if d]
    first, last = cell * config.tensor_parallel, (cell + 1) * config.tensor_parallel
    if last > len(visible):
        raise EngineStartError(
            f"cell {cell} needs devices {first} to {last - 1}, of which {len(visible)} are visible; "
            "lower sched.cells or engine.tensor_parallel"
        )
    return ",".join(visible[first:last])


def command(
    config: EngineConfig,
    model: Path,
    port: int,
    *,
    cuda: bool,
    kv: LinkerConfig | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return (argv, whole environment) of an engine that serves the Hugging Face folder `model` as version 0.

    kv: how its KV pages move with requests; None: they do not.
    environ: what the environment is derived from (default: this process's).
    """
    server = ["-m", "sglang.launch_server"] if cuda else [str(_CPU / "serve.py")]
    argv = [sys.executable, *([str(_KEYED), server[-1]] if config.key else server)]
    argv += ["--model-path", str(model), "--host", config.host, "--port", str(port)]
    argv += ["--weight-version", "0", "--dtype", config.dtype, "--max-running-requests", str(config.max_running)]
    argv += ["--skip-server-warmup", "--log-level", config.log_level, "--log-level-http", "warning"]
    if config.incremental:
        argv += ["--incremental-streaming-output"]
    if config.context_length:
        argv += ["--context-length", str(config.context_length)]
    if config.max_tokens:
        argv += ["--max-total-tokens", str(config.max_tokens)]
    if cuda:
        # The backup brings weights back on resume, whether or not newer ones follow.
        argv += ["--enable-memory-saver", "--enable-weights-cpu-backup", "--tp-size", str(config.tensor_parallel)]
        if config.mem_fraction:
            argv += ["--mem-fraction-static", str(config.mem_fraction)]
    else:
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        argv += ["--disable-overlap-schedule"]
        argv += ["--enable-memory-saver"]  # answered by cpu/torch_memory_saver
        argv += ["--sleep-on-idle"]  # an idle scheduler would keep a core busy
    if kv is not None:
        argv += kv_config.arguments(kv)
    env = _environment(config, cuda, os.environ if environ is None else environ)
    if config.key:
        env[KEY] = load_token(Path(config.key), "engine.key")
    return [*argv, *config.args], env


def _environment(config: EngineConfig, cuda: bool, environ: Mapping[str, str]) -> dict[str, str]:
    env = dict(environ)
    env |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # A generation a health check would disturb the measure of idleness, and find released memory.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "OMP_NUM_THREADS": str(config.threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin stall everyone where cores are shared
        "PYTHONUNBUFFERED": "1",
    }
    if not cuda:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_CPU), environ.get("PYTHONPATH", "")]))
    return env


def check(config: EngineConfig, model: Path, *, moves: bool = False) -> None:
    """Raise `EngineStartError` for what would make the engine fail slowly and obscurely.

    moves: whether its KV pages move with requests.
    """
    if find_spec("sglang") is None:
        raise EngineStartError("SGLang is not installed; install gyre-sched with its extra: gyre-sched[engine]")
    if not (model / "config.json").is_file():
        raise EngineStartError(f"the engine's model {str(model)!r} is not a Hugging Face folder: no config.json in it")
    if config.refresh_pause == "in_place" and not moves:
        raise EngineStartError(
            "engine.refresh_pause = 'in_place' needs kv.moves = true, which keeps pages of different weights apart; "
            "set it, or refresh_pause = 'retract'"
        )
    if not config.key and not loopback_host(config.host):
        raise EngineStartError(
            f"others can reach engine.host = {config.host!r}, and nothing asks them for a token: set engine.key to a "
            "file with one (the launcher does), or use a loopback address"
        )
    if not uses_cuda(config) and not config.max_tokens:
        raise EngineStartError("engine.max_tokens is 0, which needs a GPU; give the KV pool's size in tokens")


def hold_port(config: EngineConfig) -> socket.socket:
    """Keep the configured port, or a free one, for the engine, which spends half a minute loading before it binds it.

    Raises `EngineStartError` when it is taken.
    """
    try:
        return ports.hold(config.host, config.port)
    except OSError as e:
        raise EngineStartError(
            f"the engine cannot listen on {config.host}:{config.port}: {e.strerror}; stop what holds the port, or "
            "set engine.port = 0 for a free one"
        ) from e
