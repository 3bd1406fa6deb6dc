"""How the memory of a GPU goes over RDMA: by the device itself where the driver allows, through the host where not.

    way       what it takes                                          the bytes go
    dmabuf    the driver exports memory as a dma-buf; kernel 5.12    GPU - network card
    peermem   the kernel module nvidia-peermem (or nv_peer_mem)      GPU - network card
    staged    nothing                                                GPU - pinned host memory - network card

`look` finds out what is here; `way` decides; `direct` registers. A reader stages what its network card cannot write to
(`gyre_transport.gpu.staged`). An owner whose network card cannot read the memory declines, and serves it over tcp.
"""

from __future__ import annotations

import ctypes
import os
import re
from enum import StrEnum
from pathlib import Path

import msgspec

_PEERMEM = ("nvidia_peermem", "nv_peer_mem")
_DMABUF_KERNEL = (5, 12)
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_GPU_DIRECT_RDMA_SUPPORTED = 116  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED


class Way(StrEnum):
    """Of GPU memory to the network."""

    DMABUF = "dmabuf"
    PEERMEM = "peermem"
    STAGED = "staged"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the decision depends on."""

    gpus: int = 0
    direct: bool = False  # the driver lets other devices reach this GPU's memory
    dmabuf: bool = False  # the driver exports it as a dma-buf
    peermem: bool = False  # the module is loaded
    kernel: tuple[int, int] = (0, 0)


def way(machine: Machine) -> Way:
    """The way that copies least."""
    if machine.direct and machine.dmabuf and machine.kernel >= _DMABUF_KERNEL:
        return Way.DMABUF
    if machine.direct and machine.peermem:
        return Way.PEERMEM
    return Way.STAGED


def how(machine: Machine) -> str:
    """The decision and its reason, for people."""
    if not machine.gpus:
        return "no GPU"
    chosen = way(machine)
    if chosen is Way.DMABUF:
        return "through the network card alone, as a dma-buf"
    if chosen is Way.PEERMEM:
        return "through the network card alone, by nvidia-peermem"
    missing = "load the kernel module nvidia-peermem" if machine.direct else "the driver does not offer GPUDirect RDMA"
    return f"through pinned host memory ({missing})"


def look(modules: Path = Path("/sys/module")) -> Machine:
    """Ask the kernel and, without starting a context, the CUDA driver about GPU 0."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    kernel = (int(version[1]), int(version[2])) if version else (0, 0)
    gpus, direct, dmabuf = _driver()
    peermem = any((modules / name).is_dir() for name in _PEERMEM)
    return Machine(gpus=gpus, direct=direct, dmabuf=dmabuf, peermem=peermem, kernel=kernel)


def _driver() -> tuple[int, bool, bool]:
    """(GPUs, GPUDirect RDMA, dma-buf) as libcuda says; nothing where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, False, False
    count, device = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return 0, False, False
    if cuda.cuDeviceGet(ctypes.byref(device), 0):
        return count.value, False, False

    def has(attribute: int) -> bool:
        value = ctypes.c_int(0)
        return cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0 and value.value == 1

    return count.value, has(_GPU_DIRECT_RDMA_SUPPORTED), has(_DMA_BUF_SUPPORTED)
