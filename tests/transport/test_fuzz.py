"""Bytes from anywhere at the sockets themselves: the bus's, and the data plane's handshake.

They are refused, and whoever speaks the protocol is served as before. GYRE_TEST_MANY=1 sends more of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import resource
import socket
import threading

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_transport import framing
from gyre_transport.bus import Client, Server, Subscriber
from gyre_transport.descriptor import network
from gyre_transport.errors import BusError, DataError, ProtocolError, RemoteError
from gyre_transport.memory import allocate, read

LONG = 60.0
FRAMES = 10_000 if os.environ.get("GYRE_TEST_MANY") else 4_000
STREAMS = 10_000 if os.environ.get("GYRE_TEST_MANY") else 1_500
ROOM = 64 << 10  # KiB the process may grow by


class Put(msgspec.Struct, frozen=True, tag="put"):
    key: str
    value: tuple[int, ...] = ()


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    count: int


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with bits flipped, cut short, or with noise in it."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = rng.randbytes(rng.randrange(20))
            case 3:
                changed[at : at + 8] = b"\xff" * rng.randrange(1, 9)
    return bytes(changed)


def _resident() -> int:
    """KiB the process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def test_a_bus_server_survives_whatever_comes(tmp_path):
    stored: dict[str, tuple[int, ...]] = {}

    async def put(request: Put) -> Stored:
        stored[request.key] = request.value
        return Stored(len(stored))

    rng = random.Random(1)
    header, payload = framing.header(Put), msgspec.msgpack.encode(Put("k", (1, 2, 3)))
    async with Server(f"ipc://{tmp_path}/s", Put, put) as server, Client(server.address, Stored) as client:
        raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(server.address)
        assert await client.call(Put("mine", (7,)), deadline=LONG) == Stored(1)
        before, answered = _resident(), 0

        async def listen() -> None:
            nonlocal answered
            while True:
                _, status, body = await raw.recv_multipart()
                if status == framing.ERROR:
                    msgspec.msgpack.decode(body, type=framing.Fault)
                answered += 1

        listening = asyncio.create_task(listen())
        sent = 0
        for number in range(FRAMES):
            whole = [number.to_bytes(8, "big"), header, payload]
            frames = [damaged(f, rng) if rng.random() < 0.5 else f for f in whole]
            if rng.random() < 0.1:
                frames = frames[: rng.randrange(1, 3)] if rng.random() < 0.5 else [*frames, *frames]
            sent += len(frames) > 1
            await raw.send_multipart(frames)
        async with asyncio.timeout(LONG):
            while answered < sent:
                await asyncio.sleep(0.01)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        raw.close()
        assert server.malformed == FRAMES - sent
        assert _resident() - before < ROOM
        assert stored["mine"] == (7,)
        assert all(isinstance(k, str) and all(isinstance(v, int) for v in values) for k, values in stored.items())
        assert (await client.call(Put("mine", (8,)), deadline=LONG)).count == len(stored)


async def test_clients_survive_what_a_server_says(tmp_path):
    rng = random.Random(2)
    fake = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    fake.setsockopt(zmq.LINGER, 0)
    fake.bind(f"ipc://{tmp_path}/s")
    good = msgspec.msgpack.encode(Stored(1))

    async def serve() -> None:
        while True:
            peer, number, _, _ = await fake.recv_multipart()
            status = rng.choice((framing.OK, framing.ERROR, rng.randbytes(3)))
            answer = [peer, *(damaged(f, rng) if rng.random() < 0.4 else f for f in (number, status, good))]
            await fake.send_multipart(answer[: rng.randrange(2, 5)] if rng.random() < 0.1 else answer)
            await fake.send_multipart([peer, number, framing.OK, good])

    serving = asyncio.create_task(serve())
    async with Client(f"ipc://{tmp_path}/s", Stored) as client:
        outcomes = {"ok": 0, "error": 0}
        for _ in range(2_000):
            try:
                assert isinstance(await client.call(Put("k"), deadline=LONG), Stored)
                outcomes["ok"] += 1
            except (ProtocolError, RemoteError):
                outcomes["error"] += 1
        assert min(outcomes.values()) > 100
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    fake.close()


