"""What the ends of an RDMA connection tell each other, as a call over the tcp endpoint: the descriptor's key is proven
before the owner looks at an offer, and both messages are sealed with it.

    reader                                       owner
    queue pairs made
    CONNECT  Offer(side)                  ──▶    key proven; memory registered; queue pairs made and ready
                                          ◀──    Accept(side, address, rkey) | Decline(reason)
    queue pairs ready; one byte is read
    reads …                                      takes no part
"""

from __future__ import annotations

import re

import msgspec


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One end."""

    link: str  # link layer: "InfiniBand" | "Ethernet"
    gid: str  # eight words
    lid: int  # 0 on Ethernet
    mtu: int  # as ibv_mtu counts: 1 is 256 bytes, 5 is 4096
    serves: int  # reads at once that a queue pair answers
    queue_pairs: tuple[int, ...]  # their numbers
    psn: int  # first packet number of each


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """The reader's end."""

    side: Side


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag="accept"):
    """The owner's end, and where the memory is."""

    side: Side
    address: int
    rkey: int


class Decline(msgspec.Struct, frozen=True, kw_only=True, tag="decline"):
    """No RDMA to this memory, and why."""

    reason: str


MAX_QUEUE_PAIRS = 16
_GID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")


def encode(message: Offer | Accept | Decline) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(message)


def decode_offer(data: bytes) -> Offer:
    """Raises `msgspec.DecodeError` or `ValueError` for what is no offer."""
    offer = msgspec.msgpack.decode(data, type=Offer)
    side = offer.side
    if 1 <= len(side.queue_pairs) <= MAX_QUEUE_PAIRS:
        _checked(side)
        return offer
    raise ValueError(f"expected 1 to {MAX_QUEUE_PAIRS} queue pairs, got {len(side.queue_pairs)}")


def decode_answer(data: bytes) -> Accept | Decline:
    """Raises `msgspec.DecodeError` or `ValueError` for what is no answer."""
    answer = msgspec.msgpack.decode(data, type=Accept | Decline)
    if isinstance(answer, Accept):
        _checked(answer.side)
    return answer


def _checked(side: Side) -> None:
    """Raise `ValueError` for what no end is: the library below checks little."""
    numbers = all(0 <= n < 1 << 24 for n in (*side.queue_pairs, side.psn))
    fits = 1 <= side.mtu <= 5 and 0 <= side.serves < 256 and 0 <= side.lid < 1 << 16
    if not (numbers and fits and _GID.fullmatch(side.gid)):
        raise ValueError(f"not an end of an RDMA connection: {side!r}")
