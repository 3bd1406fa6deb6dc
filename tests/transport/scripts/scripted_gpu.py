"""A GPU that a test scripts: memory that only copies reach, which take as long, and fail, as the test says.

Its tensors say `device.type == "scripted"` and have an address that is nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from gyre_transport.errors import DataError, Unreachable

NOWHERE = 1 << 46  # an address that no process has


class Tensor:
    """`values` on the GPU."""

    def __init__(self, gpu: Gpu, values: np.ndarray) -> None:
        self.gpu, self.values, self.device = gpu, values, SimpleNamespace(type="scripted")
        self.shape, self.dtype = values.shape, f"torch.{values.dtype}"

    def data_ptr(self) -> int:
        return NOWHERE

    def is_contiguous(self) -> bool:
        return self.values.flags.c_contiguous


class Gpu:
    """looks: how often a copy says that it is under way before it is carried out. fails: number of a copy."""

    def __init__(self) -> None:
        self.looks = 0
        self.fails: int | None = None
        self.pinned_bytes = self.copies = self.settled = self.under_way = self.most_under_way = 0
        self.during: Callable[[], None] = lambda: None  # called by every look at a copy

    def tensor(self, values: np.ndarray) -> Tensor:
        return Tensor(self, values)

    def memory(self, tensor: Tensor) -> Memory:
        """What `gpu.memory.KINDS` has for this kind."""
        return Memory(self, tensor.values.reshape(-1).view(np.uint8))


class Memory:
    """See `gyre_transport.gpu.memory.GpuMemory`."""

    def __init__(self, gpu: Gpu, flat: np.ndarray) -> None:
        self.gpu, self.flat, self.address, self.nbytes = gpu, flat, NOWHERE, flat.nbytes

    def pinned(self, nbytes: int) -> np.ndarray:
        self.gpu.pinned_bytes += nbytes
        return np.zeros(nbytes, np.uint8)

    def queued(self) -> SimpleNamespace:
        self.gpu.settled += 1
        return SimpleNamespace(done=lambda: True)

    def copy_in(self, at: int, host: memoryview) -> Copy:
        target, source = self.flat[at : at + host.nbytes], np.frombuffer(host, np.uint8)
        assert target.nbytes == source.nbytes
        return Copy(self.gpu, target, source)

    def copy_out(self, at: int, host: memoryview) -> Copy:
        source = self.flat[at : at + host.nbytes]
        assert source.nbytes == host.nbytes
        return Copy(self.gpu, np.frombuffer(host, np.uint8), source)

    def dmabuf(self) -> tuple[int, int]:
        raise Unreachable("nothing exports this memory")

    def lend(self) -> None:
        pass

    def flush(self) -> None:
        pass


class Copy:
    """Carried out when it is first said to be done: whoever looks sooner at what it copies sees what was there."""

    def __init__(self, gpu: Gpu, target: Any, source: Any) -> None:
        self.gpu, self.ends, self.left = gpu, (target, source), gpu.looks
        self.number, gpu.copies = gpu.copies, gpu.copies + 1
        gpu.under_way += 1
        gpu.most_under_way = max(gpu.most_under_way, gpu.under_way)

    def done(self) -> bool:
        self.gpu.during()
        if self.left:
            self.left -= 1
            return False
        if self.ends is not None:
            self.gpu.under_way -= 1
            if self.number == self.gpu.fails:
                self.ends = None
                raise DataError("the GPU failed a copy")
            np.copyto(*self.ends)
            self.ends = None
        return True
