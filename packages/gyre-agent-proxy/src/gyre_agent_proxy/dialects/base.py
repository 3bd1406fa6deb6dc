"""What every dialect has in common: what the server asks of it, defaults for open requests, reading of untyped JSON.

A dialect is a module: `name`, `read_request`, `answer`, `stream`, `status` and `error_body`. The server knows no more.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Protocol

import msgspec

from gyre_agent_proxy.conversation import Reply, Request
from gyre_agent_proxy.errors import BadRequest, ProxyError
from gyre_agent_proxy.unfolding import Said

# An escaped backslash, a whole pair, or (the group) half of one.
_SURROGATES = re.compile(rb"\\\\|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(\\u[dD][89a-fA-F]\w\w)")


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling for requests that leave it open."""

    max_tokens: int = 32768
    temperature: float = 1.0
    top_p: float = 1.0
    media: str = (
        "note"  # images, audio, files for a text model: "note" puts a text in their place, "refuse" answers 400
    )


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its first token."""

    call: str
    created: int  # unix seconds
    model: str  # as the request named it
    prompt_tokens: int


class Encoder(Protocol):
    """Encodes one answer as server-sent events: begin, reasoning and then text as they come, then finish or failure."""

    @property
    def keepalive(self) -> bytes:
        """What may be sent at any time after `begin`."""
        ...

    def begin(self) -> bytes:
        """What precedes all deltas."""
        ...

    def reasoning(self, text: str) -> bytes:
        """More reasoning; none comes after text."""
        ...

    def delta(self, text: str) -> bytes:
        """More text."""
        ...

    def finish(self, reply: Reply, rest: Said) -> bytes:
        """The end; `rest` is what was not sent yet."""
        ...

    def failure(self, error: ProxyError) -> bytes:
        """The end of a stream that cannot be finished."""
        ...


class Dialect(Protocol):
    """A module of this folder."""

    name: str

    def read_request(self, raw: bytes, defaults: Defaults) -> Request:
        """Normalise a request body. Raises `BadRequest` naming the field."""
        ...

    def answer(self, reply: Reply, request: Request, model: str) -> dict[str, Any]:
        """The whole answer."""
        ...

    def stream(self, opening: Opening, request: Request) -> Encoder:
        """An encoder for one connection."""
        ...

    def status(self, error: ProxyError) -> int:
        """HTTP status of an error."""
        ...

    def error_body(self, error: ProxyError) -> dict[str, Any]:
        """An error in the dialect's shape."""
        ...


class Body:
    """A JSON object being read; what nobody asked for is `rest`."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data
        self._read: set[str] = set()

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        """Return field `name` as `kind`; None counts as absent. Raises `BadRequest`."""
        self._read.add(name)
        value = self._data.get(name)
        if value is None:
            return default
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as e:
            raise BadRequest(f"{name}: {e}, got {value!r:.80}", name) from e

    @property
    def rest(self) -> dict[str, Any]:
        """Fields that were not read."""
        return {k: v for k, v in self._data.items() if k not in self._read}


def decode_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; half a surrogate pair in it becomes U+FFFD. Raises `BadRequest`.

    Programs whose strings are UTF-16 send such halves, as escapes, where they cut a text within a character.
    """
    try:
        try:
            data = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            data = msgspec.json.decode(whole(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"the body is not JSON: {e}") from e
    if not isinstance(data, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(data).__name__}")
    return data


def whole(raw: bytes) -> bytes:
    """JSON text without halves of surrogate pairs: each becomes U+FFFD."""
    return _SURROGATES.sub(lambda m: rb"\ufffd" if m[1] else m[0], raw)


def digest_of(data: dict[str, Any], *ignored: str) -> str:
    """Digest of a body without the fields that do not change its answer."""
    same = {k: v for k, v in data.items() if k not in ignored}
    return hashlib.blake2b(msgspec.json.encode(same, order="deterministic"), digest_size=16).hexdigest()


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(data) + b"\n\n"
