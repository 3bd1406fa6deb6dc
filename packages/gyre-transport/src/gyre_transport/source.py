"""Publishing the versions of one model, one at a time.

    source = SnapshotSource("policy")
    manifest = source.advance(7, {"w": ("BF16", (4, 8), tensor)}, wait=10.0)

A version is copied into memory that is then frozen (`frozen`), so nobody ever reads it while it changes. The next one
is copied while the last one's readers go on; then no more leases on that are granted, those there are get `wait`
seconds to end, and it is revoked: a reader that is still at it gets `StaleVersion`. `leases` says who reads from whom.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_transport.buffers import THREADS, Buffer, narrow, nbytes, view
from gyre_transport.control import Caller
from gyre_transport.errors import DataError, DeadlineExceeded, ShapeMismatch
from gyre_transport.frozen import Draft
from gyre_transport.leases import Done, Leases, Request
from gyre_transport.manifest import Entry, Manifest, arrange
from gyre_transport.memory import Content, Region, allocate, publish

Tensor = tuple[str, tuple[int, ...], Any]  # dtype, shape, contiguous bytes-like or CPU tensor


class SnapshotSource:
    """Publishes the versions of one model, one at a time; a context manager. Not shared between threads.

    fan_out: readers it serves at once, on as many machines; the others read from copies or wait. most_leases: at once.
    """

    def __init__(self, model: str, *, fan_out: int = 2, most_leases: int = 64) -> None:
        self.model = model
        self.manifest: Manifest | None = None  # of the version that can be pulled now
        self._fan_out, self._most = fan_out, most_leases
        self._head = allocate(8)
        self._region: Region | None = None
        self._desk = _Desk(Leases(fan_out=fan_out, most=most_leases))
        self._version: int | None = None
        self._closed = False

    @property
    def readers(self) -> int:
        """Leases on the current version's memory here."""
        return self._desk.readers()

    @property
    def copies(self) -> int:
        """Readers that serve the current version on."""
        return self._desk.copies

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Advance to `version` without waiting for the readers of the one before; see `advance`."""
        return self.advance(version, tensors, wait=0.0)

    def advance(self, version: int, tensors: Mapping[str, Tensor], *, wait: float, revoke: bool = True) -> Manifest:
        """Copy `tensors` (name -> (dtype, shape, contiguous bytes-like or CPU tensor)) and make them the version.

        A tensor announced as BF16 may be float32: it is rounded to nearest even.
        wait: seconds for the previous version's readers to end, once the copy is made. revoke: those that have not are
        cut off; else `DeadlineExceeded` is raised. Raises `ShapeMismatch` when a tensor is not what it says, or
        `DataError` when `version` does not increase or memory is short. After an error the previous version stands.
        """
        if self._closed:
            raise DataError(f"the source of {self.model!r} is closed; make a new one")
        if self._version is not None and version <= self._version:
            raise DataError(f"{self.model!r}: version {version} after {self._version}; versions only increase")
        sources = {name: _checked(name, tensor) for name, tensor in tensors.items()}
        offsets, total = arrange(nbytes(dtype, tuple(shape)) for dtype, shape, _ in tensors.values())
        entries = tuple(
            Entry(name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes(dtype, shape), checksum=0)
            for (name, (dtype, shape, _)), offset in zip(tensors.items(), offsets, strict=True)
        )
        with Draft(total) as draft:
            _copy(entries, sources, draft.array())
            fd = draft.freeze()
        desk = _Desk(Leases(fan_out=self._fan_out, most=self._most))
        region = publish(fd, content=Content(model=self.model, version=version), calls=desk.call)
        try:
            checksums = _checksums(entries, region)
            if not self._desk.drain(wait) and not revoke:
                raise DeadlineExceeded(
                    f"{self._desk.readers()} readers still hold version {self._version} of {self.model!r} after "
                    f"{wait:g} s; wait longer, or revoke"
                )
        except BaseException:
            self._desk.reopen()
            region.close()
            raise
        self._head.array(np.int64)[0] = self._version = version
        self._close_region()
        self._region, self._desk = region, desk
        self.manifest = Manifest(
            model=self.model,
            version=version,
            entries=tuple(
                msgspec.structs.replace(e, checksum=checksum) for e, checksum in zip(entries, checksums, strict=True)
            ),
            descriptor=region.descriptor,
            head=self._head.descriptor,
            nbytes=total,
        )
        return self.manifest

    def close(self) -> None:
        """Revoke the current version and release the memory: readers get `StaleDescriptor`. Idempotent."""
        self._closed = True
        self.manifest = None
        self._head.close()
        self._close_region()

    def _close_region(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.close()

    def __enter__(self) -> SnapshotSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Desk:
    """Answers the readers of one version, in the thread that serves reads; the source's thread waits for them."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._changed = threading.Condition()

    def call(self, payload: bytes, caller: Caller) -> bytes:
        """Handle a request. Raises `msgspec.DecodeError` for what is none."""
        request = msgspec.msgpack.decode(payload, type=Request)
        with self._changed:
            reply = self._leases.handle(caller, request, time.monotonic())
            self._changed.notify_all()
        caller.at_end(self, None if isinstance(request, Done) else lambda: self._gone(caller))
        return msgspec.msgpack.encode(reply)

    def readers(self) -> int:
        """Leases on the source's memory."""
        with self._changed:
            return self._leases.on_source(time.monotonic())

    @property
    def copies(self) -> int:
        """Readers that serve the version on."""
        return self._leases.copies

    def drain(self, wait: float) -> bool:
        """Grant no more leases, and wait for those there are; whether all have ended."""
        end = time.monotonic() + wait
        with self._changed:
            self._leases.drain()
            while self._leases.on_source(now := time.monotonic()):
                if now >= end:
                    return False
                self._changed.wait(min(0.1, end - now))  # leases also end by the clock
        return True

    def reopen(self) -> None:
        """Grant leases again."""
        with self._changed:
            self._leases.drain(draining=False)

    def _gone(self, caller: Caller) -> None:
        with self._changed:
            self._leases.gone(caller)
            self._changed.notify_all()


