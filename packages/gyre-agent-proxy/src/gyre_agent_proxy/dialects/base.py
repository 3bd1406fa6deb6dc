"""What every dialect has in common: defaults for what a request leaves open, and reading of untyped JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from gyre_agent_proxy.errors import BadRequest


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling for requests that leave it open."""

    max_tokens: int = 4096
    temperature: float = 1.0
    top_p: float = 1.0


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
    """The JSON object in `raw`. Raises `BadRequest`."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"the body is not JSON: {e}") from e
    if not isinstance(data, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(data).__name__}")
    return data
