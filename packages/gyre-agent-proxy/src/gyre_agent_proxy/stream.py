"""SGLang's `/generate` stream, read incrementally into exact ids, log-probabilities and version spans.

Fields may be cumulative (the default) or incremental (`--incremental-streaming-output`); `completion_tokens` says how
many tokens there are in all, so either is sliced exactly. Anything that does not add up is an error, never a guess.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gyre_agent_proxy.errors import EngineError


class StreamError(EngineError):
    """The engine sent something that cannot be understood exactly."""


class Events:
    """Server-sent events out of raw bytes: `feed` returns the complete `data:` payloads."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []  # a line without its end

    def feed(self, raw: bytes) -> list[bytes]:
        """Add bytes; return each payload they complete."""
        if b"\n" not in raw:
            self._begun.append(raw)
            return []
        *lines, rest = b"".join((*self._begun, raw)).split(b"\n")
        self._begun = [rest]
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


Versions = tuple[tuple[str, int, int], ...]  # (version, start, end): which weights sampled which output tokens


class Meta(msgspec.Struct):
    """An event's `meta_info`, as far as it is read."""

    completion_tokens: int | None = None
    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[list[Any]] | None = None  # (log-probability, id, …) a token
    weight_version: str | int | None = None
    weight_versions: list[dict[str, Any]] | None = None
    cached_tokens: int | None = None
    cached_tokens_details: dict[str, Any] | None = None  # {"device": tokens, "host": tokens, …}


class Event(msgspec.Struct):
    """One event of `/generate`."""

    output_ids: list[int] | None = None
    meta_info: Meta | None = None
    error: Any = None


class Piece(msgspec.Struct):
    """What one event added."""

    ids: list[int]
    logprobs: list[float] | None  # None: not (all) there
    finish: dict[str, Any] | None
    versions: Versions  # of this request's output so far
    cached: int  # prompt tokens whose KV was there or restored
    restored: int = 0  # of those, tokens whose pages came from outside the engine's own cache


class Reader:
    """State of one stream."""

    def __init__(self) -> None:
        self.count = 0  # output tokens so far
        self.certain: int | None = None  # which weights sampled the tokens after these is not sure; None: all are
        self._versions: Versions = ()

    def read(self, event: Event) -> Piece:
        """Return what `event` adds. Raises `StreamError`."""
        meta, before = event.meta_info, self.count
        if meta is None:
            raise StreamError("expected meta_info in the engine's event, got none")
        finish = meta.finish_reason
        total = meta.completion_tokens
        if total is None and finish is not None and finish.get("type") == "abort":
            total = before
        if total is None or total < before:
            raise StreamError(f"expected completion_tokens of at least {before}, got {total!r}")
        fresh = total - before
        if not fresh:
            return Piece([], [], finish, self._noted(meta, total), meta.cached_tokens or 0, _restored(meta))
        if event.output_ids is None:
            raise StreamError(f"expected output_ids for {fresh} tokens, got none; does a router strip them?")
        new = _new(event.output_ids, before, fresh)
        if new is None:
            raise StreamError(f"{before} + {fresh} tokens do not fit {len(event.output_ids)} output_ids")
        got = _new(meta.output_token_logprobs or [], before, fresh)
        logprobs: list[float] | None = None
        if got is not None and min(map(len, got)) >= 2:
            values, ids = [e[0] for e in got], [e[1] for e in got]
            if {float, int}.issuperset(map(type, values)):
                if ids != new:
                    raise StreamError("the engine's log-probabilities belong to other tokens than its output_ids")
                logprobs = list(map(float, values))
        self.count = total
        return Piece(new, logprobs, finish, self._noted(meta, total), meta.cached_tokens or 0, _restored(meta))

    def _noted(self, meta: Meta, total: int) -> Versions:
        """Which weights sampled which tokens: the engine's spans (it sends them at the end), until then its label.

        Where the label changes within an event of several tokens, only the spans could tell at which.
        """
        if meta.weight_versions:
            self.certain = None
            self._versions = tuple(
                (str(s.get("version")), int(s.get("start", 0)), int(s.get("end", total))) for s in meta.weight_versions
            )
            return self._versions
        label, done = meta.weight_version, self._versions[-1][2] if self._versions else 0
        if label is None or total <= done:
            return self._versions
        if self._versions and self._versions[-1][0] == str(label):
            self._versions = (*self._versions[:-1], (str(label), self._versions[-1][1], total))
        else:
            if self._versions and total - done > 1 and self.certain is None:
                self.certain = done
            self._versions = (*self._versions, (str(label), done, total))
        return self._versions


def _restored(meta: Meta) -> int:
    details = meta.cached_tokens_details or {}
    return sum(n for where, n in details.items() if where != "device" and isinstance(n, int))


def _new(values: list[Any], seen: int, fresh: int) -> list[Any] | None:
    """The last `fresh` of `values`, cumulative or incremental; None if they are neither."""
    if fresh == 0:
        return []
    if len(values) == seen + fresh:
        return values[seen:]
    return values if len(values) == fresh else None


def version_number(version: str, default: int) -> int:
    """The number a version label begins with ("3", "3-5d41ac0b"); an engine started without one says "default"."""
    number = version.partition("-")[0]
    return int(number) if number.isdigit() else default
