"""Typed messages over ZeroMQ and one-sided reads of registered memory for RL systems.

Import from the modules: `bus` (messages) and `keys` (of its tcp sockets), `process` (children that never outlive their
parent), `config` and `run` (the config file), `memory` and `snapshot` (the data plane), `folder` (model folders between
machines), `kv` (pages of SGLang engines), `torch` (tensors; extra `[torch]`), `errors`. The names below are the ones
most programs use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_transport.bus import BlockingClient, Client, Publisher, Server, Subscriber
    from gyre_transport.descriptor import Content, Descriptor
    from gyre_transport.errors import TransportError
    from gyre_transport.memory import Region, allocate, register
    from gyre_transport.notices import Notices
    from gyre_transport.process import Child, follow_parent, ready
    from gyre_transport.reads import Part, read, read_chunks, read_many
    from gyre_transport.snapshot import Manifest, Snapshot, SnapshotSource, pull
    from gyre_transport.transfer import Transfer

__version__ = "0.1.0"
__all__ = [
    "BlockingClient",
    "Child",
    "Client",
    "Content",
    "Descriptor",
    "Manifest",
    "Notices",
    "Part",
    "Publisher",
    "Region",
    "Server",
    "Snapshot",
    "SnapshotSource",
    "Subscriber",
    "Transfer",
    "TransportError",
    "allocate",
    "follow_parent",
    "pull",
    "read",
    "read_chunks",
    "read_many",
    "ready",
    "register",
]

_HOMES = {
    "bus": ("BlockingClient", "Client", "Publisher", "Server", "Subscriber"),
    "descriptor": ("Content", "Descriptor"),
    "errors": ("TransportError",),
    "memory": ("Region", "allocate", "register"),
    "notices": ("Notices",),
    "process": ("Child", "follow_parent", "ready"),
    "reads": ("Part", "read", "read_chunks", "read_many"),
    "snapshot": ("Manifest", "Snapshot", "SnapshotSource", "pull"),
    "transfer": ("Transfer",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:  # late, so that a child process that only reads config starts without numpy
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
