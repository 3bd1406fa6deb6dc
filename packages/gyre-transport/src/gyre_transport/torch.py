"""Torch tensors to and from snapshots, without copies. Imports torch (extra `[torch]`), as only SGLang's side of `kv`
does besides."""

from __future__ import annotations

import torch

from gyre_transport.buffers import view
from gyre_transport.errors import ShapeMismatch
from gyre_transport.snapshot import Snapshot

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def tensors(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Views of a pulled snapshot, name -> CPU tensor.

    They keep its buffer alive, and change when another version is pulled into it.
    """
    found = {}
    for name, (dtype, shape, data) in snapshot.items():
        flat = torch.frombuffer(data, dtype=_DTYPES[dtype]) if data.nbytes else torch.empty(0, dtype=_DTYPES[dtype])
        found[name] = flat.reshape(shape)
    return found


def describe(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """(dtype, shape, bytes) of a CPU tensor for `SnapshotSource.publish`; the bytes keep the tensor alive.

    Raises `ShapeMismatch` for a tensor that is not contiguous, not on the CPU, or of a dtype safetensors does not know.
    """
    local = view(tensor)
    if local.dtype is None or local.shape is None:
        raise ShapeMismatch(f"safetensors has no name for {tensor.dtype}; convert the tensor")
    return local.dtype, local.shape, local.bytes
