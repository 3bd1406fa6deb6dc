"""The right to read a region, as it travels: who owns the memory, what it holds, where it lies and how to get there.

A descriptor's key is unguessable and belongs to one grant; `secret` binds it to everything else that must not be
mistaken: the owner's process generation, the slot, the size and the content. Both sides derive it, so a descriptor
whose parts were exchanged opens nothing.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache

import msgspec

SECRET_BYTES = 16


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of a process: a restarted process, or another with its pid, is another owner."""

    host: str  # boot id and pid namespace
    pid: int
    start: int  # clock ticks after boot, from /proc/<pid>/stat
    control: int  # file number of its control record

    def __str__(self) -> str:
        return f"process {self.pid}"

    @property
    def generation(self) -> bytes:
        """16 bytes that no other process has."""
        return _generation(self)


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """What a region holds; a reader that expects something else is refused."""

    model: str
    version: int
    layout: str = ""  # the owner's place among its ranks, such as "tp=0/2 pp=1/4"; "": the whole model

    def __str__(self) -> str:
        return f"{self.model!r} version {self.version}" + (f" [{self.layout}]" if self.layout else "")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the owner serves reads over tcp, and shakes hands for reads over RDMA."""

    host: str  # address
    port: int
    network: str  # boot id and network namespace; a loopback address means something only there
    rdma: tuple[str, ...] = ()  # link layers ("InfiniBand", "Ethernet") of its RDMA ports
    mooncake: bool = False  # whether it lends memory to a Mooncake engine

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Shared(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """Memory that was allocated here: file number of its memfd in the owner."""

    fd: int


class Address(msgspec.Struct, frozen=True, kw_only=True, tag="process"):
    """Memory that was there already: its address in the owner."""

    address: int


class OnGpu(msgspec.Struct, frozen=True, kw_only=True, tag="gpu"):
    """Memory of a GPU, which no address of the owner's leads to."""


Location = Shared | Address | OnGpu


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, tag="descriptor"):
    """The right to read a region, and how. Whoever has it can read; keep it on the bus."""

    owner: Owner
    key: bytes  # 16 random bytes
    slot: int  # where in the owner's control record
    location: Location
    nbytes: int
    dtype: str | None = None  # safetensors name; None: bytes
    shape: tuple[int, ...] | None = None
    content: Content | None = None
    endpoint: Endpoint | None = None  # None: the owner serves its own machine only

    @property
    def secret(self) -> bytes:
        """16 bytes that prove this descriptor, whole; taken away by the owner when the region is revoked."""
        return secret(self.owner, self.key, self.slot, self.nbytes, self.content)

    def __repr__(self) -> str:  # without the key: it is a right, and logs are read by others
        what = f"{self.nbytes:,} bytes" if self.dtype is None else f"{self.dtype} {self.shape}"
        where = f", {self.endpoint}" if self.endpoint else ""
        return f"<Descriptor of {what}{f', {self.content}' if self.content else ''} in {self.owner}{where}>"


@lru_cache(maxsize=256)
def _generation(owner: Owner) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(owner), digest_size=16).digest()


@lru_cache(maxsize=256)
def secret(owner: Owner, key: bytes, slot: int, nbytes: int, content: Content | None) -> bytes:
    """Derive what proves a descriptor. An empty or overlong key proves nothing: its secret is that of no grant."""
    bound = msgspec.msgpack.encode((owner, slot, nbytes, content))
    return hashlib.blake2b(bound, key=key[:64], digest_size=SECRET_BYTES, person=b"gyre secret").digest()


@lru_cache(maxsize=1)
def host() -> str:
    """Identity of this machine since its boot, and of this process's pid namespace."""
    return f"{_boot()}/{os.stat('/proc/self/ns/pid').st_ino}"


@lru_cache(maxsize=1)
def network() -> str:
    """Identity of this machine since its boot, and of this process's network namespace."""
    return f"{_boot()}/{os.stat('/proc/self/ns/net').st_ino}"


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()
