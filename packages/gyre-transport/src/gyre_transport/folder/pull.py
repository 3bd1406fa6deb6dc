"""Pull a served folder: what is there already is kept, what comes is verified, and the folder appears when it is whole.

    ticket ─▶ listing ─▶ for each file: verify what an earlier pull left ─▶ read the rest, piece by piece
                                                   │ digest differs: refused          │ while one piece is digested and
                                                   ▼                                  ▼ written, the next one comes
                          OUT's folder/.OUT.partial/…   ── all files whole and on the disk: rename ──▶   OUT

An interrupted pull leaves the partial folder; the next one goes on from there, whatever server and ticket it has: the
digests say what may be kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from gyre_transport.buffers import aligned
from gyre_transport.descriptor import Descriptor
from gyre_transport.endpoint import Backend
from gyre_transport.errors import (
    ChecksumMismatch,
    DataError,
    DeadlineExceeded,
    StaleDescriptor,
    StaleVersion,
    TicketError,
)
from gyre_transport.folder import listing as listings
from gyre_transport.folder.listing import PIECE, File, Listing, Ticket
from gyre_transport.reads import read

_ROOMS = 3  # pieces: one that comes, one that is digested and written, one that waits

Progress = Callable[[int, int], None]  # bytes in place, bytes of all


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull did."""

    out: str
    files: int
    nbytes: int
    kept: int  # bytes an earlier pull had brought
    seconds: float


def pull(
    ticket: Ticket,
    out: str | Path,
    *,
    deadline: float,
    via: Backend | None = None,
    progress: Progress = lambda done, total: None,
) -> Pulled:
    """Bring the folder `ticket` opens to `out`, which must not exist or be empty.

    deadline: seconds from now. via: that backend or none.
    Raises `TicketError`, `StaleVersion` (a file changed at the server), `StaleDescriptor` (the server is gone, or the
    ticket is not its), `ChecksumMismatch`, `Unreachable`, `DeadlineExceeded`, `DataError` (disk, `out`); `out` is then
    as it was, and what was verified is kept beside it.
    """
    began = time.monotonic()
    end = began + deadline
    out = Path(out).absolute()
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise DataError(f"{str(out)!r} is there already; name another folder, or remove it")
    listing = _listing(ticket, end, via)
    partial = out.with_name(f".{out.name}.partial")
    try:
        with _held(partial):
            kept = _Puller(listing, ticket, partial, end, via, progress).run()
            partial.rename(out)
            _sync(out.parent)
    except OSError as e:
        raise DataError(
            f"cannot write {str(partial)!r}: {e.strerror}; make room or name another folder. What came is kept there"
        ) from e
    return Pulled(
        out=str(out), files=len(listing.files), nbytes=listing.nbytes, kept=kept, seconds=time.monotonic() - began
    )


def _listing(ticket: Ticket, end: float, via: Backend | None) -> Listing:
    if not 0 < ticket.listing.nbytes <= listings.MOST_LISTING:
        raise TicketError(f"the ticket names a listing of {ticket.listing.nbytes:,} bytes; it is damaged, get another")
    room = aligned(ticket.listing.nbytes)
    try:
        read(ticket.listing, room, deadline=end - time.monotonic(), via=via)
    except StaleDescriptor as e:
        raise StaleDescriptor(
            f"nobody serves {ticket.name!r} under this ticket (any more): {e}. Start `snapshot serve` again and take "
            "its new ticket"
        ) from e
    return listings.decode(room.data, ticket.digest)


@contextlib.contextmanager
def _held(partial: Path) -> Iterator[None]:
    """The partial folder, made if need be, for one pull at a time."""
    partial.mkdir(parents=True, exist_ok=True)
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another pull writes to {str(partial)!r}; wait for it, or name another folder") from None
        yield
    finally:
        os.close(fd)


