"""The proxy's configuration: section [proxy] of the run's config, and [model] as far as the proxy reads it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from gyre_transport.run import BusConfig

_SOCKET_PATH = 107  # bytes that the system takes


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[proxy]; durations in seconds."""

    engine_key: str = ""  # file with the token that `engines` ask for, mode 0600; empty: engine.key
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port, told to the parent by `ready(url=…)`
    socket: str = ""  # a unix socket to listen on, too, in a folder of its own; empty: proxy/http below an ipc bus.dir
    max_body: int = 256 << 20  # bytes of one request
    queue: int = 4096  # calls open at once; more are answered 429
    executions: int = 1024  # held in memory; of more, those that are silent longest are read from their logs again
    template: str = "auto"  # auto | chatml | a name the `renderers` package knows
    roles: str = "default"  # a role table (TOML), or the one that ships with the package
    engines: tuple[str, ...] = ()  # URLs, for use without a scheduler
    context: int = 0  # prompt + output tokens an engine takes; 0: engine.context_length, else what the model says
    default_max_tokens: int = 32768  # for requests that name none; any limit is cut to what the context leaves
    temperature: float = 1.0  # for requests that name none
    top_p: float = 1.0  # for requests that name none
    media: str = "note"  # images and files for a text model: "note" puts a text in their place, "refuse" answers 400
    token_budget: int = 0  # tokens one execution may sample in all; then its calls are answered 403. 0: no bound
    probe_wait: float = 60.0  # how long an engine of `engines` may take to answer the start-up probe; 0: no probe
    whole_interval: int = 16  # tokens an engine sends at once where no client streams; an engine that dies loses them
    gather: float = 0.005  # a stream is told of new tokens no more often than this; of its first and last ones at once
    keepalive: float = 10.0  # between comments on a stream that waits
    route_wait: float = 900.0  # how long a call may wait for an engine at all
    attempts: int = 16  # engine failures one call survives (drains are not failures)
    connect_timeout: float = 5.0
    silence: float = 600.0  # an engine that sends nothing for so long is taken for lost
    kv_wait: float = 10.0  # how long a request waits for its KV pages to follow it to another engine; 0: they do not
    abort_wait: float = 10.0  # how long an engine may take to end an aborted request before its connection is closed
    backoff: float = 0.5  # first pause after an engine failed; doubles up to `backoff_limit`
    backoff_limit: float = 15.0
    disconnect_grace: float = 5.0  # a call nobody waits for is aborted after this; a repeated request joins it before

    def __post_init__(self) -> None:
        for name in ("max_body", "queue", "executions", "default_max_tokens", "whole_interval", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in ("keepalive", "route_wait", "connect_timeout", "silence", "abort_wait", "backoff"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0 seconds, got {getattr(self, name)!r}")
        if self.media not in ("note", "refuse"):
            raise ValueError(f"media must be 'note' or 'refuse', got {self.media!r}")
        for name in ("context", "token_budget", "probe_wait", "gather", "kv_wait"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if len(os.fsencode(self.socket)) > _SOCKET_PATH:
            raise ValueError(f"socket must be a path of at most {_SOCKET_PATH} bytes, got {self.socket!r}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be between 0 and 65535, got {self.port!r}")


def socket_path(config: ProxyConfig, bus: BusConfig) -> Path | None:
    """Where the proxy of a run listens beside its port, so that a sandbox without network reaches it; None: nowhere."""
    if config.socket:
        path = Path(config.socket)
    elif bus.kind == "ipc" and bus.dir:
        path = Path(bus.dir, "proxy", "http")
    else:
        return None
    return path if len(os.fsencode(path)) <= _SOCKET_PATH else None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[model]: `path` is a Hugging Face folder; `name` is what harnesses call the model. Other keys are others'."""

    path: str = ""
    name: str = "policy"
