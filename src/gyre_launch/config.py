"""The run's configuration: every package's sections, resolved once into the file all processes read.

run.toml + overrides ──▶ validated structs ──▶ paths made absolute, ports and directories chosen ──▶ RUN/config.toml
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from gyre_agent_proxy.config import ProxyConfig
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_launch import models
from gyre_launch.trackers import MetricsConfig
from gyre_sched.config import SchedConfig
from gyre_sched.engine.config import EngineConfig
from gyre_train.config import TrainConfig
from gyre_train.feed.config import FeedConfig
from gyre_transport import ports
from gyre_transport.config import load, only, section
from gyre_transport.errors import ConfigError
from gyre_transport.kv.config import KvConfig
from gyre_transport.run import BatchConfig, BusConfig, RunConfig, RunDir, TransportConfig
from gyre_transport.sockets import loopback, loopback_host


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[model]: the policy a run starts from."""

    source: str = ""  # a Hugging Face folder, or "smollm2" (carried by a package, converted on first use)
    path: str = ""  # the folder `source` resolved to
    name: str = "policy"  # what harnesses call it


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "run": RunConfig,
    "batch": BatchConfig,
    "bus": BusConfig,
    "transport": TransportConfig,
    "model": ModelConfig,
    "sched": SchedConfig,
    "engine": EngineConfig,
    "kv": KvConfig,
    "feed": FeedConfig,
    "train": TrainConfig,
    "proxy": ProxyConfig,
    "runner": RunnerConfig,
    "metrics": MetricsConfig,
}


class Resolved:
    """A validated configuration; `write` makes it the run's config.toml."""

    def __init__(self, sections: dict[str, Any], held: socket.socket | None = None) -> None:
        """held: keeps the proxy's port for as long as this lives."""
        self.sections = sections
        self._held = held

    def __getattr__(self, name: str) -> Any:
        try:
            return self.sections[name]
        except KeyError:
            raise AttributeError(name) from None

    def toml(self) -> str:
        """The resolved file's text: every key of every section, defaults included."""
        return tomli_w.dumps({name: _without_none(msgspec.to_builtins(s)) for name, s in self.sections.items()})

    def write(self, path: Path) -> None:
        """Write to `path` at once or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(self.toml())
        partial.rename(path)


def resolve(path: Path, overrides: list[str], *, convert_model: bool = True) -> Resolved:
    """Read `path`, apply `overrides` and validate everything that can be known before a process starts.

    convert_model: False leaves a packaged model unconverted (dry runs). Raises `ConfigError`.
    """
    data = load(path, overrides)
    only(data, set(SECTIONS))
    base = path.resolve().parent
    run = data.setdefault("run", {})
    if not isinstance(run, dict):
        raise ConfigError(f"[run] must be a section, got {run!r}")
    name = run.setdefault("name", path.resolve().parent.name if path.stem == "run" else path.stem)
    run["dir"] = str(Path(run.get("dir") or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve())
    sections: dict[str, Any] = {key: section(data, key, kind) for key, kind in SECTIONS.items()}

    sections["model"] = _model(sections["model"], base, convert_model)
    sections["runner"] = _runner(sections["runner"], base)
    sections["bus"] = _bus(sections["bus"], base, RunDir(run["dir"]))
    sections["engine"] = _engine(sections["engine"], base, RunDir(run["dir"]))
    _check(sections)
    sections["proxy"], held = _proxy(sections["proxy"])
    return Resolved(sections, held)


def _model(model: ModelConfig, base: Path, convert: bool) -> ModelConfig:
    source = model.source or model.path
    if not source:
        raise ConfigError("[model] names no policy: set model.source to a Hugging Face folder or 'smollm2'")
    if source in models.PACKAGED:
        return msgspec.structs.replace(model, path=str(models.resolve(source) if convert else models.folder(source)))
    return msgspec.structs.replace(model, path=str(models.resolve(str(base / Path(source).expanduser()))))


def _runner(runner: Any, base: Path) -> Any:
    tasks = runner.tasks if runner.tasks.startswith("harbor:") else str((base / runner.tasks).resolve())
    return msgspec.structs.replace(runner, tasks=tasks, folder=str(base))


def _bus(bus: BusConfig, base: Path, run_dir: RunDir) -> BusConfig:
    if bus.kind == "tcp" and (bus.keys or not loopback(f"tcp://{bus.host}:0")):
        keys = base / Path(bus.keys).expanduser() if bus.keys else run_dir.bus_keys
        return msgspec.structs.replace(bus, keys=str(keys.resolve()))
    if bus.kind != "ipc" or bus.dir:
        return bus
    root = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return msgspec.structs.replace(bus, dir=str(Path(root) / f"gyre-{os.getpid()}-{os.urandom(3).hex()}"))


def _engine(engine: EngineConfig, base: Path, run_dir: RunDir) -> EngineConfig:
    if not engine.key and loopback_host(engine.host):
        return engine
    key = base / Path(engine.key).expanduser() if engine.key else run_dir.engine_key
    return msgspec.structs.replace(engine, key=str(key.resolve()))


def _proxy(proxy: Any) -> tuple[Any, socket.socket]:
    """The proxy's section with its port, and what keeps the port for it."""
    try:
        held = ports.hold(proxy.host, proxy.port)
    except OSError as e:
        raise ConfigError(
            f"the proxy cannot listen on {proxy.host}:{proxy.port}: {e.strerror}; "
            "set proxy.port to a free port, or to 0"
        ) from e
    return msgspec.structs.replace(proxy, port=held.getsockname()[1]), held


def _check(sections: dict[str, Any]) -> None:
    run, batch, sched = sections["run"], sections["batch"], sections["sched"]
    if run.steps % batch.per_burst:
        raise ConfigError(
            f"run.steps must be a multiple of batch.per_burst, got {run.steps} and {batch.per_burst}; "
            f"try {run.steps + batch.per_burst - run.steps % batch.per_burst}"
        )
    if sched.cells < 1:
        raise ConfigError(f"sched.cells must be at least 1, got {sched.cells}")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value
