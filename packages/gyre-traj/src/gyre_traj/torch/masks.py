"""Attention masks of packed micro-steps."""

from __future__ import annotations

import torch

from gyre_traj.packing import Packed


def dense_mask(packed: Packed, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bool [n, n]: True where query token i (row) may attend to key token j (column)."""
    raise NotImplementedError
