"""Serve a folder's files as they are now: mapped (small ones copied), digested once, revoked when one changes.

serve ─▶ every file opened, mapped, digested, registered ─▶ ticket
changed() now and then ─▶ the first file that is not what it was: its readers get `StaleVersion`
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gyre_transport.errors import DataError
from gyre_transport.folder.listing import MOST_FILES, MOST_LISTING, PIECE, File, Listing, Ticket
from gyre_transport.memory import Region, register

_THREADS = min(4, os.cpu_count() or 1)  # digests release the interpreter's lock
_SMALL = 1 << 20  # bytes of a file that is copied, not mapped
_INDEX = "model.safetensors.index.json"

Progress = Callable[[int, int], None]  # bytes done, bytes of all


class _Mark(NamedTuple):
    """What changes when a file does."""

    device: int
    inode: int
    nbytes: int
    modified: int  # ns

    @classmethod
    def of(cls, status: os.stat_result) -> _Mark:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class _Open(NamedTuple):
    path: Path
    mark: _Mark
    region: Region | None  # None: an empty file


class Served:
    """A folder that can be pulled until `close`; a context manager. Made by `serve`."""

    def __init__(self, listing: Listing, files: list[_Open], stack: contextlib.ExitStack) -> None:
        encoded = listing.encode()
        if len(encoded) > MOST_LISTING:
            raise DataError(f"the listing takes {len(encoded):,} bytes, at most {MOST_LISTING:,}; serve fewer files")
        region = stack.enter_context(register(bytearray(encoded)))
        self.listing = listing
        self.ticket = Ticket(
            name=listing.name,
            nbytes=listing.nbytes,
            listing=region.descriptor,
            digest=hashlib.sha256(encoded).digest(),
        )
        self._files = files
        self._stack = stack

    def changed(self) -> Path | None:
        """The first file that is not what it was when it was digested; what can no longer be trusted is revoked."""
        found = None
        for path, mark, region in self._files:
            if not _is(path, mark):
                found = found or path
                if region is not None:
                    region.revoke()
        return found

    def close(self) -> None:
        """Stop; readers get `StaleDescriptor`. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(folder: str | Path, progress: Progress = lambda done, total: None) -> Served:
    """Register every file below `folder`, hidden ones left out and links followed.

    Raises `DataError`: nothing there, not readable, a shard of its index missing, or a file that changed meanwhile.
    """
    folder = Path(folder)
    paths = list(_files(folder))
    _complete(folder)
    total = sum(p.stat().st_size for p in paths)
    done = 0

    def one(path: Path) -> tuple[File, _Open]:
        nonlocal done
        try:
            with path.open("rb") as file:
                mark = _Mark.of(os.fstat(file.fileno()))
                digests = []
                for digest, nbytes in _digests(file, mark.nbytes):
                    digests.append(digest)
                    done += nbytes
                    progress(done, total)
                region = _registered(file, mark.nbytes)
        except OSError as e:
            raise DataError(f"cannot read {str(path)!r}: {e.strerror}; check its permissions") from e
        if not _is(path, mark) or len(digests) != -(-mark.nbytes // PIECE):
            if region is not None:
                region.close()
            raise DataError(f"{str(path)!r} changed while it was read; serve the folder when nobody writes to it")
        descriptor = None if region is None else region.descriptor
        name = path.relative_to(folder).as_posix()
        listed = File(path=name, nbytes=mark.nbytes, digests=tuple(digests), descriptor=descriptor)
        return listed, _Open(path, mark, region)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(_THREADS) as pool:
        listed: list[File] = []
        opened: list[_Open] = []
        for future in [pool.submit(one, path) for path in paths]:
            try:
                file, open_ = future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            listed.append(file)
            opened.append(open_)
            if open_.region is not None:
                stack.callback(open_.region.close)
        return Served(Listing(name=folder.resolve().name, files=tuple(listed)), opened, stack.pop_all())


def _files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise DataError(f"{str(folder)!r} is no folder; name the one with config.json and the weights")
    found = 0
    for where, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            path = Path(where) / name
            if not name.startswith(".") and path.is_file():
                found += 1
                yield path
    if not 0 < found <= MOST_FILES:
        raise DataError(f"{str(folder)!r} holds {found:,} files, expected 1 to {MOST_FILES:,}")


def _unreadable(e: OSError) -> None:
    raise DataError(f"cannot read {e.filename!r}: {e.strerror}; check its permissions") from e


def _complete(folder: Path) -> None:
    """A download that broke off is not a model."""
    index = folder / _INDEX
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise DataError(f"{str(index)!r} is no index of shards ({e!r}); download the model again") from e
    if missing := sorted(str(n) for n in named if not (folder / str(n)).is_file()):
        raise DataError(f"{str(folder)!r} lacks {len(missing)} shards, such as {missing[0]!r}; complete it first")


def _digests(file: BinaryIO, left: int) -> Iterator[tuple[bytes, int]]:
    """(digest, bytes) of the pieces of the first `left` bytes: a file that grows is not read for ever."""
    room = memoryview(bytearray(min(PIECE, left)))
    while nbytes := _fill(file, room[:left]):
        left -= nbytes
        yield hashlib.sha256(room[:nbytes]).digest(), nbytes


def _fill(file: BinaryIO, room: memoryview) -> int:
    filled = 0
    while filled < room.nbytes and (n := file.readinto(room[filled:])):  # type: ignore[attr-defined]
        filled += n
    return filled


def _registered(file: BinaryIO, nbytes: int) -> Region | None:
    if not nbytes:
        return None
    if nbytes <= _SMALL:
        return register(bytearray(os.pread(file.fileno(), nbytes, 0)))
    return register(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ))


def _is(path: Path, mark: _Mark) -> bool:
    try:
        return _Mark.of(path.stat()) == mark
    except OSError:
        return False
