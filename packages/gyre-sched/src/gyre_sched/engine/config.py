"""The [engine] section of a run's config."""

from __future__ import annotations

from typing import Literal

import msgspec

Pause = Literal["retract", "in_place"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[engine]: one SGLang server a cell. Durations in seconds; 0 leaves a size to SGLang where it says so."""

    host: str = "127.0.0.1"
    key: str = ""  # file with the token engines ask for, mode 0600; made by the launcher where others can reach `host`
    port: int = 0  # 0: a free one, chosen by the agent; with several cells only 0 makes sense
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where a driver and a device are found
    dtype: str = "bfloat16"
    context_length: int = 0  # prompt + output tokens of a request; 0: the model's
    max_running: int = 32  # requests decoded together
    max_tokens: int = 65_536  # KV pool, in tokens; 0: from the memory SGLang finds (not on CPU)
    mem_fraction: float = 0.0  # of GPU memory, for weights and KV pool; 0: SGLang's choice
    tensor_parallel: int = 1  # GPUs of a cell
    threads: int = 1  # CPU threads of the model's forward pass
    incremental: bool = True  # events of a stream hold what is new; cumulative ones cost the square of a long answer
    args: tuple[str, ...] = ()  # further arguments of sglang.launch_server
    log_level: str = "info"
    start_timeout: float = 300.0  # until the server is healthy
    warm_timeout: float = 120.0  # until it has generated for the first time
    call_timeout: float = 60.0  # any other control request
    stop_timeout: float = 15.0
    health_interval: float = 5.0
    health_failures: int = 6  # unanswered health checks in a row, call by call, after which the engine counts as hung
    attempts: int = 3  # restarts within `attempts_window`; an engine or trainer that needs more is given up
    attempts_window: float = 1800.0
    refresh: Literal["disk", "tensor"] = "disk"  # how new weights get into the engine, see `loading`
    # What happens to requests in flight meanwhile: they are computed again under the new weights, or keep their KV and
    # go on (needs kv.moves, which keeps the prefix cache apart by weights).
    refresh_pause: Pause = "retract"
    verify: bool = True  # compare checksums of the loaded weights with the snapshot's, where that is possible
    scratch: str = ""  # folder for weights on their way to the engine; empty: a memory file system with room

    def __post_init__(self) -> None:
        for name in ("max_running", "tensor_parallel", "threads", "health_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        for name in ("port", "context_length", "max_tokens", "mem_fraction", "attempts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if self.mem_fraction >= 1.0:
            raise ValueError(f"mem_fraction is a fraction below 1, got {self.mem_fraction!r}")
        for field in msgspec.structs.fields(self):
            if field.name.endswith(("timeout", "interval", "window")) and not getattr(self, field.name) > 0:
                raise ValueError(
                    f"{field.name} must be a positive number of seconds, got {getattr(self, field.name)!r}"
                )
