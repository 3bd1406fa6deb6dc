"""Torch tensors to and from snapshots, without copies. The only module here that imports torch (extra `[torch]`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gyre_transport.errors import DataError

if TYPE_CHECKING:
    import torch

    from gyre_transport.snapshot import Snapshot


def tensors(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Views of a pulled snapshot, name -> CPU tensor; they keep its buffer alive and change when it is pulled into again."""
    raise DataError("not implemented")


def describe(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], Any]:
    """(dtype, shape, bytes) of a contiguous CPU tensor for `SnapshotSource.publish`. Raises `ShapeMismatch`."""
    raise DataError("not implemented")
