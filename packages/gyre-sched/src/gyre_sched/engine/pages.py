"""An engine's KV pages as its agent sees them: how its linkers are started, and that pages outlive a role switch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path

from gyre_sched.engine.config import EngineConfig
from gyre_sched.errors import EngineStartError
from gyre_transport.bus import Client
from gyre_transport.errors import BusError
from gyre_transport.kv import protocol as kv
from gyre_transport.kv.config import KvConfig, LinkerConfig, model_identity
from gyre_transport.run import BusConfig, Context

log = logging.getLogger(__name__)

_ANSWER = 5.0  # seconds


class Pages:
    """The linkers of one engine, one a rank, and their services."""

    def __init__(self, linker: LinkerConfig, hold: float) -> None:
        """hold: seconds that pages stay once the engine has left rollout."""
        self.linker = linker
        self._hold = hold
        self._services = [Client(address, kv.Reply) for address in linker.addresses]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where pages are asked for, rank by rank."""
        return self.linker.addresses

    async def hold(self) -> None:
        """Have the pages kept over the flush that follows. A rank that does not answer is logged: its pages go."""
        answers = await asyncio.gather(
            *(s.call(kv.Hold(seconds=self._hold), deadline=_ANSWER) for s in self._services), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BusError):
                log.warning("KV pages are not kept: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(service.close() for service in self._services))


def make_pages(config: KvConfig, engine: EngineConfig, model: Path, context: Context, cell: int) -> Pages | None:
    """The pages of the engine of `cell`; None when they do not move. Raises `EngineStartError`."""
    if not config.moves:
        return None
    try:
        identity, listen = model_identity(model), addresses(context.bus, engine, cell)
        context.dir.metrics.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise EngineStartError(
            f"KV pages of {str(model)!r} cannot move: {e}; set kv.moves = false to do without"
        ) from e
    linker = LinkerConfig(
        model=identity,
        addresses=listen,
        page_size=config.page_size,
        store_bytes=config.store_bytes,
        lease=config.lease,
        namespaces=engine.refresh_pause == "in_place",
        counts=str(context.dir.metrics / f"kv-{cell}"),
        keys=context.bus.keys,
        transport=context.transport,
    )
    return Pages(linker, config.hold)


def addresses(bus: BusConfig, engine: EngineConfig, cell: int) -> tuple[str, ...]:
    """Where the services of a cell's engine listen: beside the bus, or, on several machines, beside the engine."""
    ranks = range(engine.tensor_parallel)
    if bus.kind == "ipc":
        return tuple(f"ipc://{bus.dir}/kv-{cell}-{rank}" for rank in ranks)
    host = f"[{engine.host}]" if ":" in engine.host else engine.host
    with contextlib.ExitStack() as held:  # all at once, so that they differ
        probes = [held.enter_context(_bound(engine.host)) for _ in ranks]
        return tuple(f"tcp://{host}:{probe.getsockname()[1]}" for probe in probes)


def _bound(host: str) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    probe.bind((host, 0))
    return probe
