"""Snapshots: the named tensors of one version, published by one process and pulled by others.

    source = SnapshotSource("policy")
    manifest = source.publish(7, {"w": ("BF16", (4, 8), tensor)})        core
    snapshot = pull(manifest, deadline=30)                               satellite, cell agent
    snapshot["w"]                                                        (dtype, shape, bytes)

A version lies in one frozen region. A reader on the source's machine maps it: nothing is copied. One elsewhere takes a
lease (`leases`), reads, verifies, freezes its copy, and serves it on: on its own machine others map that, and other
machines read from it, so a source sends a version once a machine, and to few of them. A pull gives one whole version or
raises; never a mixture.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gyre_transport import safetensors
from gyre_transport.backends.shm import Peer
from gyre_transport.buffers import THREADS, aligned, view
from gyre_transport.descriptor import Descriptor, Shared, host
from gyre_transport.endpoint import Backend, candidates
from gyre_transport.errors import (
    ChecksumMismatch,
    DataError,
    DeadlineExceeded,
    ShapeMismatch,
    StaleDescriptor,
    StaleVersion,
    Unreachable,
)
from gyre_transport.frozen import Draft, attach, is_frozen
from gyre_transport.layout import Box, Stretch
from gyre_transport.lease import Lease
from gyre_transport.manifest import Entry, Manifest
from gyre_transport.memory import Region, publish
from gyre_transport.reads import Part, read, read_many
from gyre_transport.source import SnapshotSource, Tensor
from gyre_transport.wanted import Wanted

__all__ = ["Entry", "Manifest", "Snapshot", "SnapshotSource", "Tensor", "pull"]

log = logging.getLogger(__name__)

_ASK = 2.0  # seconds the source may take to say which version it has, even when the reader has none left
_AGAIN = 0.1  # seconds between two times it is asked


class Snapshot(Mapping[str, tuple[str, tuple[int, ...], memoryview]]):
    """A pulled snapshot in local memory: name -> (dtype, shape, bytes). While it lives, it may be served to others."""

    def __init__(
        self, manifest: Manifest, buffer: memoryview, entries: tuple[Entry, ...], serving: contextlib.ExitStack
    ) -> None:
        self.manifest = manifest
        self.buffer = buffer  # writable; what is written to it nobody else sees
        self._entries = {e.name: e for e in entries}
        self._serving = serving
        self.serves = False  # whether others may read it from here

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

    def close(self) -> None:
        """Serve it to nobody any more; its memory stays for who holds it. Idempotent."""
        self.serves = False
        self._serving.close()

    def write_safetensors(
        self, path: str | Path, *, fsync: bool = False, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write one .safetensors file, whole or not at all (temporary file, rename).

        fsync: force it to the disk first. metadata: strings for the header; "format": "pt" is always there.
        Raises `DataError` (disk full, no such folder).
        """
        safetensors.write(Path(path), self, fsync=fsync, metadata={"format": "pt", **(metadata or {})})

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def pull(
    manifest: Manifest,
    *,
    deadline: float,
    verify: bool = True,
    into: Any = None,
    select: Mapping[str, Box | None] | None = None,
    share: bool = True,
    via: Backend | None = None,
) -> Snapshot:
    """Get a snapshot into local memory.

    deadline: seconds from now, checksums included.
    verify: compare the checksum of every tensor that comes whole from another machine. What is mapped is the frozen
        memory they were computed from, or a frozen copy that was verified.
    into: writable contiguous buffer of at least the snapshot's bytes to copy to; default: what serves best.
    select: only these tensors, and of those only these parts (None: all), each contiguous; see `layout`.
    share: map a copy that a reader on this machine holds, and serve this one on while the snapshot lives.
    via: that backend or none, for what is read from another process.
    Raises `StaleVersion`, `StaleDescriptor`, `ChecksumMismatch`, `ShapeMismatch`, `Unreachable`, `DeadlineExceeded`;
    `into` then holds no meaning.
    """
    manifest.check()
    wanted = Wanted(manifest, select)
    if into is not None:
        into = view(into, writable=True).bytes
        if into.nbytes < wanted.nbytes:
            raise ShapeMismatch(
                f"version {manifest.version} of {manifest.model!r} takes {wanted.nbytes:,} bytes, `into` has "
                f"{into.nbytes:,}; give a larger one"
            )
    end = time.monotonic() + deadline
    for again in (True, False):
        try:
            return _Pull(manifest, wanted, end, verify, into, share, via).run()
        except StaleDescriptor as e:
            current = _current(manifest, via, end)
            if current is None:
                raise
            if current == manifest.version and again:  # a connection was lost, or the next version is on its way
                log.warning("%s: %s; its source has it still: reading again", manifest.content, str(e))
                continue
            now = "is being replaced" if current == manifest.version else f"was replaced by version {current}"
            raise StaleVersion(
                f"version {manifest.version} of {manifest.model!r} {now} ({e}); ask for the current manifest"
            ) from None
    raise AssertionError  # never: the second time returns or raises


