"""The owner's end: memory that is open to RDMA, and the queue pairs that reach it.

    grant ──first reader──▶ exposed: registered, in a protection domain of its own ──revoked──▶ withdrawn

`withdraw` returns when the device reads that memory no more; it is called by whoever revokes, the rest by the thread
that serves tcp. The queue pairs of a reader end with its tcp connection.
"""

from __future__ import annotations

import logging
import threading
import traceback
from typing import Any, cast

import msgspec

from gyre_transport.backends.verbs import direct, fabric
from gyre_transport.backends.verbs.device import Device
from gyre_transport.backends.verbs.handshake import Accept, Decline, Offer, decode_offer, encode
from gyre_transport.backends.verbs.queues import QueuePairs
from gyre_transport.buffers import on_gpu, view
from gyre_transport.control import Export
from gyre_transport.errors import DataError, Unreachable
from gyre_transport.gpu.memory import GpuBytes
from gyre_transport.run import TransportConfig

log = logging.getLogger(__name__)


class Exposure:
    """One grant's memory, registered with one device. Raises `Unreachable`."""

    def __init__(self, export: Export, port: fabric.Port, lock: Any) -> None:
        self.lock = lock  # of `reached` and `withdrawn` together
        self.device = Device.open(port)
        self.address = 0
        self.reached: set[Reached] = set()
        self.withdrawn = False
        self._region: Any = None
        self.domain: Any = None
        try:
            self.domain = self.device.domain()
            if export.memory.nbytes:
                access = self.device.v.enums.IBV_ACCESS_REMOTE_READ
                self._region, self.address = self._register(export, access)
        except BaseException:
            self.close()
            raise

    def _register(self, export: Export, access: int) -> tuple[Any, int]:
        """(memory region, the memory's address to readers)."""
        if on_gpu(export.memory):
            return direct.region(self.device, self.domain, cast(GpuBytes, export.memory).obj, access)
        address = view(export.memory).address
        return self.device.region(self.domain, address, export.memory.nbytes, access), address

    @property
    def rkey(self) -> int:
        """What the device knows the memory by."""
        return 0 if self._region is None else int(self._region.rkey)

    def withdraw(self) -> None:
        """Deregister: from here on reads fail. Idempotent."""
        self.withdrawn = True
        region, self._region = self._region, None
        if region is None:
            return
        try:
            region.close()
        except self.device.v.pyverbs_error.PyverbsError as e:
            log.error("memory could not be deregistered: %s; its readers are disconnected instead", str(e))
            for reached in list(self.reached):
                reached.close()

    def close(self) -> None:
        """Withdraw and let go of the device."""
        self.withdraw()
        if self.domain is not None:
            self.domain.close()
        self.device.close()


class Reached:
    """The owner's end of one reader's connection."""

    def __init__(self, exposure: Exposure, gid: fabric.Gid, offer: Offer, patience: float) -> None:
        self._exposure = exposure
        count, access = len(offer.side.queue_pairs), exposure.device.v.enums.IBV_ACCESS_REMOTE_READ
        self.queues = QueuePairs(exposure.device, exposure.domain, gid, count=count, access=access)
        try:
            self.queues.connect(offer.side, patience)
        except BaseException:
            self.queues.close()
            raise
        exposure.reached.add(self)

    @property
    def withdrawn(self) -> bool:
        """Whether the memory is there no more."""
        return self._exposure.withdrawn

    def close(self) -> None:
        """Destroy the queue pairs; the memory goes with the last of them if it was withdrawn. Idempotent."""
        exposure = self._exposure
        with exposure.lock:
            self.queues.close()
            if self in exposure.reached:
                exposure.reached.discard(self)
                if exposure.withdrawn and not exposure.reached:
                    exposure.close()


class Exposures:
    """Everything this process opens to RDMA."""

    def __init__(self, config: TransportConfig) -> None:
        self._lock = threading.RLock()  # a region that is collected while another is exposed is withdrawn in between
        self._exposed: dict[Export, Exposure] = {}
        self._config = config
        self._ports = fabric.ports() if "verbs" in config.backends else []

    @property
    def links(self) -> tuple[str, ...]:
        """Link layers a reader may come by."""
        return tuple(sorted({p.link for p in self._ports if self._config.rdma_device in ("", p.device, str(p))}))

    def connect(self, export: Export, offer: bytes, *, near: str) -> tuple[Reached | None, bytes]:
        """Answer a reader that has proven the key of `export`. near: this end of its tcp connection.

        The caller looks afterwards whether the grant still stands, and withdraws it if not. The first reader of a grant
        has its memory pinned: for large memory that takes a while, and the others wait.
        """
        try:
            asked = decode_offer(offer)
            found = fabric.choose(
                self._ports,
                links=(asked.side.link,),
                device=self._config.rdma_device,
                near=near.removeprefix("::ffff:"),
            )
            if found is None:
                raise Unreachable(
                    f"no active RDMA port on {asked.side.link}, only on {', '.join(self.links) or 'none'}"
                )
            port, gid = found
            with self._lock:
                exposure = self._expose(export, port)
                reached = Reached(exposure, gid, asked, self._config.rdma_patience)
                return reached, encode(Accept(side=reached.queues.side, address=exposure.address, rkey=exposure.rkey))
        except (DataError, ValueError, msgspec.DecodeError) as e:
            return None, encode(Decline(reason=str(e)))
        except Exception:  # of a library that says little about what it raises; the others are served on
            log.error("an offer of RDMA could not be answered: %s", traceback.format_exc())
            return None, encode(Decline(reason="the owner failed; its log says more"))

    def _expose(self, export: Export, port: fabric.Port) -> Exposure:
        exposure = self._exposed.get(export)
        if exposure is not None and str(exposure.device.port) != str(port):
            raise Unreachable(f"the memory is open on port {exposure.device.port}, not on {port}")
        if exposure is None:
            exposure = self._exposed[export] = Exposure(export, port, self._lock)
        return exposure

    def withdraw(self, export: Export) -> None:
        """Return when the memory of `export` is read no more. Nothing if it was not exposed."""
        with self._lock:
            exposure = self._exposed.pop(export, None)
            if exposure is None:
                return
            if exposure.reached:
                exposure.withdraw()  # the server's thread closes the rest
            else:
                exposure.close()

    def close(self) -> None:
        """Withdraw everything."""
        with self._lock:
            for export in list(self._exposed):
                self.withdraw(export)
