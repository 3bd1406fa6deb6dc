"""What a served folder holds, and the ticket that opens it."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path, PurePosixPath

import msgspec

from gyre_transport.descriptor import Descriptor
from gyre_transport.errors import ChecksumMismatch, DataError, TicketError

PIECE = 32 << 20  # bytes a digest covers, and of one read
MOST_FILES = 100_000
MOST_LISTING = 256 << 20  # bytes


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file: `digests` of its pieces of PIECE bytes, the last one shorter."""

    path: str  # relative, with "/"
    nbytes: int
    digests: tuple[bytes, ...]  # SHA-256
    descriptor: Descriptor | None  # None: an empty file


class Listing(msgspec.Struct, frozen=True, kw_only=True, tag="folder"):
    """The files of a folder, each once."""

    name: str
    files: tuple[File, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(f.nbytes for f in self.files)

    def encode(self) -> bytes:
        """As it is registered and digested."""
        return msgspec.msgpack.encode(self)


def decode(encoded: bytes | memoryview, digest: bytes) -> Listing:
    """The listing that a ticket's digest names. Raises `ChecksumMismatch`, or `DataError` for one that would write
    outside its folder or contradicts itself."""
    if hashlib.sha256(encoded).digest() != digest:
        raise ChecksumMismatch("the listing that came is not the one the ticket names; get a new ticket and pull again")
    try:
        listing = msgspec.msgpack.decode(encoded, type=Listing)
    except msgspec.DecodeError as e:
        raise DataError(f"the listing does not decode: {e}; is the server another version of Gyre?") from e
    taken: set[PurePosixPath] = set()
    for file in listing.files:
        path = PurePosixPath(file.path)
        if not _safe(file.path, path) or path in taken:
            raise DataError(f"the listing names a file {file.path!r}, which is not one inside the folder; refused")
        pieces = -(-file.nbytes // PIECE)
        described = 0 if file.descriptor is None else file.descriptor.nbytes
        if file.nbytes < 0 or len(file.digests) != pieces or described != file.nbytes:
            raise DataError(f"the listing contradicts itself at {file.path!r}; refused")
        taken.add(path)
    if len(taken) > MOST_FILES or any(parent in taken for path in taken for parent in path.parents):
        raise DataError("the listing names too many files, or a file as a folder; refused")
    return listing


def _safe(text: str, path: PurePosixPath) -> bool:
    plain = text == str(path) and "\0" not in text and "\\" not in text
    return plain and bool(path.name) and not path.is_absolute() and ".." not in path.parts


class Ticket(msgspec.Struct, frozen=True, kw_only=True, tag="gyre-ticket"):
    """The right to pull a folder. Whoever has it can: as a file it has mode 0600."""

    name: str
    nbytes: int  # of all files together
    listing: Descriptor
    digest: bytes  # SHA-256 of the listing
    version: int = 1

    def encode(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self) + b"\n"

    def write(self, path: str | Path) -> None:
        """Write to `path`, mode 0600, at once or not at all; another ticket there is replaced. Raises `TicketError`."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            if path.exists() and not _is_ticket(path.read_bytes()):
                raise TicketError(f"{str(path)!r} is there and is no ticket; name another file for the ticket")
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(self.encode())
            partial.replace(path)
        except OSError as e:
            raise TicketError(f"cannot write the ticket {str(path)!r}: {e.strerror}; name another file") from e
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> Ticket:
        """Read what `write` wrote. Raises `TicketError`: no such file, readable by others, no ticket."""
        path = Path(path)
        try:
            mode = path.stat().st_mode & 0o777
            text = path.read_bytes()
        except OSError as e:
            raise TicketError(f"cannot read the ticket {str(path)!r}: {e.strerror}; check the path") from e
        if mode & 0o077:
            raise TicketError(f"the ticket {str(path)!r} has mode {mode:04o}, expected 0600; run `chmod 600` on it")
        return Ticket.decode(text, repr(str(path)))

    @staticmethod
    def decode(text: bytes, where: str) -> Ticket:
        """Read a ticket's text, from `where`. Raises `TicketError`."""
        try:
            ticket = msgspec.json.decode(text, type=Ticket)
        except msgspec.DecodeError:
            raise TicketError(  # without the cause: it may quote the ticket
                f"{where} is no ticket; `gyre-transport snapshot serve` writes one, whole and on one line"
            ) from None
        if ticket.version != 1:
            raise TicketError(
                f"{where} is a ticket of version {ticket.version}, this Gyre reads version 1; install the same version "
                "on both machines"
            )
        return ticket


def _is_ticket(text: bytes) -> bool:
    try:
        Ticket.decode(text, "")
    except TicketError:
        return False
    return True
