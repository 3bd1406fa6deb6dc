"""A scheduler process's place among the ranks of its engine; each rank has its own part of every page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from gyre_transport.kv.pages import UnfitPool


class Rank(NamedTuple):
    """Tensor-parallel rank within pipeline stage."""

    tp: int
    tp_size: int
    pp: int
    pp_size: int

    @property
    def words(self) -> str:
        """Part of a page's layout."""
        return f"tp={self.tp}/{self.tp_size} pp={self.pp}/{self.pp_size}"

    @property
    def number(self) -> int:
        """Place in `LinkerConfig.addresses`."""
        return self.pp * self.tp_size + self.tp

    @property
    def alone(self) -> bool:
        """Whether no other rank must agree."""
        return self.tp_size * self.pp_size == 1

    def counts_file(self, configured: str) -> Path | None:
        """Where the counters go; None: nowhere."""
        return Path(f"{configured}{f'-{self.number}' if self.number else ''}.json") if configured else None


def rank_of(params: Any) -> Rank:
    """This process's rank, from what SGLang gives a cache. Raises `UnfitPool`."""
    if params.attn_cp_size > 1:
        raise UnfitPool("KV pages do not move between engines with context parallelism; set kv.moves = false")
    group = params.tp_cache_group
    return Rank(
        tp=torch.distributed.get_rank(group=group) if group is not None else 0,
        tp_size=torch.distributed.get_world_size(group=group) if group is not None else 1,
        pp=params.pp_rank,
        pp_size=params.pp_size,
    )
