"""The owner's end of GPU memory, for one client: bytes leave the GPU just before the kernel takes them over to send.

The kernel sends what it has while the next bytes leave the GPU: its socket buffer is the second of the two rooms.
"""

from __future__ import annotations

import time
from collections import deque
from typing import cast

from gyre_transport.buffers import Buffer, on_gpu, view
from gyre_transport.gpu.memory import GpuBytes, wait

_ROOM = 1 << 20  # bytes of pinned memory, a client
_PATIENCE = 5.0  # seconds that the GPU may take for them; other clients wait meanwhile


class Outlet:
    """Pinned memory that one batch of bytes leaves through at a time."""

    def __init__(self) -> None:
        self._room: Buffer | None = None

    def fetch(self, parts: deque[memoryview]) -> None:
        """Put memory of the host in the place of the first of `parts`, or as much of them as there is room for.

        Only when what it gave before is not needed any more. Raises `DataError` when the GPU fails or hangs.
        """
        copies, at = [], 0
        while parts and on_gpu(parts[0]) and at < _ROOM:
            part = cast(GpuBytes, parts.popleft())
            if self._room is None:
                self._room = view(part.obj.pinned(_ROOM), writable=True)
            length = min(part.nbytes, _ROOM - at)
            copies.append(part.obj.copy_out(part.start, self._room.bytes[at : at + length]))
            if length < part.nbytes:
                parts.appendleft(cast(memoryview, part[length:]))
            at += length
        end = time.monotonic() + _PATIENCE
        for copy in copies:
            wait(copy, end)
        if self._room is not None and at:
            parts.appendleft(self._room.bytes[:at])
