"""Local memory as bytes: what may be registered, published or read into, and the names of its types.

Anything that is C-contiguous: numpy arrays, torch tensors (through `data_ptr`; torch is not imported), and objects of
the buffer protocol. Everything else is refused: a copy made here would be a copy nobody sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_transport.errors import DataError, ShapeMismatch

# safetensors name -> (bytes an element, numpy type or None where numpy has none)
DTYPES: dict[str, tuple[int, str | None]] = {
    "F64": (8, "<f8"),
    "I64": (8, "<i8"),
    "U64": (8, "<u8"),
    "C64": (8, "<c8"),
    "F32": (4, "<f4"),
    "I32": (4, "<i4"),
    "U32": (4, "<u4"),
    "F16": (2, "<f2"),
    "BF16": (2, None),
    "I16": (2, "<i2"),
    "U16": (2, "<u2"),
    "F8_E4M3": (1, None),
    "F8_E5M2": (1, None),
    "I8": (1, "|i1"),
    "U8": (1, "|u1"),
    "BOOL": (1, "|b1"),
}
THREADS = min(4, os.cpu_count() or 1)  # copies and checksums release the interpreter's lock
_NARROW = 1 << 16  # elements
_FROM_NUMPY = {name: dtype for dtype, (_, name) in DTYPES.items() if name}
_FROM_TORCH = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
    "torch.complex64": "C64",
}


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises `ShapeMismatch` for an unknown dtype or a negative dimension."""
    if dtype not in DTYPES:
        raise ShapeMismatch(f"unknown dtype {dtype!r}; known: {sorted(DTYPES)}")
    if any(n < 0 for n in shape):
        raise ShapeMismatch(f"shape {shape!r} has a negative dimension")
    return DTYPES[dtype][0] * math.prod(shape)


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """Contiguous local memory; `bytes` keeps it alive, and is a `gpu.memory.GpuBytes` where `anywhere` found a GPU."""

    bytes: memoryview  # [nbytes], format "B"
    address: int
    dtype: str | None  # None: untyped bytes, or a type safetensors does not name
    shape: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.bytes.nbytes


def aligned(size: int) -> NDArray[np.uint8]:
    """Room for a read: `size` zero bytes, aligned to a page, in huge pages where the kernel has them.

    The kernel's copies are up to twice as fast when source and destination are aligned alike, and what `allocate` makes
    begins at a page; numpy's own memory begins 16 bytes after one. Raises `DataError` when memory is short.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as e:
        raise DataError(f"cannot allocate {size:,} bytes: {e}; free memory, or give a buffer to use again") from e
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def narrow(source: NDArray[np.float32], target: NDArray[np.uint16]) -> None:
    """Round float32 to the bits of bfloat16, to nearest even; a NaN stays one. Both [n]."""
    for start in range(0, source.size, _NARROW):  # so that what is computed in between stays small
        bits = source[start : start + _NARROW].view(np.uint32)
        into = target[start : start + _NARROW]
        into[:] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        nan = np.isnan(source[start : start + _NARROW])
        if nan.any():
            into[nan] = (bits[nan] >> 16) | 0x40


def view(memory: Any, *, writable: bool = False) -> Buffer:
    """Look at `memory` without copying it.

    Untyped byte buffers (bytearray, mmap, memoryview of format "B") have dtype None; arrays and tensors have theirs.
    Raises `ShapeMismatch` when it is not contiguous, not in host memory, or read-only although `writable` is asked for.
    """
    if hasattr(memory, "data_ptr"):
        return _tensor(memory)
    if isinstance(memory, np.ndarray) and (memory.dtype.hasobject or not memory.dtype.isnative):
        raise ShapeMismatch(
            f"expected plain values in this machine's byte order, got an array of {str(memory.dtype)!r}; convert it "
            "first (astype)"
        )
    try:
        raw = memoryview(memory)
    except (TypeError, ValueError, BufferError) as e:
        if not isinstance(memory, np.ndarray):
            raise ShapeMismatch(
                f"expected an array, a tensor or a buffer, got {type(memory).__name__}: {e}; pass memory, not a list"
            ) from e
        # an extension dtype such as ml_dtypes.bfloat16 is an array without the buffer protocol
        _contiguous(memory.flags.c_contiguous, memory.shape)
        raw = memoryview(memory.reshape(-1).view(np.uint8))
    _contiguous(raw.c_contiguous, raw.shape)
    if writable and raw.readonly:
        raise ShapeMismatch(
            f"expected writable memory, got a read-only {type(memory).__name__}; pass an array of your own, or a "
            "bytearray"
        )
    flat = np.frombuffer(raw, dtype=np.uint8) if raw.nbytes else np.empty(0, np.uint8)
    if isinstance(memory, np.ndarray):
        dtype, shape = _FROM_NUMPY.get(memory.dtype.str), memory.shape
        if dtype is None and memory.dtype.name == "bfloat16":
            dtype = "BF16"
    else:
        dtype, shape = None, None
    return Buffer(
        bytes=memoryview(flat) if raw.nbytes else memoryview(bytearray()),
        address=flat.ctypes.data,
        dtype=dtype,
        shape=shape,
    )


def anywhere(memory: Any, *, writable: bool = False) -> Buffer:
    """As `view`, and of tensors on a GPU, too: their `bytes` have a length and parts, and cannot be looked into.

    What this thread has queued on the GPU is over when this returns.
    """
    if not hasattr(memory, "data_ptr") or str(memory.device.type) == "cpu":
        return view(memory, writable=writable)
    from gyre_transport.gpu.memory import settle, whole

    shape = tuple(int(n) for n in memory.shape)
    _contiguous(memory.is_contiguous(), shape)
    found = whole(memory)
    settle(found.obj)
    dtype = _FROM_TORCH.get(str(memory.dtype))
    return Buffer(bytes=cast(memoryview, found), address=found.obj.address, dtype=dtype, shape=shape)


def on_gpu(memory: object) -> bool:
    """Whether the `bytes` of a `Buffer` are a GPU's."""
    return not isinstance(memory, memoryview)


def _tensor(tensor: Any) -> Buffer:
    if str(tensor.device.type) != "cpu":
        raise ShapeMismatch(f"expected a tensor in host memory, got one on {tensor.device}; pass tensor.cpu()")
    shape = tuple(int(n) for n in tensor.shape)
    _contiguous(tensor.is_contiguous(), shape)
    size = int(tensor.numel()) * int(tensor.element_size())
    address = int(tensor.data_ptr())
    raw = memoryview(bytearray())
    if size:
        memory = (ctypes.c_ubyte * size).from_address(address)
        memory.tensor = tensor  # type: ignore[attr-defined]  # whoever holds the view holds the tensor
        raw = memoryview(memory).cast("B")
    return Buffer(bytes=raw, address=address, dtype=_FROM_TORCH.get(str(tensor.dtype)), shape=shape)


def _contiguous(ok: bool, shape: Any) -> None:
    if not ok:
        raise ShapeMismatch(
            f"expected C-contiguous memory, got a strided view of shape {tuple(shape)}; register the whole array and "
            "read the part, or make a contiguous array yourself and keep it"
        )
