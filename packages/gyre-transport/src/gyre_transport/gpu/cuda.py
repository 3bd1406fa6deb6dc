"""The memory of a tensor on an NVIDIA GPU, through torch, and through libcuda what torch has no name for.

Copies go over a stream of their own, so that neither side waits for the other's work.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from gyre_transport.errors import DataError, Unreachable

_PAGE = 1 << 16  # bytes; what a dma-buf begins at
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_CURRENT_CONTEXT, _TO_OWNER = 0, 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, …_TO_OWNER
_NOT_SUPPORTED = 801


class _CudaCopy:
    """See `memory.Copy`."""

    def __init__(self, event: Any, *ends: Any) -> None:
        self._event, self._ends = event, ends

    def done(self) -> bool:
        """Whether the event has come."""
        try:
            return bool(self._event.query())
        except RuntimeError as e:  # of this copy, or of what ran on the GPU before
            raise DataError(f"the GPU failed a copy: {e}; the process has to start anew") from e


class CudaMemory:
    """See `memory.GpuMemory`. tensor: contiguous, on a CUDA device."""

    def __init__(self, tensor: Any) -> None:
        self._device = tensor.device
        self._flat = tensor.detach().reshape(-1).view(torch.uint8)
        self._stream = torch.cuda.Stream(self._device)
        self.address, self.nbytes = int(tensor.data_ptr()), int(self._flat.numel())

    def pinned(self, nbytes: int) -> Any:
        """Page-locked memory, as a numpy array."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as e:
            raise DataError(f"cannot pin {nbytes:,} bytes of host memory: {e}; free memory") from e

    def queued(self) -> _CudaCopy:
        """On the current stream."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        return _CudaCopy(event)

    def copy_in(self, at: int, host: memoryview) -> _CudaCopy:
        """Host to device."""
        source = torch.frombuffer(host, dtype=torch.uint8)
        return self._copy(self._flat[at : at + host.nbytes], source)

    def copy_out(self, at: int, host: memoryview) -> _CudaCopy:
        """Device to host."""
        target = torch.frombuffer(host, dtype=torch.uint8)
        return self._copy(target, self._flat[at : at + host.nbytes])

    def _copy(self, target: Any, source: Any) -> _CudaCopy:
        try:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
        except RuntimeError as e:
            raise DataError(f"the GPU takes no copy: {e}") from e
        return _CudaCopy(event, target, source)

    def dmabuf(self) -> tuple[int, int]:
        """Of the pages the memory lies in. Raises `Unreachable` where the driver exports none of it."""
        fd, start = ctypes.c_int(-1), self.address // _PAGE * _PAGE
        length = -(-(self.address + self.nbytes - start) // _PAGE) * _PAGE
        self._ask(
            "cuMemGetHandleForAddressRange",
            ctypes.byref(fd), ctypes.c_uint64(start), ctypes.c_size_t(length), _DMA_BUF_FD, ctypes.c_ulonglong(0),
        )  # fmt: skip
        return fd.value, self.address - start

    def lend(self) -> None:
        """Copies of CUDA's own are then ordered against what other devices do."""
        yes = ctypes.c_uint(1)
        self._ask("cuPointerSetAttribute", ctypes.byref(yes), _SYNC_MEMOPS, ctypes.c_uint64(self.address))

    def flush(self) -> None:
        """Where the GPU needs that."""
        self._ask("cuFlushGPUDirectRDMAWrites", _CURRENT_CONTEXT, _TO_OWNER, tolerate=_NOT_SUPPORTED)

    def _ask(self, name: str, *arguments: Any, tolerate: int = 0) -> None:
        """Call the driver in the device's context. Raises `Unreachable`."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).query()  # makes its context the thread's
            call = getattr(ctypes.CDLL("libcuda.so.1"), name, None)
            code = _NOT_SUPPORTED if call is None else call(*arguments)
        if code not in (0, tolerate):
            raise Unreachable(f"the CUDA driver refuses {name} for memory of {self._device} (CUresult {code})")
