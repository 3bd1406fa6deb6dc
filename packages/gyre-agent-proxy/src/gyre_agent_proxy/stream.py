"""SGLang's `/generate` stream, read incrementally into exact ids, log-probabilities and version spans.

Fields may be cumulative (the default) or incremental (`--incremental-streaming-output`); `completion_tokens` says how
many tokens there are in all, so either is sliced exactly. Anything that does not add up is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre_agent_proxy.errors import EngineError


class StreamError(EngineError):
    """The engine sent something that cannot be understood exactly."""


class Events:
    """Server-sent events out of raw bytes: `feed` returns the complete `data:` payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, raw: bytes) -> Iterator[bytes]:
        """Add bytes and yield each payload they complete."""
        searched = max(0, len(self._buffer) - 1)
        self._buffer += raw
        while (end := self._buffer.find(b"\n", searched)) >= 0:
            line = bytes(self._buffer[:end]).rstrip(b"\r")
            del self._buffer[: end + 1]
            searched = 0
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Piece(msgspec.Struct):
    """What one event added."""

    ids: list[int]
    logprobs: list[float] | None  # None: not (all) there
    finish: dict[str, Any] | None
    versions: list[tuple[str, int, int]]  # of this request's output so far: (version, start, end)
    cached: int


class Reader:
    """State of one stream."""

    def __init__(self) -> None:
        self.count = 0  # output tokens so far
        self._versions: list[tuple[str, int, int]] = []

    def read(self, event: dict[str, Any]) -> Piece:
        """Return what `event` adds. Raises `StreamError`."""
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise StreamError(f"expected meta_info in the engine's event, got keys {sorted(event)!r}")
        finish = meta.get("finish_reason")
        aborted = isinstance(finish, dict) and finish.get("type") == "abort"
        total = meta.get("completion_tokens", self.count if aborted else None)
        ids = event.get("output_ids")
        if not isinstance(total, int) or total < self.count:
            raise StreamError(f"expected completion_tokens of at least {self.count}, got {total!r}")
        fresh = total - self.count
        if fresh and not isinstance(ids, list):
            raise StreamError(
                f"expected output_ids for {fresh} tokens, got {type(ids).__name__}; does a router strip them?"
            )
        new = _new(ids or [], self.count, fresh)
        if new is None:
            raise StreamError(f"{self.count} + {fresh} tokens do not fit {len(ids or [])} output_ids")
        entries = meta.get("output_token_logprobs")
        logprobs: list[float] | None = []
        if fresh:
            got = _new(entries, self.count, fresh) if isinstance(entries, list) else None
            logprobs = None
            if got is not None and all(len(e) >= 2 and isinstance(e[0], float | int) for e in got):
                if [e[1] for e in got] != new:
                    raise StreamError("the engine's log-probabilities belong to other tokens than its output_ids")
                logprobs = [float(e[0]) for e in got]
        self._note_versions(meta, self.count, total)
        self.count = total
        return Piece(
            ids=new,
            logprobs=logprobs,
            finish=finish if isinstance(finish, dict) else None,
            versions=list(self._versions),
            cached=int(meta.get("cached_tokens") or 0),
        )

    def _note_versions(self, meta: dict[str, Any], before: int, total: int) -> None:
        """Which weights sampled which tokens: the engine's spans (it sends them at the end), until then its label."""
        if spans := meta.get("weight_versions"):
            self._versions = [(str(s.get("version")), int(s.get("start", 0)), int(s.get("end", total))) for s in spans]
        elif total > before and (label := meta.get("weight_version")) is not None:
            if self._versions and self._versions[-1][0] == str(label):
                before = self._versions.pop()[1]
            self._versions.append((str(label), before, total))


def _new(values: list[Any], seen: int, fresh: int) -> list[Any] | None:
    """The last `fresh` of `values`, cumulative or incremental; None if they are neither."""
    if fresh == 0:
        return []
    if len(values) == seen + fresh:
        return values[seen:]
    return values if len(values) == fresh else None


def version_number(version: str, default: int) -> int:
    """The number in a version label; an engine started without one says "default"."""
    return int(version) if version.isdigit() else default
