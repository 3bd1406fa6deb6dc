"""An open RDMA device: opened by its first user, closed by its last, so that an idle process holds no file of it."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from gyre_transport.backends.verbs.fabric import Port
from gyre_transport.backends.verbs.library import load
from gyre_transport.errors import Unreachable

MAX_MESSAGE = 8 << 20  # bytes; what soft-RoCE takes at most, and enough for any device to be busy
_MAX_READS = 16  # under way on one queue pair


class Device:
    """One port of a device; from `open` to `close`."""

    _lock: ClassVar[Any] = threading.RLock()
    _open: ClassVar[dict[tuple[str, int], Device]] = {}

    def __init__(self, port: Port) -> None:
        v = self.v = load()
        self.port, self._users, self._pid = port, 0, os.getpid()
        self._objects: weakref.WeakSet[Any] = weakref.WeakSet()
        self._domain: Any = None
        self._memory: dict[
            tuple[int, int], list[Any]
        ] = {}  # (address, bytes) -> [region, users, what holds it, address to the device]
        try:
            self.context = v.device.Context(name=port.device)
            attributes, limits = self.context.query_port(port.number), self.context.query_device()
            self.mtu = int(attributes.active_mtu)
            self.lid = int(attributes.lid)
            self.max_message = min(int(attributes.max_msg_sz), MAX_MESSAGE)
            self.serves = min(int(limits.max_qp_rd_atom), _MAX_READS)  # reads at once a queue pair answers
            self.asks = min(int(limits.max_qp_init_rd_atom), _MAX_READS)  # reads at once a queue pair asks for
        except v.pyverbs_error.PyverbsError as e:
            raise Unreachable(f"cannot use the RDMA device {port}: {e}; `gyre-transport doctor` shows more") from e

    @classmethod
    def open(cls, port: Port) -> Device:
        """The device of `port`; give it back with `close`. Raises `Unreachable`."""
        with cls._lock:
            key = (port.device, port.number)
            device = cls._open.get(key)
            if device is None:
                device = cls._open[key] = cls(port)
            device._users += 1
            return device

    def close(self) -> None:
        """Close it when nobody else uses it. Nothing in a forked child."""
        if self.inherited:
            return
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del self._open[self.port.device, self.port.number]
                self.context.close()  # and everything in it

    def domain(self) -> Any:
        """A new protection domain; its owner closes it."""
        return self.make("protection domain", lambda: self.v.pd.PD(self.context))

    @property
    def own(self) -> Any:
        """The protection domain of this process's own reads."""
        with self._lock:
            self._domain = self._domain or self.domain()
            return self._domain

    def region(self, domain: Any, address: int, nbytes: int, access: int) -> Any:
        """Register memory, which the caller keeps alive. Raises `Unreachable`."""
        return self.make(
            f"memory region of {nbytes:,} bytes (is the limit on locked memory, `ulimit -l`, large enough?)",
            lambda: self.v.mr.MR(domain, nbytes, access, address=address),
        )

    def hold(
        self, memory: Any, address: int, nbytes: int, make: Callable[[], tuple[Any, int]] | None = None
    ) -> tuple[int, int]:
        """Register local memory that reads go to: (key, address to the device). Once for all who hold it at one time.

        make: registers what is no memory of the host. Whoever holds memory is a user of the device. Raises
        `Unreachable`.
        """
        with self._lock:
            key = (address, nbytes)
            held = self._memory.get(key)
            if held is None:
                access = self.v.enums.IBV_ACCESS_LOCAL_WRITE
                made = make() if make else (self.region(self.own, address, nbytes, access), address)
                held = self._memory[key] = [made[0], 0, memory, made[1]]
            held[1] += 1
            self._users += 1
            return int(held[0].lkey), int(held[3])

    def let_go(self, address: int, nbytes: int) -> None:
        """Undo one `hold`; nothing may be on its way to that memory."""
        if self.inherited:
            return
        with self._lock:
            held = self._memory[address, nbytes]
            held[1] -= 1
            if held[1] == 0:
                del self._memory[address, nbytes]
                held[0].close()
            self.close()

    def make(self, what: str, call: Callable[[], Any]) -> Any:
        """The object of pyverbs that `call` returns. Raises `Unreachable`."""
        try:
            made = call()
        except self.v.pyverbs_error.PyverbsError as e:
            raise Unreachable(f"the RDMA device {self.port} gives no {what}: {e}") from e
        self._objects.add(made)
        return made

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy."""
        return os.getpid() != self._pid

    def leave(self) -> None:
        """Destroy nothing, ever: pyverbs does when it collects its objects."""
        for made in (self.context, *self._objects):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))

    def abandon(self) -> None:
        """In a forked child: leave what is its parent's, and close its copy of the file."""
        self.leave()
        os.close(self.context.cmd_fd)


def _forked() -> None:
    """A child must neither end what is its parent's nor keep it up: forget the devices, close their files."""
    Device._lock = threading.RLock()
    devices, Device._open = list(Device._open.values()), {}
    for device in devices:
        device.abandon()


def _ending() -> None:
    """What is open when the process ends, the kernel frees: pyverbs fails in an interpreter that is taken apart."""
    for device in Device._open.values():
        device.leave()


os.register_at_fork(after_in_child=_forked)
atexit.register(_ending)
