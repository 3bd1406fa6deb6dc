"""Snapshots: the named tensors of one version, published by one process and pulled by others.

    source = SnapshotSource("policy")
    manifest = source.publish(7, {"w": ("BF16", (4, 8), tensor)})        core
    snapshot = pull(manifest, deadline=30)                               satellite, cell agent
    snapshot["w"]                                                        (dtype, shape, bytes)

All tensors of a version lie in one region, so a pull is one large read. A source publishes one version at a time and
writes the next into the same region: the key of the old version is taken away before the first byte changes, and a
reader looks at the key after its last byte. Hence a pull gives one whole version or raises; never a mixture.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gyre_transport import safetensors
from gyre_transport.buffers import Buffer, aligned, nbytes, view
from gyre_transport.endpoint import Backend
from gyre_transport.errors import (
    ChecksumMismatch,
    DataError,
    DeadlineExceeded,
    ShapeMismatch,
    StaleDescriptor,
    StaleVersion,
)
from gyre_transport.memory import Content, Descriptor, Region, allocate, read

_ALIGN = 64  # bytes: a tensor of any dtype is aligned in a pulled buffer
_THREADS = min(4, os.cpu_count() or 1)  # copies and checksums release the interpreter's lock

Tensor = tuple[str, tuple[int, ...], Any]  # dtype, shape, contiguous bytes-like or CPU tensor


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a snapshot: `nbytes` at `offset` of the region, row-major."""

    name: str
    dtype: str  # safetensors name: "BF16", "F32", …
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int  # crc32 of its bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    """What is in a snapshot and where; `msgspec.msgpack.encode` / `decode(..., type=Manifest)`."""

    model: str
    version: int
    entries: tuple[Entry, ...]
    descriptor: Descriptor  # the region with all tensors
    head: Descriptor  # 8 bytes, int64: the version the source published last
    nbytes: int  # of the region, from its beginning