class _Puller:
    """One pull into a partial folder."""

    def __init__(
        self, listing: Listing, ticket: Ticket, partial: Path, end: float, via: Backend | None, progress: Progress
    ) -> None:
        self._listing, self._ticket, self._partial = listing, ticket, partial
        self._end, self._via, self._progress = end, via, progress
        self._done = 0  # bytes in place, verified
        self._kept = 0
        self._rooms = [aligned(PIECE) for _ in range(_ROOMS)]

    def run(self) -> int:
        """Bring every file; returns the bytes that were there already."""
        self._remove_strangers()
        self._need_room()
        with ThreadPoolExecutor(1) as pool:
            for file in self._listing.files:
                path = self._partial / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                try:
                    self._bring(file, fd, self._verified(file, fd), pool)
                    os.ftruncate(fd, file.nbytes)
                    os.fsync(fd)
                finally:
                    os.close(fd)
        for folder, _, _ in os.walk(self._partial):
            _sync(Path(folder))
        return self._kept

    def _remove_strangers(self) -> None:
        """What an earlier pull of another folder left."""
        wanted = {self._partial / f.path for f in self._listing.files}
        parents = {p for path in wanted for p in path.parents}
        for where, folders, names in os.walk(self._partial, topdown=False):
            for path in (Path(where) / name for name in (*names, *folders)):
                if path.is_symlink() or (path.is_file() and path not in wanted):
                    path.unlink()
                elif path.is_dir() and path not in parents:
                    shutil.rmtree(path)

    def _need_room(self) -> None:
        there = sum(p.stat().st_size for p in self._partial.rglob("*") if p.is_file())
        free, needed = shutil.disk_usage(self._partial).free, max(0, self._listing.nbytes - there)
        if free < needed:
            raise DataError(
                f"{self._listing.name!r} needs {needed:,} more bytes, the disk of {str(self._partial)!r} has {free:,} "
                "free; make room or name another folder"
            )

    def _verified(self, file: File, fd: int) -> int:
        """How many pieces of the file are in place already, from its beginning."""
        room = memoryview(self._rooms[0])
        for number, digest in enumerate(file.digests):
            size = min(PIECE, file.nbytes - number * PIECE)
            self._in_time()
            if os.preadv(fd, [room[:size]], number * PIECE) != size:
                return number
            if hashlib.sha256(room[:size]).digest() != digest:
                return number
            self._kept += size
            self._count(size)
        return len(file.digests)

    def _bring(self, file: File, fd: int, first: int, pool: ThreadPoolExecutor) -> None:
        """Read the pieces from `first` on; each is digested and written while the next one comes."""
        under_way: list[Future[None]] = []
        try:
            for number in range(first, len(file.digests)):
                if len(under_way) == _ROOMS - 1:
                    under_way.pop(0).result()
                size = min(PIECE, file.nbytes - number * PIECE)
                room = memoryview(self._rooms[number % _ROOMS])[:size]
                assert file.descriptor is not None  # noqa: S101  (the listing was checked)
                self._read(file, file.descriptor, room, number * PIECE)
                under_way.append(pool.submit(self._keep, file, fd, number, room))
        finally:
            for future in under_way:  # also when a read failed: what came whole is kept
                future.result()

    def _read(self, file: File, descriptor: Descriptor, room: memoryview, offset: int) -> None:
        try:
            read(descriptor, room, offset=offset, deadline=max(0.0, self._end - time.monotonic()), via=self._via)
        except DeadlineExceeded as e:
            raise self._late() from e
        except StaleDescriptor as e:
            raise self._stale(file, e) from e

    def _stale(self, file: File, e: StaleDescriptor) -> DataError:
        kept = f"{self._done:,} of {self._listing.nbytes:,} bytes are kept in {str(self._partial)!r}"
        try:
            left = max(0.1, min(2.0, self._end - time.monotonic()))
            read(self._ticket.listing, aligned(self._ticket.listing.nbytes), deadline=left, via=self._via)
        except DataError:
            return StaleDescriptor(
                f"the server of {self._listing.name!r} is gone: {e}. Start `snapshot serve` again and pull with its "
                f"new ticket; {kept}"
            )
        return StaleVersion(
            f"{file.path!r} changed at the server while it was served; serve the folder again when nobody writes to "
            f"it, and pull with the new ticket; {kept}"
        )

    def _keep(self, file: File, fd: int, number: int, room: memoryview) -> None:
        if hashlib.sha256(room).digest() != file.digests[number]:
            raise ChecksumMismatch(
                f"{file.path!r}: other bytes came than were served, {number * PIECE:,} bytes into the file. Did it "
                "change at the server? Serve the folder again and pull with the new ticket"
            )
        offset = number * PIECE
        size = room.nbytes
        while room.nbytes:
            n = os.pwrite(fd, room, offset)
            room, offset = room[n:], offset + n
        self._count(size)

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._listing.nbytes)

    def _in_time(self) -> None:
        if time.monotonic() >= self._end:
            raise self._late()

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._done:,} of {self._listing.nbytes:,} bytes of {self._listing.name!r} were in place at the "
            "deadline; pull again, with more time: they are kept"
        )


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
