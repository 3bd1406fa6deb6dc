"""Stand-in for SGLang's compiled kernels where CUDA is absent.

The published wheel of `sgl_kernel` loads only beside a CUDA driver, and SGLang imports it whatever the device. The
engine launcher puts this folder's parent first on the engine's PYTHONPATH, on such machines only. What SGLang's CPU
path calls for a dense model with torch attention is implemented in plain torch; every other name can be imported and
raises when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"


def _slices(rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> Iterator[tuple[int, slice, slice]]:
    """For each request: its row, its columns in the table, and its stretch of the concatenated locations."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, slice(start, end), slice(done, done + end - start)
        done += end - start


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's KV locations [sum of lengths] into its columns [start, end) of `req_to_token`."""
    for row, columns, part in _slices(req_pool_indices, start_offset, end_offset):
        req_to_token[row, columns] = out_cache_loc[part].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The reverse: gather columns [start, end) of each request's row into `out_cache_loc` [sum of lengths]."""
    for row, columns, part in _slices(req_pool_indices, start_offset, end_offset):
        out_cache_loc[part] = req_to_token[row, columns].to(out_cache_loc.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU stand-in; this model or option needs a machine with CUDA"
        )

    return absent
