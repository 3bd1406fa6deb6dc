"""Copies of KV pages between an engine's pool and a store. Imports torch: only the linker imports this module.

A plain pool (MHA, GQA) keeps, for each layer, keys and values of all tokens: [tokens, heads, dim]; a page is
`page_size` rows of each. In a slot they lie one after the other: keys of layer 0, values of layer 0, keys of layer 1, …
"""

from __future__ import annotations

from typing import Any

import torch

from gyre_transport.kv.store import PageStore

_STAGE = 256  # pages copied at once: bounds what a copy from a GPU takes there


class UnfitPool(ValueError):
    """The engine keeps its KV in a way this linker does not know."""


class PoolPages:
    """The pages of one pool; `bind` gives it the store they go to and come from."""

    def __init__(self, pool: Any, page_size: int) -> None:
        """Raises `UnfitPool`."""
        keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
        scaled = [n for n in ("k_scale_buffer", "native_k_scale_buffer") if getattr(pool, n, None) is not None]
        if not keys or not values or len(keys) != len(values) or scaled:
            raise UnfitPool(
                f"expected a plain pool of keys and values, got {type(pool).__name__} {scaled or ''}; "
                "set kv.moves = false for this model"
            )
        self.page_size = page_size
        self.layers = len(keys)
        self.dtype = str(keys[0].dtype).removeprefix("torch.")
        self.device = keys[0].device
        buffers = [buffer for pair in zip(keys, values, strict=True) for buffer in pair]
        if any(b.dtype != keys[0].dtype or not b.is_contiguous() for b in buffers):
            raise UnfitPool(f"expected contiguous buffers of one dtype in {type(pool).__name__}; set kv.moves = false")
        self._pool = [b[: b.shape[0] // page_size * page_size].view(-1, page_size * b[0].numel()) for b in buffers]
        self.page_nbytes = sum(b.shape[1] * b.element_size() for b in self._pool)
        self.pages = self._pool[0].shape[0]
        self._slots: list[torch.Tensor] = []

    def bind(self, store: PageStore) -> None:
        """Lay the pages out in the slots of `store`."""
        memory = torch.from_numpy(store.memory)
        if self.device.type == "cuda":  # so that copies need no further copy; a system that refuses is slower only
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        at = 0
        for buffer in self._pool:
            size = buffer.shape[1] * buffer.element_size()
            self._slots.append(memory[:, at : at + size].view(buffer.dtype))
            at += size

    def locate(self, indices: torch.Tensor) -> torch.Tensor:
        """Page numbers [n] of token indices [n * page_size]. Raises `UnfitPool` when these are not whole pages."""
        rows = indices.detach().to("cpu", torch.int64).view(-1, self.page_size)
        first = rows[:, 0]
        if (first % self.page_size).any() or (rows != first[:, None] + torch.arange(self.page_size)).any():
            raise UnfitPool("expected whole aligned pages in the engine's pool; is kv.page_size the engine's?")
        return first // self.page_size

    def save(self, pages: torch.Tensor, slots: list[int]) -> None:
        """Pool pages [n] -> slots. On a GPU on the current stream, and done on return."""
        for start in range(0, len(slots), _STAGE):
            source = pages[start : start + _STAGE].to(self.device)
            target = torch.tensor(slots[start : start + _STAGE])
            for buffer, slot in zip(self._pool, self._slots, strict=True):
                slot.index_copy_(0, target, buffer.index_select(0, source).to("cpu"))

    def restore(self, layer: int, slots: list[int], pages: torch.Tensor) -> None:
        """Slots -> pool pages [n], for one layer. On a GPU on the current stream, and done on return."""
        source, target = torch.tensor(slots), pages.to(self.device)
        for which in (2 * layer, 2 * layer + 1):
            self._pool[which].index_copy_(0, target, self._slots[which].index_select(0, source).to(self.device))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
