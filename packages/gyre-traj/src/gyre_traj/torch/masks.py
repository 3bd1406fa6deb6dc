"""Attention masks of packed micro-steps."""

from __future__ import annotations

import torch

from gyre_traj.packing import Packed


def dense_mask(packed: Packed, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bool [n, n]: True where query token i (row) may attend to key token j (column), i.e. j <= i < end[j]."""
    end = torch.from_numpy(packed.arrays().end.copy()).to(device)
    token = torch.arange(packed.tokens, device=device, dtype=torch.int32)
    return (token[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
