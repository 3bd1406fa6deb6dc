"""Memory of a GPU that a network card reaches by itself: registered by its address or as a dma-buf, see `gpu`."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from gyre_transport.backends.verbs import gpu
from gyre_transport.backends.verbs.device import Device
from gyre_transport.errors import Unreachable
from gyre_transport.gpu.memory import GpuMemory


@lru_cache(maxsize=1)
def _machine() -> gpu.Machine:
    return gpu.look()


def region(device: Device, domain: Any, memory: GpuMemory, access: int) -> tuple[Any, int]:
    """Register it: (memory region, address of its first byte to the device). Raises `Unreachable`: stage it."""
    way = gpu.way(_machine())
    if way is gpu.Way.STAGED:
        raise Unreachable(f"the network card does not reach the memory of the GPU: {gpu.how(_machine())}")
    memory.lend()
    if way is gpu.Way.PEERMEM:
        return device.region(domain, memory.address, memory.nbytes, access), memory.address
    fd, offset = memory.dmabuf()
    try:  # addresses in it count from the beginning of the dma-buf
        made = device.make(
            f"region of {memory.nbytes:,} bytes of GPU memory as a dma-buf",
            lambda: device.v.mr.DmaBufMR(domain, memory.nbytes, access, fd, offset),
        )
    finally:
        os.close(fd)  # the region holds the buffer
    return made, offset


def hold(device: Device, memory: GpuMemory) -> tuple[int, int]:
    """Register memory that reads go to, as `Device.hold`: (key, address). Raises `Unreachable`: stage it."""
    access = device.v.enums.IBV_ACCESS_LOCAL_WRITE
    return device.hold(memory, memory.address, memory.nbytes, lambda: region(device, device.own, memory, access))
