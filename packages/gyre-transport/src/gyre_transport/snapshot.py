"""Snapshots: the named tensors of one version, published by one process and pulled by others.

    source = SnapshotSource("policy")
    manifest = source.publish(7, {"w": ("BF16", (4, 8), tensor)})        core
    snapshot = pull(manifest, deadline=30)                               satellite, cell agent
    snapshot["w"]  # (dtype, shape, memoryview)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gyre_transport.errors import DataError
from gyre_transport.memory import Descriptor


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
    head: Descriptor  # 8 bytes: the version the source publishes now
    nbytes: int  # of the region


class SnapshotSource:
    """Publishes the versions of one model, one at a time; a context manager."""

    def __init__(self, model: str) -> None:
        self.model = model

    def publish(self, version: int, tensors: Mapping[str, tuple[str, tuple[int, ...], Any]]) -> Manifest:
        """Copy `tensors` (name -> (dtype, shape, contiguous bytes-like or CPU tensor)) into the region.

        The previous version is revoked: its readers get `StaleVersion`. The region is used again when it is large
        enough. Raises `ShapeMismatch` (nothing changed) or `DataError` when `version` does not increase."""
        raise DataError("not implemented")

    def close(self) -> None:
        """Revoke the current version and release the memory: readers get `StaleDescriptor`. Idempotent."""

    def __enter__(self) -> SnapshotSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Snapshot(Mapping[str, tuple[str, tuple[int, ...], memoryview]]):
    """A pulled snapshot in local memory: name -> (dtype, shape, bytes)."""

    def __init__(self, manifest: Manifest, buffer: memoryview) -> None:
        self.manifest = manifest
        self.buffer = buffer  # writable, [manifest.nbytes]

    @property
    def version(self) -> int:
        """Version of every tensor in it."""
        return self.manifest.version

    def __getitem__(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        raise DataError("not implemented")

    def __iter__(self) -> Iterator[str]:
        return (e.name for e in self.manifest.entries)

    def __len__(self) -> int:
        return len(self.manifest.entries)

    def write_safetensors(self, path: Path, *, fsync: bool = False, metadata: Mapping[str, str] | None = None) -> None:
        """Write one .safetensors file, whole or not at all (temporary file, rename).

        fsync: force it to the disk first. metadata: strings for the header; "format": "pt" is always there.
        Raises `DataError` (disk full, no such folder)."""
        raise DataError("not implemented")


def pull(manifest: Manifest, *, deadline: float, verify: bool = True, into: Any = None) -> Snapshot:
    """Read a snapshot into local memory.

    deadline: seconds from now, checksums included. verify: compare every checksum.
    into: writable contiguous buffer of at least `manifest.nbytes` to use again; default: a new one.
    Raises `StaleVersion`, `StaleDescriptor`, `ChecksumMismatch`, `ShapeMismatch`, `Unreachable`, `DeadlineExceeded`;
    `into` then holds no meaning.
    """
    raise DataError("not implemented")
