"""What goes over a tcp connection of the data plane. Integers are big-endian.

    client                                               server
    HELLO    magic version nonce                  ──▶
                                                  ◀──    WELCOME  magic version status nonce generation
    REQUEST  kind count slot proof, then a body   ──▶    (several may be under way)
                                                  ◀──    ANSWER   status number nbytes, if OK: the bytes, then a seal

A READ's body is `count` stretches: each some rows of equal length, `stride` bytes apart; its answer is their bytes, one
after another. A CALL's body is `count` bytes for whoever handles calls on that memory (`control.Export`), and so is its
answer. A CONNECT and a LOCATE are CALLs that the server itself handles: `verbs.handshake` and `mooncake.owner` say how.

A proof is a MAC of the request under the descriptor's secret; the secret itself never travels. It covers both nonces
and the request's number, so what was overheard cannot be sent again. A seal is the server's MAC of the proof and of a
call's answer; a read's is sent after the last byte was handed to the kernel, if the secret still stood then: the owner
answered, and the bytes it sent are the registered ones. Neither encrypts, nor guards a read's bytes on their way: that
takes a network nobody else is on.

A refusal is an ANSWER with another status and nothing after it; the server answers nothing more on that connection.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from enum import IntEnum

MAGIC, VERSION = b"GYRE", 2
NONCE_BYTES = MAC_BYTES = GENERATION_BYTES = 16
HELLO = struct.Struct("!4sH16s")
WELCOME = struct.Struct("!4sHB16s16s")
REQUEST = struct.Struct("!BxHI16s")
STRETCH = struct.Struct("!QIIQ")
ANSWER = struct.Struct("!B3xIQ")
MAX_LENGTH = 64 << 20  # bytes a request may ask for
MAX_STRETCHES = 256  # of a read
MAX_CALL = 8 << 10  # bytes of a call, and of its answer
MAX_WAITING = 64  # requests a client may have under way on one connection

_NUMBERED = struct.Struct("!IBHI")


class Kind(IntEnum):
    """Of a REQUEST."""

    READ = 1
    CALL = 2
    CONNECT = 3
    LOCATE = 4


class Status(IntEnum):
    """Of a WELCOME (OK, BUSY) or an ANSWER (all others)."""

    OK = 0
    BUSY = 1  # as many connections as allowed
    STALE = 2  # the secret opens nothing (any more)
    OUTSIDE = 3  # not within the region
    REFUSED = 4  # nobody handles calls on that memory, or the handler failed


def nonce() -> bytes:
    """Return fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, nonces: bytes, number: int, kind: int, count: int, slot: int, body: bytes) -> bytes:
    """MAC of a request; `nonces`: the client's, then the server's."""
    mac = hashlib.blake2b(nonces, key=secret, digest_size=MAC_BYTES, person=b"gyre request")
    mac.update(_NUMBERED.pack(number, kind, count, slot) + body)
    return mac.digest()


def seal(secret: bytes, proof: bytes, answer: bytes = b"") -> bytes:
    """MAC of a complete answer to the request with that proof. answer: of a call; b"" for a read."""
    return hashlib.blake2b(proof + answer, key=secret, digest_size=MAC_BYTES, person=b"gyre answer").digest()
