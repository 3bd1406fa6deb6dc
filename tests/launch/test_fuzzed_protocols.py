"""Bytes from anywhere at every protocol of every package: a message of it, or `ProtocolError`, at once, in little room.

The frames are valid messages of each union, built from its types, then damaged: bits flipped, cut short, spliced,
lengths blown up, nested deeply; and plain noise. 2,000 of each by default, 10,000 with GYRE_TEST_MANY=1.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec
import pytest

import gyre_sched.protocol as sched
import gyre_train.protocol as feed
from gyre_traj import intake, records
from gyre_transport import framing, snapshot
from gyre_transport.errors import ProtocolError
from gyre_transport.kv import protocol as kv

FRAMES = 10_000 if os.environ.get("GYRE_TEST_MANY") else 2_000
UNIONS: dict[str, Any] = {
    "scheduler request": sched.Request,
    "scheduler reply": sched.Reply,
    "scheduler publication": sched.Publication,
    "agent request": sched.AgentRequest,
    "agent reply": sched.AgentReply,
    "feed request": feed.Request,
    "feed reply": feed.Reply,
    "intake request": intake.Request,
    "intake reply": intake.Reply,
    "call log record": records.Record,
    "kv request": kv.Request,
    "kv reply": kv.Reply,
    "manifest": snapshot.Manifest,
    "fault": framing.Fault,
}
HUGE = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\x7f")


def build(kind: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value of a message type, as msgpack would carry it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return build(args[0], rng, depth)
    if origin in (typing.Union, types.UnionType):
        return build(rng.choice(args), rng, depth)
    if origin is typing.Literal:
        return rng.choice(args)
    if origin in (tuple, list, set, frozenset):
        if origin is tuple and args[-1:] != (...,):
            return [build(a, rng, depth + 1) for a in args]
        return [build(args[0], rng, depth + 1) for _ in range(rng.randrange(3))]
    if origin is dict:
        return {build(args[0], rng, depth + 1): build(args[1], rng, depth + 1) for _ in range(rng.randrange(3))}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        config = kind.__struct_config__
        fields = {
            f.encode_name: build(f.type, rng, depth + 1)
            for f in msgspec.structs.fields(kind)
            if f.required or rng.random() < 0.7
        }
        return fields if config.tag is None else {config.tag_field: config.tag, **fields}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return rng.choice(list(kind)).value
    scalars: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice((0, 1, -1, 7, 2**31, 2**63 - 1, 2**64 - 1)),
        float: lambda: rng.choice((0.0, -1.5, 1e308, float("nan"), float("inf"))),
        bool: lambda: rng.random() < 0.5,
        str: lambda: rng.choice(("", "x", "cell-0", "\N{SNOWMAN}" * 9)),
        bytes: lambda: rng.randbytes(rng.choice((0, 4, 8, 16, 40))),
        type(None): lambda: None,
        Any: lambda: rng.choice((None, 1, "x", [], {})),
    }
    return scalars[kind]() if kind in scalars else rng.choice((None, 1, "x", b"x", [1]))


def damage(frame: bytes, rng: random.Random) -> bytes:
    """A frame that may not be one any more."""
    data = bytearray(frame)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(9))
            case 3:
                data[at : at + rng.randrange(5)] = rng.choice(HUGE)
            case 4:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
            case 5:
                data[at:at] = rng.choice((b"\x91", b"\x81\xa1x", b"\xdd\0\0\0\x01")) * rng.choice((3, 300, 3_000))
    return bytes(data)


@pytest.mark.parametrize("name", UNIONS)
def test_a_decoder_survives_whatever_comes(name: str) -> None:
    rng = random.Random(name)
    decoder = msgspec.msgpack.Decoder(UNIONS[name])
    whole = wrong = 0
    frames = [rng.randbytes(rng.randrange(200)) for _ in range(FRAMES // 10)]
    frames += [damage(msgspec.msgpack.encode(build(UNIONS[name], rng)), rng) for _ in range(FRAMES - len(frames))]
    tracemalloc.start()
    began = time.process_time()
    for frame in frames:
        try:
            framing.decode(decoder, frame, "a frame")
            whole += 1
        except ProtocolError:
            wrong += 1
    spent, (_, most) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert whole + wrong == FRAMES
    assert min(whole, wrong) > FRAMES / 100  # both are met, or this test shows little
    assert most < 4 << 20
    assert spent < 60
