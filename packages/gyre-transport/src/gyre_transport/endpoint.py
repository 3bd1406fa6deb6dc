"""Which way a read goes, and where this process serves its own memory.

    shm    same machine and pid namespace, and the kernel lets this process read the owner
    verbs  both have an RDMA port on the same kind of link and pyverbs, and a byte got through; the owner listens
    tcp    the owner listens where this process can connect
    mooncake   only where both ends name it: Mooncake's transfer engine (`backends.mooncake` says what that costs)
The first of `TransportConfig.backends` that works for the pair is used; what rules one out is said when none works.
"""

from __future__ import annotations

import logging
import threading
from typing import Literal

from gyre_transport.backends.channel import Adopt, Channel, Opener
from gyre_transport.backends.server import Server, advertised
from gyre_transport.backends.shm import ShmChannel
from gyre_transport.backends.tcp import TcpChannel
from gyre_transport.backends.verbs import fabric
from gyre_transport.control import Record
from gyre_transport.descriptor import Descriptor, Endpoint, host
from gyre_transport.errors import DataError, Unreachable
from gyre_transport.run import TransportConfig

log = logging.getLogger(__name__)

Backend = Literal["shm", "verbs", "tcp", "mooncake"]


def _open_verbs(descriptor: Descriptor, *, end: float, adopt: Adopt) -> Channel:
    from gyre_transport.backends.verbs.channel import VerbsChannel

    return VerbsChannel(descriptor, _config, end=end, adopt=adopt)


def _open_mooncake(descriptor: Descriptor, *, end: float, adopt: Adopt) -> Channel:
    from gyre_transport.backends.mooncake.channel import MooncakeChannel

    return MooncakeChannel(descriptor, advertised(_config), end=end, adopt=adopt)


_OPENERS: dict[Backend, Opener] = {
    "shm": ShmChannel,
    "verbs": _open_verbs,
    "tcp": TcpChannel,
    "mooncake": _open_mooncake,
}
_config = TransportConfig()
_lock = threading.Lock()


def configure(config: TransportConfig) -> None:
    """Set how this process reads and serves; before it registers memory, or a listener that is up stays as it is."""
    global _config
    _config = config


def config() -> TransportConfig:
    """What `configure` set."""
    return _config


def serve(record: Record) -> Endpoint | None:
    """Where `record` is served over tcp; the listener starts with its first region. None: not at all."""
    with _lock:
        if record.listener is None and _config.listen:
            try:
                record.listener = Server(record, _config)
            except OSError as e:
                log.warning(
                    "cannot listen on %r (transport.listen): %s; only this machine can read this process's memory",
                    f"{_config.listen}:{_config.port}",
                    str(e),  # a record with the exception would keep this frame's memory mapped
                )
        return None if record.listener is None else record.listener.endpoint


def candidates(descriptor: Descriptor, via: Backend | None = None) -> tuple[Backend, ...]:
    """Backends to try, in order. Raises `DataError` for a name that is none."""
    if via is not None and via not in _OPENERS:
        raise DataError(f"expected via to be None or one of {', '.join(_OPENERS)}, got {via!r}")
    return _config.backends if via is None else (via,)


def streams(descriptor: Descriptor, nbytes: int, via: Backend | None, stream_bytes: int) -> int:
    """How many ways to open at once for a read of `nbytes`: one where a copy, or a device, is all there is to it."""
    most = max(1, min(_config.streams, nbytes // stream_bytes))
    if most == 1:
        return 1
    local, rdma = descriptor.owner.host == host(), descriptor.endpoint is not None and descriptor.endpoint.rdma
    first = next((b for b in candidates(descriptor, via) if b != "shm" or local), None)
    if first == "shm" or (first == "verbs" and rdma and fabric.active()):
        return 1
    return most


def open_channel(
    descriptor: Descriptor, *, end: float, adopt: Adopt, via: Backend | None = None, gpu: bool = False
) -> Channel:
    """Open the first way that works. Raises `Unreachable` with the reasons when none does, `StaleDescriptor`, …

    gpu: pieces may be of GPU memory.
    """
    channel = _open_channel(descriptor, end=end, adopt=adopt, via=via)
    if not gpu:
        return channel
    from gyre_transport.gpu.staged import StagedChannel

    return StagedChannel(channel, end=end)


def _open_channel(descriptor: Descriptor, *, end: float, adopt: Adopt, via: Backend | None) -> Channel:
    reasons = []
    for backend in candidates(descriptor, via):
        try:
            return _OPENERS[backend](descriptor, end=end, adopt=adopt)
        except Unreachable as e:
            reasons.append(f"{backend}: {e}")
    raise Unreachable("; ".join(reasons))
