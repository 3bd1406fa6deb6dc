"""Attention masks of packed micro-steps: query token i may attend to key token j iff j <= i < end[j]."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from gyre_traj.errors import BadChoice
from gyre_traj.packing import Packed


def dense_mask(packed: Packed, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bool [n, n]: True where query token i (row) may attend to key token j (column)."""
    end = _end(packed, device)
    token = torch.arange(packed.tokens, device=device, dtype=torch.int32)
    return (token[None, :] <= token[:, None]) & (token[:, None] < end[None, :])


def block_mask(packed: Packed, device: torch.device | str = "cpu", block_size: int = 128) -> BlockMask:
    """Return the mask for `flex_attention`, with batch and heads of 1, which broadcast.

    Which blocks are empty, full or partial follows from the latest and the earliest `end` in each block of keys, so
    that [n, n] never exists; what does is [n / block_size, n / block_size], the form of a `BlockMask`. Raises
    `BadChoice`.
    """
    if block_size < 1:
        raise BadChoice(f"block_size must be at least 1, got {block_size!r}; a usual one is 128")
    n = packed.tokens
    end = _end(packed, device)
    blocks = -(-n // block_size)
    padded = torch.nn.functional.pad(end, (0, blocks * block_size - n)).view(blocks, block_size)
    latest, earliest = padded.amax(1), padded.amin(1)  # the padding ends at 0: a block with some of it is never full
    first = torch.arange(blocks, device=device, dtype=torch.int32)[:, None] * block_size  # query of each block of them
    before = first > first.T
    full = before & (earliest >= first + block_size)
    partial = (before & (latest > first) & ~full) | (first == first.T)

    def allowed(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < end[key])

    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=block_size, mask_mod=allowed, seq_lengths=(n, n)
    )


def _end(packed: Packed, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(packed.arrays().end).to(device)


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [rows, columns] -> how many columns of each row are set [1, 1, rows], and those columns first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
