"""The owner's end: memory lent to the engine, from the first reader that has proven its key until it is revoked.

reader                                   owner
LOCATE                             ──▶   key proven; memory lent to the engine
                                   ◀──   Place | Declined
reads through the engine                 takes no part
LOCATE                             ──▶   key proven
                                   ◀──   the same Place: what was read is valid
"""

from __future__ import annotations

import logging
import secrets
import threading
import traceback

import msgspec
import numpy as np

from gyre_transport.backends.mooncake.engine import Engine, engine
from gyre_transport.buffers import view
from gyre_transport.control import Export
from gyre_transport.errors import DataError
from gyre_transport.run import TransportConfig

log = logging.getLogger(__name__)

TOKEN_BYTES = 16


class Place(msgspec.Struct, frozen=True, kw_only=True, tag="place"):
    """Where the engine finds one grant's memory."""

    segment: str
    address: int
    token: bytes  # of this process; whoever reads it at `token_address` reads from this process
    token_address: int


class Declined(msgspec.Struct, frozen=True, kw_only=True, tag="declined"):
    """Not through the engine, and why."""

    reason: str


def decode(answer: bytes) -> Place | Declined:
    """Raises `msgspec.DecodeError` for what is no answer."""
    return msgspec.msgpack.decode(answer, type=Place | Declined)


class Lender:
    """Everything this process lends to its engine."""

    def __init__(self, config: TransportConfig, host: str) -> None:
        """host: address that others reach this machine at."""
        self._lock = threading.RLock()  # a region that is collected while another is lent is withdrawn in between
        self._lent: dict[Export, Place] = {}
        self._token = np.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), np.uint8)
        self._engine: Engine | None = None
        if "mooncake" not in config.backends:
            return
        try:
            found = engine(host)
            if found.host != host:
                raise DataError(f"it was started for {found.host}, and would have to be for {host}")
            found.lend(self._token.ctypes.data, TOKEN_BYTES)
            self._engine = found
        except DataError as e:
            log.warning("Mooncake's engine, named in transport.backends, serves nothing: %s", str(e))

    @property
    def lends(self) -> bool:
        """Whether readers may come through the engine."""
        return self._engine is not None

    def locate(self, export: Export) -> bytes:
        """Answer a reader that has proven the key of `export`.

        The caller looks afterwards whether the grant still stands, and withdraws it if not.
        """
        try:
            with self._lock:
                place = self._lent.get(export)
                if place is None:
                    place = self._lent[export] = self._lend(export)
                return msgspec.msgpack.encode(place)
        except DataError as e:
            return msgspec.msgpack.encode(Declined(reason=str(e)))
        except Exception:  # of a library that says little about what it raises; the others are served on
            log.error("a reader by Mooncake could not be answered: %s", traceback.format_exc())
            return msgspec.msgpack.encode(Declined(reason="the owner failed; its log says more"))

    def _lend(self, export: Export) -> Place:
        if self._engine is None:
            raise DataError("the owner does not name mooncake in its transport.backends")
        address = view(export.memory).address if export.memory.nbytes else 0
        if address:
            if any(place.address == address for place in self._lent.values()):
                raise DataError("the memory is registered twice, and Mooncake tells memory apart by its address only")
            self._engine.lend(address, export.memory.nbytes)
        return Place(
            segment=self._engine.segment,
            address=address,
            token=self._token.tobytes(),
            token_address=self._token.ctypes.data,
        )

    def withdraw(self, export: Export) -> None:
        """Take the memory of `export` back. Nothing if it was not lent."""
        with self._lock:
            place = self._lent.pop(export, None)
            if place is not None and place.address and self._engine is not None:
                self._engine.take_back(place.address)

    def close(self) -> None:
        """Take everything back."""
        with self._lock:
            for export in list(self._lent):
                self.withdraw(export)
            if self._engine is not None:
                self._engine.take_back(self._token.ctypes.data)
                self._engine = None
