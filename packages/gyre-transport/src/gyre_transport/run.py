"""What every process of a run must agree on: its config file, its directory, its addresses, its batches.

Sections of the resolved config: [run], [batch], [bus] and [transport] (here); each package owns its own others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from gyre_transport.config import load, section
from gyre_transport.errors import ConfigError


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run]"""

    dir: str  # absolute in the resolved config
    name: str = "run"
    seed: int = 0
    steps: int = 1  # optimizer steps, a multiple of batch.per_burst


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[batch]"""

    groups: int = 4  # groups an optimizer step trains on
    group_size: int = 8  # G, executions a task
    per_burst: int = 2  # batches dispatched together; staleness is per_burst - 1

    @property
    def executions(self) -> int:
        """Executions of one batch."""
        return self.groups * self.group_size

    @property
    def burst(self) -> int:
        """Executions of one burst."""
        return self.executions * self.per_burst


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[bus]: where services listen. ipc: sockets in `dir` (a short path: at most about 80 characters). tcp: `ports`
    names a port for each service on `host`; beyond loopback, everything is encrypted under the run's `keys`."""

    kind: Literal["ipc", "tcp"] = "ipc"
    dir: str = ""
    host: str = "127.0.0.1"
    ports: dict[str, int] = {}
    keys: str = ""  # file with the run's keys, mode 0600: made by the launcher; copy it to the run's other machines

    def address(self, service: str) -> str:
        """ZeroMQ address of `service`: scheduler, scheduler.events, feed, feed.intake, agent-<cell>."""
        if self.kind == "ipc":
            if not self.dir:
                raise ConfigError("bus.dir is empty: name a directory for the ipc sockets")
            return f"ipc://{self.dir}/{service}"
        try:
            return f"tcp://{self.host}:{self.ports[service]}"
        except KeyError:
            raise ConfigError(f"bus.ports names no port for {service!r}, only {sorted(self.ports)}; add it") from None


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[transport]: how registered memory of one process is read by others."""

    # that may be used here, the first that works is
    backends: tuple[Literal["shm", "verbs", "tcp", "mooncake"], ...] = ("shm", "verbs", "tcp")
    listen: str = "127.0.0.1"  # address that reads over tcp and verbs are served at; "": none
    port: int = 0  # 0: any; several processes of a machine cannot share another
    advertise: str = ""  # address others reach `listen` at; "": `listen`, or this host's when that is all addresses
    max_connections: int = 256
    streams: int = 2  # connections a large read uses
    rdma_device: str = ""  # "mlx5_0", or "mlx5_0:1" with a port: this one and no other; "": any
    queue_pairs: int = 2  # of a connection over verbs
    rdma_patience: float = 0.4  # seconds that a peer may be silent; devices take up to four times that

    def __post_init__(self) -> None:
        small = all(1 <= n <= 16 for n in (self.streams, self.queue_pairs))
        patient = 0.01 <= self.rdma_patience <= 3600
        if not (self.backends and 0 <= self.port < 1 << 16 and self.max_connections >= 1 and small and patient):
            raise ValueError(
                "backends names at least one of shm, verbs, tcp, mooncake; port is 0 to 65535; max_connections is at "
                "least 1; streams and queue_pairs are 1 to 16; rdma_patience is 0.01 to 3,600 seconds"
            )


class RunDir:
    """Paths in a run directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.ledger = self.path / "ledger.sqlite"
        self.calls = self.path / "calls"  # <execution>.gtraj
        self.journal = self.path / "sched" / "journal"
        self.checkpoints = self.path / "checkpoints"  # step-<n>/
        self.metrics = self.path / "metrics"  # steps.jsonl, proxy.json
        self.logs = self.path / "logs"
        self.workspaces = self.path / "workspaces"  # one folder an execution
        self.policy = self.path / "policy"  # the trained policy, a Hugging Face folder
        self.secret = self.path / "secret"  # 0600; signs execution keys
        self.engine_key = self.path / "engine.key"  # 0600; where others can reach engines
        self.bus_keys = self.path / "bus.keys"  # 0600; where the bus is encrypted
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"

    def log(self, execution: str) -> Path:
        """The call log of an execution."""
        return self.calls / f"{execution}.gtraj"


class Context:
    """A process's view of the resolved config. From its making on, the process's tcp sockets use the run's keys."""

    def __init__(self, config: Path) -> None:
        self.data: dict[str, Any] = load(config)
        self.run = section(self.data, "run", RunConfig)
        self.batch = section(self.data, "batch", BatchConfig)
        self.bus = section(self.data, "bus", BusConfig)
        self.transport = section(self.data, "transport", TransportConfig)
        self.dir = RunDir(self.run.dir)
        self.config_path = config
        if self.bus.keys:
            from gyre_transport import keys  # with libzmq, which a process that only reads its config does without

            keys.use(keys.load(Path(self.bus.keys)))
