"""Stand-in for torch_memory_saver where CUDA is absent: a released KV pool gives its pages back to the system.

SGLang allocates each kind of memory inside `region(tag)`, and pauses and resumes by tag. Here only the KV pool is
released: its pages are dropped with madvise(MADV_DONTNEED) and read as zeros when they are next touched, so that
resuming is nothing. Weights and everything else stay. Because a fresh pool holds zeros, it is dropped once at the
end of its region too: the pool costs memory only as tokens fill it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_KV_CACHE = "kv_cache"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _drop_pages(tensor: torch.Tensor) -> None:
    """Give the whole pages within the tensor's storage back; they read as zeros afterwards."""
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and _libc.madvise(start, end - start, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) on the KV pool failed")


class _Zeros(TorchFunctionMode):  # type: ignore[misc]
    """Records the tensors that torch.zeros makes."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.zeros and isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.tensors.append(made)
        return made


class _Saver:
    """The part of TorchMemorySaver's interface that SGLang uses."""

    enabled = True

    def __init__(self) -> None:
        self._pool: list[torch.Tensor] = []

    @contextlib.contextmanager
    def region(self, tag: str = "", **_: Any) -> Iterator[None]:
        """Remember the zeroed tensors made within, if they are the KV pool."""
        if tag != _KV_CACHE:
            yield
            return
        with _Zeros() as zeros:
            yield
        for tensor in zeros.tensors:
            _drop_pages(tensor)
        self._pool += zeros.tensors

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Nothing is recorded that would have to be left out."""
        yield

    def pause(self, tag: str | None = None) -> None:
        """Release the KV pool; other tags hold nothing that could be given back without losing it."""
        if tag in (None, _KV_CACHE):
            for tensor in self._pool:
                _drop_pages(tensor)

    def resume(self, tag: str | None = None) -> None:
        """Pages come back as they are touched."""


torch_memory_saver = _Saver()


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """No library has to be preloaded."""
    yield
