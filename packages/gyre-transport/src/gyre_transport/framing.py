"""What a message of the bus looks like.

    request     [id, header, payload]        reply  [id, status, payload]
    published   [header, payload], and [header] alone as a heartbeat

The header names the bus's framing and the protocol, each with its version: "gyre/2 scheduler/1". A peer of another
version is told so before anything is decoded. A union of messages carries its protocol's name and version:

    Request = Annotated[Ask | Tell, ("scheduler", 1)]        without: ("unnamed", 0)

The version is raised when old messages would be misread; a new field with a default, or a new message, leaves it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gyre_transport.errors import BusError, ProtocolError, RemoteError, VersionMismatch

FRAMING = 2
OK, ERROR = b"ok", b"error"

UNNAMED = ("unnamed", 0)


class Fault(msgspec.Struct, frozen=True):
    """What a failed handler sends back."""

    kind: str
    message: str


def header(messages: Any) -> bytes:
    """The frame that names the protocol of `messages`, a type."""
    name, version = next((m for m in getattr(messages, "__metadata__", ()) if isinstance(m, tuple)), UNNAMED)
    return f"gyre/{FRAMING} {name}/{version}".encode()


def mismatch(address: str, *, serves: bytes, came: bytes) -> VersionMismatch:
    """The error of two peers that do not speak the same."""
    return VersionMismatch(
        f"{address!r} serves {_shown(serves)}, its peer speaks {_shown(came)}; install the same version of Gyre on "
        "both sides, restart the older process, and check that the address is that service's"
    )


def decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes, what: str) -> Any:
    """Decode `payload`. Raises `ProtocolError` naming `what`, whatever is wrong with the bytes."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError, OverflowError) as e:
        raise ProtocolError(f"{what} does not decode: {e}; is the peer another version of Gyre?") from e


_faults = msgspec.msgpack.Decoder(Fault)


def unpack(frames: list[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> tuple[int, Any]:
    """Return (request id, reply) of a reply's frames, the reply being a `BusError` when it says one.

    Raises `ProtocolError` when it cannot be told which request it answers.
    """
    if len(frames) != 3 or len(frames[0]) != 8:
        raise ProtocolError(f"expected a reply of 3 frames, got {len(frames)}; is the peer another version of Gyre?")
    request_id = int.from_bytes(frames[0], "big")
    try:
        if frames[1] == OK:
            return request_id, decode(decoder, frames[2], "a reply")
        fault = decode(_faults, frames[2], "a reply")
    except ProtocolError as e:
        return request_id, e
    return request_id, _raised(fault)


def _raised(fault: Fault) -> BusError:
    if fault.kind == VersionMismatch.__name__:
        return VersionMismatch(fault.message)
    return RemoteError(fault.kind, fault.message)


def _shown(frame: bytes) -> str:
    return repr(frame[:100].decode(errors="replace")) if frame else "a version without headers"