def _copy(entries: tuple[Entry, ...], sources: Mapping[str, Buffer], target: NDArray[np.uint8]) -> None:
    def copy(entry: Entry) -> None:
        source = sources[entry.name]
        piece = target[entry.offset : entry.offset + entry.nbytes]
        if source.nbytes == entry.nbytes:
            np.copyto(piece, np.frombuffer(source.bytes, np.uint8))
        else:
            narrow(np.frombuffer(source.bytes, np.float32), piece.view(np.uint16))

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(copy, entries):
            pass


def _checksums(entries: tuple[Entry, ...], region: Region) -> list[int]:
    """Of the memory as it is published, which nothing can change any more."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda e: zlib.crc32(region.buffer[e.offset : e.offset + e.nbytes]), entries))


def _checked(name: str, tensor: Tensor) -> Buffer:
    dtype, shape, memory = tensor
    try:
        local = view(memory)
        expected = nbytes(dtype, tuple(shape))
    except ShapeMismatch as e:
        raise ShapeMismatch(f"{name!r}: {e}") from None
    narrows = dtype == "BF16" and local.dtype == "F32"
    if local.nbytes != expected * (2 if narrows else 1):
        raise ShapeMismatch(f"{name!r}: {dtype} {tuple(shape)} takes {expected:,} bytes, got {local.nbytes:,}")
    if (
        local.dtype not in (None, "U8", dtype)
        and not narrows
        and not (dtype == "BF16" and local.dtype in ("I16", "U16"))
    ):
        raise ShapeMismatch(f"{name!r}: announced as {dtype}, but the memory holds {local.dtype}")
    return local