class SnapshotSource:
    """Publishes the versions of one model, one at a time; a context manager. Not shared between threads."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.manifest: Manifest | None = None  # of the version that can be pulled now
        self._head = allocate(8)
        self._region: Region | None = None
        self._version: int | None = None
        self._closed = False

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Copy `tensors` (name -> (dtype, shape, contiguous bytes-like or CPU tensor)) into the region.

        The previous version is revoked: its readers get `StaleVersion`. The region is used again when it is large
        enough. Raises `ShapeMismatch` when a tensor is not what it says, or `DataError` when `version` does not
        increase or memory is short; the previous version then still stands.
        """
        if self._closed:
            raise DataError(f"the source of {self.model!r} is closed; make a new one")
        if self._version is not None and version <= self._version:
            raise DataError(f"{self.model!r}: version {version} after {self._version}; versions only increase")
        sources = {name: _checked(name, tensor) for name, tensor in tensors.items()}
        offsets, total = _layout(s.nbytes for s in sources.values())
        region = self._region
        if region is None or region.nbytes < total:
            region = allocate(total)
        if self._region is not None:
            self._region.revoke()  # from here on nobody reads the previous version
            self.manifest = None
            if self._region is not region:
                self._region.close()
        self._region = region
        target = region.array()

        def copy(source: Buffer, offset: int) -> int:
            piece = target[offset : offset + source.nbytes]
            np.copyto(piece, np.frombuffer(source.bytes, np.uint8))
            return zlib.crc32(piece)

        with ThreadPoolExecutor(_THREADS) as pool:
            checksums = list(pool.map(copy, sources.values(), offsets))
        entries = tuple(
            Entry(
                name=name,
                dtype=dtype,
                shape=tuple(shape),
                offset=offset,
                nbytes=nbytes(dtype, shape),
                checksum=checksum,
            )
            for (name, (dtype, shape, _)), offset, checksum in zip(tensors.items(), offsets, checksums, strict=True)
        )
        self._head.array(np.int64)[0] = self._version = version
        self.manifest = Manifest(
            model=self.model,
            version=version,
            entries=entries,
            descriptor=region.renew(Content(model=self.model, version=version)),
            head=self._head.descriptor,
            nbytes=total,
        )
        return self.manifest

    def close(self) -> None:
        """Revoke the current version and release the memory: readers get `StaleDescriptor`. Idempotent."""
        self._closed = True
        self.manifest = None
        self._head.close()
        if self._region is not None:
            self._region.close()
            self._region = None

    def __enter__(self) -> SnapshotSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Snapshot(Mapping[str, tuple[str, tuple[int, ...], memoryview]]):
    """A pulled snapshot in local memory: name -> (dtype, shape, bytes)."""

    def __init__(self, manifest: Manifest, buffer: memoryview) -> None:
        self.manifest = manifest
        self.buffer = buffer  # writable, [manifest.nbytes]
        self._entries = {e.name: e for e in manifest.entries}

    @property
    def version(self) -> int:
        """Version of every tensor in it."""
        return self.manifest.version

    def __getitem__(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        e = self._entries[name]
        return e.dtype, e.shape, self.buffer[e.offset : e.offset + e.nbytes]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def write_safetensors(self, path: Path, *, fsync: bool = False, metadata: Mapping[str, str] | None = None) -> None:
        """Write one .safetensors file, whole or not at all (temporary file, rename).

        fsync: force it to the disk first. metadata: strings for the header; "format": "pt" is always there.
        Raises `DataError` (disk full, no such folder).
        """
        safetensors.write(path, self, fsync=fsync, metadata={"format": "pt", **(metadata or {})})


def pull(
    manifest: Manifest, *, deadline: float, verify: bool = True, into: Any = None, via: Backend | None = None
) -> Snapshot:
    """Read a snapshot into local memory.

    deadline: seconds from now, checksums included. verify: compare every checksum.
    into: writable contiguous buffer of at least `manifest.nbytes` to use again; default: a new one.
    via: that backend or none.
    Raises `StaleVersion`, `StaleDescriptor`, `ChecksumMismatch`, `ShapeMismatch`, `Unreachable`, `DeadlineExceeded`;
    `into` then holds no meaning.
    """
    end = time.monotonic() + deadline
    content = Content(model=manifest.model, version=manifest.version)
    if manifest.descriptor.content != content:
        raise ShapeMismatch(f"the manifest of {content} describes memory of {manifest.descriptor.content}")
    for e in manifest.entries:
        if e.nbytes != nbytes(e.dtype, e.shape) or e.offset < 0 or e.offset + e.nbytes > manifest.nbytes:
            raise ShapeMismatch(f"the manifest of {manifest.model!r} contradicts itself at {e.name!r}: {e!r}")
    if not 0 <= manifest.nbytes <= manifest.descriptor.nbytes:
        raise ShapeMismatch(
            f"the manifest of {manifest.model!r} announces {manifest.nbytes:,} bytes in a region of "
            f"{manifest.descriptor.nbytes:,}"
        )
    local = view(aligned(manifest.nbytes) if into is None else into, writable=True)
    if local.nbytes < manifest.nbytes:
        raise ShapeMismatch(
            f"version {manifest.version} of {manifest.model!r} takes {manifest.nbytes:,} bytes, "
            f"`into` has {local.nbytes:,}; give a larger one"
        )
    buffer = local.bytes[: manifest.nbytes]
    try:
        read(manifest.descriptor, buffer, offset=0, deadline=end - time.monotonic(), via=via)
    except StaleDescriptor as e:
        raise _moved_on(manifest, via) or e from None
    if verify:
        _verify(manifest, buffer, end)
    return Snapshot(manifest, buffer)


def _moved_on(manifest: Manifest, via: Backend | None) -> StaleVersion | None:
    """The error when the source still publishes; None when it is gone."""
    head = np.zeros(1, np.int64)
    try:
        read(manifest.head, memoryview(head).cast("B"), deadline=1.0, via=via)
    except DataError:
        return None
    now = "is being replaced" if head[0] == manifest.version else f"was replaced by version {head[0]}"
    return StaleVersion(f"version {manifest.version} of {manifest.model!r} {now}; ask for the current manifest")


def _verify(manifest: Manifest, buffer: memoryview, end: float) -> None:
    def check(e: Entry) -> None:
        if time.monotonic() >= end:
            raise DeadlineExceeded(
                f"version {manifest.version} of {manifest.model!r} was read, but not verified before the deadline; "
                "allow more time"
            )
        if (found := zlib.crc32(buffer[e.offset : e.offset + e.nbytes])) != e.checksum:
            raise ChecksumMismatch(
                f"{e.name!r} of {manifest.model!r} version {manifest.version}: crc32 {found:#010x}, published as "
                f"{e.checksum:#010x}; pull again, and if it stays so the owner's memory was overwritten after publish"
            )

    _each(check, manifest.entries)


def _each(function: Callable[[Entry], None], entries: tuple[Entry, ...]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for _ in pool.map(function, entries):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _checked(name: str, tensor: Tensor) -> Buffer:
    dtype, shape, memory = tensor
    try:
        local = view(memory)
        expected = nbytes(dtype, tuple(shape))
    except ShapeMismatch as e:
        raise ShapeMismatch(f"{name!r}: {e}") from None
    if local.nbytes != expected:
        raise ShapeMismatch(f"{name!r}: {dtype} {tuple(shape)} takes {expected:,} bytes, got {local.nbytes:,}")
    if local.dtype not in (None, "U8", dtype) and not (dtype == "BF16" and local.dtype in ("I16", "U16")):
        raise ShapeMismatch(f"{name!r}: announced as {dtype}, but the memory holds {local.dtype}")
    return local


def _layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Aligned offsets of tensors of `sizes` bytes, and the bytes they take together."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end
