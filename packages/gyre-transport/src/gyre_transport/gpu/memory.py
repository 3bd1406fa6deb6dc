"""What is asked of a GPU. A kind of GPU joins by a line in `KINDS`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from gyre_transport.errors import DataError, DeadlineExceeded, ShapeMismatch

_SETTLE = 60.0  # seconds for what was queued before
_SPIN, _NAP = 64, 50e-6  # looks without a pause; seconds of a pause


class Copy(Protocol):
    """A copy under way; it keeps both of its ends alive."""

    def done(self) -> bool:
        """Whether all bytes are there. Raises `DataError` when the GPU failed."""


class GpuMemory(Protocol):
    """The contiguous memory of one tensor on a GPU. Every method raises `DataError` when the GPU fails."""

    address: int  # in the GPU's address space
    nbytes: int

    def pinned(self, nbytes: int) -> Any:
        """New host memory that the GPU copies from and to by itself: a writable buffer."""

    def queued(self) -> Copy:
        """What this thread has queued on the GPU so far: done when that is over."""

    def copy_in(self, at: int, host: memoryview) -> Copy:
        """Start copying `host`, a part of pinned memory, to byte `at`."""

    def copy_out(self, at: int, host: memoryview) -> Copy:
        """Start copying from byte `at` to `host`, a part of pinned memory, until that is full."""

    def dmabuf(self) -> tuple[int, int]:
        """(file number, which the caller closes; byte where the memory begins in it) of a dma-buf of the memory."""

    def lend(self) -> None:
        """Before another device may reach the memory directly."""

    def flush(self) -> None:
        """Have what another device wrote be seen by all that the GPU does from now on."""


class GpuBytes(msgspec.Struct, frozen=True, eq=False):
    """A stretch of it, in the place of a memoryview: only what stages or registers looks inside."""

    obj: GpuMemory
    start: int
    nbytes: int

    def __getitem__(self, part: slice) -> GpuBytes:
        """A part of it."""
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise ShapeMismatch(f"expected a contiguous part of GPU memory, got {part!r}")
        return GpuBytes(self.obj, self.start + start, max(0, stop - start))


def _cuda(tensor: Any) -> GpuMemory:
    from gyre_transport.gpu.cuda import CudaMemory

    return CudaMemory(tensor)


KINDS: dict[str, Callable[[Any], GpuMemory]] = {"cuda": _cuda}  # tensor.device.type -> of a contiguous tensor


def whole(tensor: Any) -> GpuBytes:
    """The memory of a contiguous tensor. Raises `ShapeMismatch` when it is on nothing that is known."""
    kind = KINDS.get(str(tensor.device.type))
    if kind is None:
        raise ShapeMismatch(
            f"expected a tensor in host memory or on one of {sorted(KINDS)}, got one on {tensor.device}; pass "
            "tensor.cpu()"
        )
    memory = kind(tensor)
    return GpuBytes(memory, 0, memory.nbytes)


def settle(memory: GpuMemory) -> None:
    """Return when what this thread has queued on the GPU is over. Raises `DeadlineExceeded`, `DataError`.

    A network card that reads or writes the memory knows nothing of what is queued, so the host waits for it.
    """
    wait(memory.queued(), time.monotonic() + _SETTLE)


def wait(copy: Copy, end: float) -> None:
    """Return when it is done. end: of `time.monotonic`. Raises `DeadlineExceeded`, or `DataError`."""
    looks = 0
    while not copy.done():
        if time.monotonic() >= end:
            raise DeadlineExceeded(
                "a copy to or from the GPU, or what was queued there before, was not over in time; allow more"
            )
        looks += 1
        time.sleep(0 if looks < _SPIN else _NAP)


def over(copy: Copy, end: float) -> bool:
    """Whether it is done, or failed, before `end`: the GPU does nothing more for it."""
    try:
        wait(copy, end)
    except DeadlineExceeded:
        return False
    except DataError:
        return True
    return True