class _Pull:
    """One pull: the fields are the arguments of `pull`."""

    def __init__(
        self,
        manifest: Manifest,
        wanted: Wanted,
        end: float,
        verify: bool,
        into: memoryview | None,
        share: bool,
        via: Backend | None,
    ) -> None:
        self._manifest, self._wanted, self._end, self._verify_it = manifest, wanted, end, verify
        self._into, self._via = into, via
        self._shares = share and "shm" in candidates(manifest.descriptor)
        self._serves = self._shares and verify and into is None and wanted.stretches is None

    def run(self) -> Snapshot:
        """Map it, or read it."""
        if self._left() <= 0:
            raise self._late("read")
        memory = _mapped(self._manifest.descriptor, self._manifest.nbytes, self._via)
        if memory is not None:
            return self._from(memory)
        with Lease(self._manifest.descriptor, end=self._end, shares=self._shares) as lease:
            holder, is_here = lease.holder()
            while True:
                try:
                    return self._map(holder) if is_here else self._read(lease, holder)
                except DataError as e:
                    if holder is self._manifest.descriptor or isinstance(e, ShapeMismatch) or self._left() <= 0:
                        raise
                    log.warning(
                        "the copy of %s could not be read: %s; asking the source", self._manifest.content, str(e)
                    )
                holder, is_here = lease.holder(failed=holder)

    def _map(self, holder: Descriptor) -> Snapshot:
        """Map a copy on this machine."""
        self._matches(holder)
        memory = _mapped(holder, self._manifest.nbytes, None)
        if memory is None:
            raise Unreachable(f"the copy in {holder.owner} cannot be mapped")
        return self._from(memory)

    def _read(self, lease: Lease, holder: Descriptor) -> Snapshot:
        """Read from the source or from a copy, which is given half the time, so that some is left to ask again."""
        is_source = holder is self._manifest.descriptor
        if not is_source:
            self._matches(holder)
        deadline = self._left() if is_source else self._left() / 2
        if not self._serves:
            room = aligned(self._wanted.nbytes) if self._into is None else self._into[: self._wanted.nbytes]
            buffer = view(room, writable=True).bytes
            self._bytes(holder, buffer, deadline)
            return self._snapshot(buffer)
        with Draft(self._wanted.nbytes) as draft:
            self._bytes(holder, view(draft.array(), writable=True).bytes, deadline)
            try:
                fd = draft.freeze()
            except DataError as e:  # something still holds its pages
                log.warning("the copy of %s is not served on: %s", self._manifest.content, str(e))
                return self._snapshot(draft.take())
        with contextlib.ExitStack() as serving:
            region = serving.enter_context(publish(fd, content=self._manifest.content))
            snapshot = self._snapshot(memoryview(attach(fd)), serving.pop_all())
        self._offer(lease, region, snapshot)
        return snapshot

    def _offer(self, lease: Lease, region: Region, snapshot: Snapshot) -> None:
        """Serve the copy on; not being able to takes nothing from the reader."""
        try:
            line = lease.offer(region.descriptor)
        except DataError as e:
            log.info("the copy of %s is not served on: %s", self._manifest.content, str(e))
            line = None
        if line is None:
            snapshot.close()
        else:
            snapshot._serving.callback(line.close)
            snapshot.serves = True

    def _bytes(self, holder: Descriptor, buffer: memoryview, deadline: float) -> None:
        parts = self._wanted.stretches
        if parts is None:
            read(holder, buffer, offset=0, deadline=deadline, via=self._via)
        else:
            wanted = (
                Part(holder, buffer[at : at + s.nbytes], s.offset, s.rows, s.stride) for at, s in parts if s.nbytes
            )
            read_many(wanted, deadline=deadline, via=self._via).wait()
        if self._verify_it:
            self._verify(buffer)

    def _from(self, memory: memoryview) -> Snapshot:
        """What is wanted of a mapped region: the mapping itself, unless it has to be elsewhere."""
        parts, nbytes = self._wanted.stretches, self._wanted.nbytes
        if parts is None and self._into is None:
            return self._snapshot(memory[:nbytes])
        room = aligned(nbytes) if self._into is None else np.frombuffer(self._into, np.uint8)[:nbytes]
        source = np.frombuffer(memory, np.uint8)

        def copy(part: tuple[int, Stretch]) -> None:
            at, s = part
            if self._left() <= 0:
                raise self._late("copied")
            rows = as_strided(source[s.offset :], (s.rows, s.length), (s.stride, 1), writeable=False)
            np.copyto(room[at : at + s.nbytes].reshape(s.rows, s.length), rows)

        if parts is None:
            parts = [(e.offset, Stretch(e.offset, e.nbytes)) for e in self._manifest.entries]
        _each(copy, [p for p in parts if p[1].nbytes])
        return self._snapshot(view(room, writable=True).bytes)

    def _matches(self, copy: Descriptor) -> None:
        if copy.content != self._manifest.content or copy.nbytes != self._manifest.descriptor.nbytes:
            raise DataError(f"expected a copy of {self._manifest.content}, got {copy!r}")

    def _snapshot(self, buffer: memoryview, serving: contextlib.ExitStack | None = None) -> Snapshot:
        return Snapshot(self._manifest, buffer, self._wanted.entries, serving or contextlib.ExitStack())

    def _verify(self, buffer: memoryview) -> None:
        def check(e: Entry) -> None:
            if self._left() <= 0:
                raise self._late("verified")
            if (found := zlib.crc32(buffer[e.offset : e.offset + e.nbytes])) != e.checksum:
                raise ChecksumMismatch(
                    f"{e.name!r} of {self._manifest.content}: crc32 {found:#010x}, published as {e.checksum:#010x}; "
                    "pull again, and if it stays so look at the network and the memory of both machines"
                )

        _each(check, list(self._wanted.whole))

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _late(self, what: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._manifest.content} was not {what} before the deadline; allow more time")


