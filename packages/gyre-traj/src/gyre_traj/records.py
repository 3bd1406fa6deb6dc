"""Call records: what the proxy writes and everything else reads.

Token ids travel as little-endian uint32 bytes and log-probabilities as little-endian float32 bytes: a record of a
700,000-token call encodes at memory speed and reads back as numpy views.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gyre_traj.errors import BadIds

CERTAIN = 1e-3  # a log-probability above it is none: engines round, so a certain token may come out a hair above 0


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) were sampled by weights `version`."""

    version: int
    start: int
    end: int


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One request to one engine; a call that moved has several."""

    engine: str
    rid: str
    tokens: int  # output tokens it contributed
    end: str  # "stop", "length", "abort", "drain", "error: …"
    context: int = 0  # tokens it began with: the prompt and what earlier attempts had sampled
    cached: int | None = None  # of those, tokens whose KV the engine had or restored; None: it never said


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """One model call, token in, token out.

    `prompt` holds the ids after the first `prefix`; those are the whole prompt + output of call `parent` (None: a root,
    prefix 0). `inserted` are spans of `prompt`, relative to its start, that closed or separated turns on the
    template's behalf; like everything in `prompt` they are never loss targets.
    """

    call: str
    execution: str
    role: str = "main"  # main | main-summary | sub-agent | sub-agent-summary | a table's own
    dialect: str = "chat"
    parent: str | None = None
    prefix: int = 0
    prompt: bytes = b""  # uint32 LE
    inserted: tuple[tuple[int, int], ...] = ()
    output: bytes = b""  # uint32 LE, exactly as sampled
    logprobs: bytes = b""  # float32 LE, one per output token, under the sampling distribution; empty: not trainable
    versions: tuple[Span, ...] = ()
    finish: str = "stop"  # stop | length | abort | error
    matched_stop: int | str | None = None
    attempts: tuple[Attempt, ...] = ()
    sampling: dict[str, Any] = {}
    tools_hash: str = ""
    template_hash: str = ""
    request: dict[str, Any] = {}  # fields of the request nobody else keeps
    started: float = 0.0  # unix seconds
    ended: float = 0.0


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """First record of a log."""

    execution: str
    format: int = 1
    model: str = ""
    tokenizer_hash: str = ""
    created: float = 0.0


class Delivered(msgspec.Struct, frozen=True, kw_only=True, tag="delivered"):
    """The answer of `call` was written to the harness completely (ok) or the connection was lost (not ok)."""

    call: str
    ok: bool = True


Record = Header | Call | Delivered


def token_ids(values: ArrayLike) -> NDArray[np.uint32]:
    """Whole numbers in [0, 2^32) -> contiguous little-endian ids [n]. Raises `BadIds`: nothing wraps or is rounded."""
    ids = np.asarray(values)
    whole = ids.size == 0 or ids.dtype.kind == "u" or (ids.dtype.kind == "i" and int(ids.min()) >= 0)
    if ids.ndim != 1 or not whole or (ids.itemsize > 4 and ids.size and int(ids.max()) >= 1 << 32):
        raise BadIds(f"expected token ids, whole numbers in [0, 2^32) in one row, got {values!r:.80}")
    return np.ascontiguousarray(ids, dtype="<u4")


def pack_ids(ids: ArrayLike) -> bytes:
    """Token ids [n] -> uint32 LE bytes. Raises `BadIds`."""
    return token_ids(ids).tobytes()


def unpack_ids(raw: bytes) -> NDArray[np.uint32]:
    """uint32 LE bytes -> read-only ids [n]."""
    return np.frombuffer(raw, dtype="<u4")


def pack_logprobs(values: ArrayLike) -> bytes:
    """Log-probabilities -> float32 LE bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_logprobs(raw: bytes) -> NDArray[np.float32]:
    """float32 LE bytes -> read-only log-probabilities [n]."""
    return np.frombuffer(raw, dtype="<f4")
