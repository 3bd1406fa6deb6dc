"""Packing: rows of trajectories -> micro-steps under a token budget.

A packed micro-step is a forest laid out depth first. Token j has `position[j]` (its depth in its tree) and `end[j]`
(the index after its subtree); token i may attend to j iff j <= i < end[j]. Plain rows are trees without branches.
Targets are a list of their own, since a token where paths fork predicts several.

    rows [abcde]* [abxy]*      position 0 1 2 3 4 2 3     x is predicted by b: source 1
    ids   a b c d e x y        end      7 7 5 5 5 7 7
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_traj.errors import BadRow


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory, ready to train on. All its targets share weight and advantage."""

    execution: str
    trajectory: int  # unique number in the batch
    ids: NDArray[np.uint32]  # [n]
    target: NDArray[np.bool_]  # [n]; never the first token, which nothing predicts
    logprobs: NDArray[np.float32]  # [n] behaviour log-probability at targets
    weight: float  # w_t of each target
    advantage: float
    temperature: NDArray[np.float32] | None = None  # [n] what the logits of targets were divided by; None: 1


class PackedArrays(NamedTuple):
    """Read-only views of a `Packed`: n tokens, m targets."""

    ids: NDArray[np.uint32]  # [n]
    position: NDArray[np.int32]  # [n] depth
    end: NDArray[np.int32]  # [n] index after the token's subtree
    source: NDArray[np.uint32]  # [m] index of the token whose logits predict the target
    target: NDArray[np.uint32]  # [m] the id to predict
    weight: NDArray[np.float32]  # [m]
    advantage: NDArray[np.float32]  # [m]
    logprob: NDArray[np.float32]  # [m] behaviour log-probability
    execution: NDArray[np.uint32]  # [m] index into `Packed.executions`
    trajectory: NDArray[np.uint32]  # [m] unique number in the batch
    temperature: NDArray[np.float32]  # [m] divide the target's logits by it: the behaviour policy did


