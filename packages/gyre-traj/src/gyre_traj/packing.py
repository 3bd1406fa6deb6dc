"""Packing: rows of trajectories -> micro-steps under a token budget.

A packed micro-step is a forest laid out depth first. Token j has `position[j]` (its depth in its tree) and `end[j]`
(the index after its subtree); token i may attend to j iff j <= i < end[j]. Plain rows are trees without branches. Targets
are a list of their own, since a token where paths fork predicts several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray


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
        raise NotImplementedError


def pack_rows(rows: Sequence[Row], budget: int) -> list[Packed]:
    """Pack rows into micro-steps of at most `budget` tokens each, as equal in length as they come.

    Tails after a row's last target are dropped, rows without targets too: neither changes the loss. A row longer than
    the budget gets a micro-step of its own. Deterministic. Raises `BadRow`.
    """
    raise NotImplementedError


def pack_forests(rows: Sequence[Row], budget: int) -> list[Packed]:
    """As `pack_rows`, but rows of one execution share their prefixes: a shared token is laid out once a micro-step.

    A tree larger than the budget is cut between rows, its prefix repeated as context. Raises `BadRow`.
    """
    raise NotImplementedError