def _mapped(descriptor: Descriptor, nbytes: int, via: Backend | None) -> memoryview | None:
    """Map a frozen region of a process on this machine; None where that cannot be. Raises `StaleDescriptor`."""
    location = descriptor.location
    local = descriptor.owner.host == host() and "shm" in candidates(descriptor, via)
    if not local or not isinstance(location, Shared):
        return None
    try:
        peer = Peer(descriptor)
    except Unreachable:
        return None
    try:
        fd = peer.open(location.fd)
        memory = memoryview(attach(fd)) if is_frozen(fd) else None
        peer.check()  # it was the region's file when it was opened
    finally:
        peer.close()
    if memory is not None and memory.nbytes < nbytes:
        raise StaleDescriptor(f"the memory of {descriptor.owner} is shorter than its descriptor says")
    return memory


def _current(manifest: Manifest, via: Backend | None, end: float) -> int | None:
    """The version its source has now; None when the source is gone, or has not said so by `end`.

    Its machine was there a moment ago: one that does not answer at once may be busy with the next version.
    """
    head = np.zeros(1, np.int64)
    end = max(end, time.monotonic() + _ASK)
    while True:
        try:
            # eight bytes are not worth a handshake of network cards
            left, plain = end - time.monotonic(), "tcp" if via in ("verbs", "mooncake") else via
            read(manifest.head, memoryview(head).cast("B"), deadline=left, via=plain)
            return int(head[0])
        except DataError as e:
            if not isinstance(e, Unreachable) or time.monotonic() + _AGAIN >= end:
                log.info("the source of %s does not say what it has: %s", manifest.content, str(e))
                return None
        time.sleep(_AGAIN)


def _each[T](function: Any, items: list[T]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in pool.map(function, items):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
