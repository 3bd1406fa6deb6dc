"""What a model reads of a packed micro-step, beside the mask."""

from __future__ import annotations

import torch

from gyre_traj.packing import Packed


def input_ids(packed: Packed, device: torch.device | str = "cpu") -> torch.Tensor:
    """Token ids, int64 [n]."""
    return torch.from_numpy(packed.arrays().ids.astype("int64")).to(device)


def position_ids(packed: Packed, device: torch.device | str = "cpu") -> torch.Tensor:
    """Depth of each token in its tree, int64 [n]: what rotary or learned positions are made of."""
    return torch.from_numpy(packed.arrays().position.astype("int64")).to(device)
