"""What goes over a tcp connection of the data plane. Integers are big-endian.

    client                                        server
    HELLO    magic version nonce         ──▶
                                         ◀──      WELCOME  magic version status nonce generation
    REQUEST  slot offset length proof    ──▶      (several may be under way)
                                         ◀──      ANSWER   status number, then if OK: the bytes, then a seal

A proof is a MAC of the request under the descriptor's secret; the secret itself never travels. It covers both nonces
and the request's number, so what was overheard cannot be sent again. A seal is the server's MAC of the same, sent after
the last byte was handed to the kernel, if the secret still stood then: the owner answered, and the bytes it sent are
the registered ones. Neither encrypts, nor guards the bytes on their way: that takes a network nobody else is on.

A refusal is an ANSWER with another status and nothing after it; the server answers nothing more on that connection.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from enum import IntEnum

MAGIC, VERSION = b"GYRE", 1
NONCE_BYTES = MAC_BYTES = GENERATION_BYTES = 16
HELLO = struct.Struct("!4sH16s")
WELCOME = struct.Struct("!4sHB16s16s")
REQUEST = struct.Struct("!IQQ16s")
ANSWER = struct.Struct("!B3xI")
MAX_LENGTH = 64 << 20  # bytes a request may ask for
MAX_WAITING = 64  # requests a client may have under way on one connection

_BODY = struct.Struct("!IIQQ")


class Status(IntEnum):
    """Of a WELCOME (OK, BUSY) or an ANSWER (OK, STALE, OUTSIDE)."""

    OK = 0
    BUSY = 1  # as many connections as allowed
    STALE = 2  # the secret opens nothing (any more)
    OUTSIDE = 3  # not within the region


def nonce() -> bytes:
    """Return fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, nonces: bytes, number: int, slot: int, offset: int, length: int) -> bytes:
    """MAC of a request; `nonces`: the client's, then the server's."""
    body = nonces + _BODY.pack(number, slot, offset, length)
    return hashlib.blake2b(body, key=secret, digest_size=MAC_BYTES, person=b"gyre request").digest()


def seal(secret: bytes, nonces: bytes, number: int, slot: int, offset: int, length: int) -> bytes:
    """MAC of a complete answer to that request."""
    body = nonces + _BODY.pack(number, slot, offset, length)
    return hashlib.blake2b(body, key=secret, digest_size=MAC_BYTES, person=b"gyre answer").digest()