_TOKENS = {"ids": "<u4", "position": "<i4", "end": "<i4"}  # [n]
_TARGETS = {
    "source": "<u4",
    "target": "<u4",
    "weight": "<f4",
    "advantage": "<f4",
    "logprob": "<f4",
    "execution": "<u4",
    "trajectory": "<u4",
    "temperature": "<f4",
}  # [m]
_FIELDS = _TOKENS | _TARGETS


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """A micro-step on the wire: arrays as little-endian bytes, shapes and dtypes as in `PackedArrays`."""

    ids: bytes
    position: bytes
    end: bytes
    source: bytes
    target: bytes
    weight: bytes
    advantage: bytes
    logprob: bytes
    execution: bytes
    trajectory: bytes
    temperature: bytes
    executions: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """n, the tokens to compute."""
        return len(self.ids) // 4

    @property
    def targets(self) -> int:
        """m, the targets."""
        return len(self.source) // 4

    def arrays(self) -> PackedArrays:
        """Views of the arrays. Raises `BadRow` when they do not fit together."""
        for name in _FIELDS:
            size = 4 * (self.tokens if name in _TOKENS else self.targets)
            if len(getattr(self, name)) != size:
                raise BadRow(f"packed field {name!r} has {len(getattr(self, name))} bytes, expected {size}; resend it")
        return PackedArrays(**{name: np.frombuffer(getattr(self, name), dtype) for name, dtype in _FIELDS.items()})


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A tree that stays whole: rows in the order of their ids, each with what it shares with the one before."""

    rows: tuple[Row, ...]
    shared: tuple[int, ...]  # ids of row i that row i - 1 laid out already; 0 for the first
    tokens: int


def pack_rows(rows: Sequence[Row], budget: int) -> list[Packed]:
    """Pack rows into micro-steps of at most `budget` tokens each, as equal in length as they come.

    Tails after a row's last target are dropped, rows without targets too: neither changes the loss. A row longer than
    the budget gets a micro-step of its own. Deterministic. Raises `BadRow`.
    """
    return _pack([_Piece((row,), (0,), len(row.ids)) for row in _trimmed(rows, budget)], budget)


def pack_forests(rows: Sequence[Row], budget: int) -> list[Packed]:
    """As `pack_rows`, but rows share their prefixes: a shared token is laid out once a micro-step.

    The branches of an execution share what they have in common, and so do the executions of a group, and groups under
    one system prompt. Each keeps its own targets: a token that two executions sampled alike is computed once and is a
    target of both. A tree larger than the budget is cut between rows, its prefix repeated as context. Raises `BadRow`.
    """
    return _pack(_cut(_trimmed(rows, budget), budget), budget)


def _trimmed(rows: Sequence[Row], budget: int) -> list[Row]:
    """Check rows; drop what no target depends on."""
    if budget < 1:
        raise BadRow(f"the token budget must be at least 1, got {budget!r}")
    if len({row.trajectory for row in rows}) != len(rows):
        raise BadRow("trajectory numbers must be unique among the rows packed together; number them through the batch")
    kept = []
    for row in rows:
        n = len(row.ids)
        temperature = np.ones(n, dtype=np.float32) if row.temperature is None else row.temperature
        if not len(row.target) == len(row.logprobs) == len(temperature) == n:
            raise BadRow(
                f"row {row.trajectory} of {row.execution!r}: {n} ids, {len(row.target)} target flags, "
                f"{len(row.logprobs)} log-probabilities, {len(temperature)} temperatures; expected as many of each"
            )
        places = np.flatnonzero(row.target)
        if not len(places):
            continue
        if places[0] == 0:
            raise BadRow(f"row {row.trajectory} of {row.execution!r}: the first token cannot be a target")
        if not (
            np.isfinite([row.weight, row.advantage]).all()
            and np.isfinite(row.logprobs[places]).all()
            and np.isfinite(temperature[places]).all()
            and (temperature[places] > 0).all()
        ):
            raise BadRow(
                f"row {row.trajectory} of {row.execution!r}: weight {row.weight!r}, advantage {row.advantage!r}, and "
                "at targets log-probabilities and temperatures must be finite, temperatures above 0"
            )
        kept.append(_head(row, int(places[-1]) + 1, temperature))
    return kept


def _head(row: Row, n: int, temperature: NDArray[np.float32]) -> Row:
    return replace(row, ids=row.ids[:n], target=row.target[:n], logprobs=row.logprobs[:n], temperature=temperature[:n])


def _cut(rows: list[Row], budget: int) -> list[_Piece]:
    """Order rows so that neighbours share most, and cut the sequence where the budget is full."""
    ordered = sorted(rows, key=lambda row: (row.ids.astype(">u4").tobytes(), row.trajectory))
    pieces: list[_Piece] = []
    taken: list[Row] = []
    shared: list[int] = []
    tokens = 0
    for row in ordered:
        common = _common(taken[-1].ids, row.ids) if taken else 0
        if taken and tokens + len(row.ids) - common > budget:
            pieces.append(_Piece(tuple(taken), tuple(shared), tokens))
            taken, shared, tokens, common = [], [], 0, 0
        taken.append(row)
        shared.append(common)
        tokens += len(row.ids) - common
    if taken:
        pieces.append(_Piece(tuple(taken), tuple(shared), tokens))
    return pieces


def _common(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _pack(pieces: list[_Piece], budget: int) -> list[Packed]:
    """Longest first, each into the emptiest of as few bins as first-fit-decreasing needs."""
    pieces = sorted(pieces, key=lambda piece: (-piece.tokens, piece.rows[0].trajectory))
    first_fit = _place(pieces, budget, [])
    balanced = _place(pieces, budget, [[] for _ in first_fit])
    bins = balanced if len(balanced) == len(first_fit) else first_fit
    return [_lay_out(pieces) for pieces in bins]


def _place(pieces: list[_Piece], budget: int, bins: list[list[_Piece]]) -> list[list[_Piece]]:
    """Put each piece into the emptiest of the bins given, or without any into the first it fits; add bins as needed."""
    balance = bool(bins)
    loads = [0] * len(bins)
    for piece in pieces:
        order = [min(range(len(bins)), key=loads.__getitem__)] if balance else range(len(bins))
        at = next((i for i in order if not loads[i] or loads[i] + piece.tokens <= budget), len(bins))
        if at == len(bins):
            bins.append([])
            loads.append(0)
        bins[at].append(piece)
        loads[at] += piece.tokens
    return bins


def _lay_out(pieces: Iterable[_Piece]) -> Packed:
    fields: dict[str, list[NDArray[Any]]] = {name: [] for name in _FIELDS}
    executions: dict[str, int] = {}
    offset = 0
    for piece in pieces:
        longest = max(len(row.ids) for row in piece.rows)
        path = np.zeros(longest, dtype=np.int64)  # index, in the piece, of the current row's token at each depth
        end = np.zeros(piece.tokens, dtype=np.int64)
        laid, before = 0, 0
        for row, shared in zip(piece.rows, piece.shared, strict=True):
            end[path[shared:before]] = laid  # subtrees that the row before leaves behind
            n = len(row.ids)
            path[shared:n] = np.arange(laid, laid + n - shared)
            laid, before = laid + n - shared, n
            fields["ids"].append(row.ids[shared:])
            fields["position"].append(np.arange(shared, n))
            places = np.flatnonzero(row.target)
            fields["source"].append(path[places - 1] + offset)
            fields["target"].append(row.ids[places])
            fields["logprob"].append(row.logprobs[places])
            assert row.temperature is not None  # noqa: S101 - trimmed rows have one
            fields["temperature"].append(row.temperature[places])
            numbers = {
                "weight": row.weight,
                "advantage": row.advantage,
                "execution": executions.setdefault(row.execution, len(executions)),
                "trajectory": row.trajectory,
            }
            for name, value in numbers.items():
                fields[name].append(np.full(len(places), value))
        end[path[:before]] = laid
        fields["end"].append(end + offset)
        offset += piece.tokens
    packed = {name: np.concatenate(fields[name]).astype(dtype).tobytes() for name, dtype in _FIELDS.items()}
    return Packed(**packed, executions=tuple(executions))