async def test_subscribers_survive_what_is_published(tmp_path):
    rng = random.Random(3)
    fake = zmq.asyncio.Context.instance().socket(zmq.PUB)
    fake.setsockopt(zmq.LINGER, 0)
    fake.bind(f"ipc://{tmp_path}/p")
    header, good = framing.header(Stored), msgspec.msgpack.encode(Stored(1))
    async with Subscriber(f"ipc://{tmp_path}/p", Stored, silence=LONG) as subscriber:
        async with asyncio.timeout(LONG):
            while not await subscriber._socket.poll(10):
                await fake.send_multipart([header, good])
        for _ in range(2_000):
            frames = [damaged(f, rng) if rng.random() < 0.5 else f for f in (header, good)]
            await fake.send_multipart(frames[: rng.randrange(1, 3)])
            await fake.send_multipart([header, good])
            with contextlib.suppress(ProtocolError):
                assert isinstance(await subscriber.receive(), Stored)
    fake.close()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_any_frames_are_a_reply_or_a_protocol_error(frames):
    try:
        number, reply = framing.unpack(frames, msgspec.msgpack.Decoder(Stored))
    except ProtocolError:
        return
    assert 0 <= number < 1 << 64
    assert isinstance(reply, Stored | BusError)


# --- the data plane ------------------------------------------------------------------------------------------------


class Recorder:
    """A relay in front of a region's owner that keeps what each side said."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.said = {"client": bytearray(), "server": bytearray()}
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(self._to) as far:

            def pump(source: socket.socket, sink: socket.socket, side: str) -> None:
                with contextlib.suppress(OSError):
                    while piece := source.recv(1 << 16):
                        self.said[side] += piece
                        sink.sendall(piece)
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_RDWR)

            back = threading.Thread(target=pump, args=(far, near, "server"))
            back.start()
            pump(near, far, "client")
            back.join(LONG)

    def close(self) -> None:
        self._thread.join(LONG)
        self._listener.close()


def _recorded(region) -> dict[str, bytes]:
    """What a read of `region` over tcp says, each way."""
    from gyre_transport.backends import tcp

    where = region.descriptor.endpoint
    relay = Recorder((where.host, where.port))
    elsewhere = msgspec.structs.replace(where, port=relay.port, network=network())
    read(msgspec.structs.replace(region.descriptor, endpoint=elsewhere), bytearray(100), deadline=LONG, via="tcp")
    tcp.disconnect()
    relay.close()
    return {side: bytes(said) for side, said in relay.said.items()}


def test_an_owner_survives_whatever_comes():
    """Recorded, damaged, sent: nothing is served to it, and readers notice nothing."""
    rng = random.Random(4)
    with allocate(100) as region:
        region.array()[:] = 7
        where = region.descriptor.endpoint
        said = _recorded(region)["client"]
        before = _resident()
        for number in range(STREAMS):
            data = damaged(said, rng) if rng.random() < 0.9 else rng.randbytes(rng.randrange(300))
            with socket.create_connection((where.host, where.port), timeout=LONG) as peer:  # noqa: SIM117
                with contextlib.suppress(OSError):  # it may close before it has heard all
                    peer.sendall(data)
                    peer.shutdown(socket.SHUT_WR)
                    got = bytearray()
                    while piece := peer.recv(1 << 16):
                        got += piece
                    assert b"\x07" * 16 not in got
                    assert len(got) < 1 << 10
            if number % 100 == 0:
                into = bytearray(100)
                read(region.descriptor, into, deadline=LONG, via="tcp")
                assert into == b"\x07" * 100
        assert _resident() - before < ROOM
        assert region.array().tolist() == [7] * 100


def test_a_reader_survives_whatever_it_is_told():
    """A damaged answer is an error within the deadline, and never taken for the region's bytes."""
    rng = random.Random(5)
    with allocate(100) as region:
        region.array()[:] = 7
        said = _recorded(region)["server"]
        listener = socket.create_server(("127.0.0.1", 0))
        endpoint = msgspec.structs.replace(region.descriptor.endpoint, port=listener.getsockname()[1])
        there = msgspec.structs.replace(region.descriptor, endpoint=endpoint)

        def serve(count: int) -> None:
            for _ in range(count):
                peer, _ = listener.accept()
                with peer, contextlib.suppress(OSError):
                    peer.recv(1 << 10)
                    peer.sendall(damaged(said, rng))

        count = STREAMS // 3
        thread = threading.Thread(target=serve, args=(count,))
        thread.start()
        for _ in range(count):
            with pytest.raises(DataError):
                read(there, bytearray(100), deadline=5.0, via="tcp")
        thread.join(LONG)
        listener.close()
