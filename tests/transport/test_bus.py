"""The bus over real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

from gyre_transport import framing, publish, sockets
from gyre_transport.bus import BlockingClient, Client, Publisher, Server, Subscriber
from gyre_transport.errors import BusError, DeadlineExceeded, ProtocolError, PublisherSilent, RemoteError

LONG = 60.0  # seconds: it fails, but never because a machine is slow


class Add(msgspec.Struct, frozen=True, tag="add"):
    a: int
    b: int


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    kind: str


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    value: int


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


Request = Add | Fail
Reply = Sum | Text


class Refused(Exception):
    pass


async def handle(request: Request) -> Reply:
    match request:
        case Add(a, b):
            return Sum(a + b) if a >= 0 else Text("negative")
        case Fail("refused"):
            raise Refused("not today")
        case Fail("busy"):
            raise BusError("busy")
        case _:
            return object()  # does not encode


@pytest.fixture(params=["ipc", "tcp"])
def address(request, tmp_path) -> str:
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"


async def until(condition) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.005)


async def test_unions_go_both_ways(address):
    async with Server(address, Request, handle) as server, Client(server.address, Reply) as client:
        assert not server.address.endswith(":0")
        assert await client.call(Add(1, 2), deadline=LONG) == Sum(3)
        assert await client.call(Add(-1, 2), deadline=LONG) == Text("negative")


async def test_a_thread_without_an_event_loop_calls_too(address):
    async with Server(address, Request, handle) as server:

        def use() -> list:
            with BlockingClient(server.address, Reply) as client:
                got = [client.call(Add(n, 1), deadline=LONG) for n in range(3)]
                with pytest.raises(RemoteError) as error:
                    client.call(Fail("refused"), deadline=LONG)
                return [*got, error.value.kind]

        assert await asyncio.to_thread(use) == [Sum(1), Sum(2), Sum(3), "Refused"]


async def test_many_calls_in_flight_get_their_own_answers(address):
    gate = asyncio.Event()

    async def backwards(request: Add) -> Sum:
        if request.a == 199:
            gate.set()
        await gate.wait()
        return Sum(request.a)

    async with Server(address, Request, backwards) as server, Client(server.address, Reply) as client:
        answers = await asyncio.gather(*(client.call(Add(n, 0), deadline=LONG) for n in range(200)))
        assert [a.value for a in answers] == list(range(200))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [("refused", "Refused", "not today"), ("busy", "BusError", "busy"), ("x", "TypeError", "object")],
)
async def test_a_handlers_exception_reaches_the_caller_and_the_server_goes_on(address, kind, name, message):
    async with Server(address, Request, handle) as server, Client(server.address, Reply) as client:
        with pytest.raises(RemoteError, match=message) as error:
            await client.call(Fail(kind), deadline=LONG)
        assert error.value.kind == name
        assert await client.call(Add(1, 2), deadline=LONG) == Sum(3)


async def test_nobody_there(tmp_path):
    nowhere = f"ipc://{tmp_path}/nobody"
    async with Client(nowhere, Reply) as client:
        with pytest.raises(DeadlineExceeded, match=r"Add to 'ipc://.*/nobody'"):
            await client.call(Add(1, 2), deadline=0.05)
    with BlockingClient(nowhere, Reply) as blocking, pytest.raises(DeadlineExceeded, match="Add"):
        await asyncio.to_thread(blocking.call, Add(1, 2), deadline=0.05)


async def test_a_late_reply_is_counted_and_not_taken_for_another(address):
    gate = asyncio.Event()

    async def slow(request: Add) -> Sum:
        if request.a == 1:
            await gate.wait()
        return Sum(request.a)

    async with Server(address, Request, slow) as server, Client(server.address, Reply) as client:
        with pytest.raises(DeadlineExceeded):
            await client.call(Add(1, 0), deadline=0.1)
        gate.set()
        assert await client.call(Add(2, 0), deadline=LONG) == Sum(2)
        await until(lambda: client.late == 1)


async def test_a_blocking_client_skips_a_late_reply(address):
    gate = asyncio.Event()

    async def slow(request: Add) -> Sum:
        if request.a == 1:
            await gate.wait()
        return Sum(request.a)

    def use(address: str, loop: asyncio.AbstractEventLoop) -> object:
        with BlockingClient(address, Reply) as client:
            with pytest.raises(DeadlineExceeded):
                client.call(Add(1, 0), deadline=0.1)
            loop.call_soon_threadsafe(gate.set)
            return client.call(Add(2, 0), deadline=LONG)

    async with Server(address, Request, slow) as server:
        assert await asyncio.to_thread(use, server.address, asyncio.get_running_loop()) == Sum(2)


async def test_no_more_handlers_run_than_allowed(address):
    running, most, gate = 0, 0, asyncio.Event()

    async def count(request: Add) -> Sum:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return Sum(request.a)

    async with Server(address, Request, count, max_in_flight=2) as server, Client(server.address, Reply) as client:
        calls = [asyncio.create_task(client.call(Add(n, 0), deadline=LONG)) for n in range(9)]
        await until(lambda: running == 2)
        gate.set()
        await asyncio.gather(*calls)
        assert most == 2


async def test_closing_a_client_ends_its_calls_with_an_error(address):
    async def never(_: Add) -> Sum:
        await asyncio.Event().wait()
        raise AssertionError

    async with Server(address, Request, never) as server:
        client = Client(server.address, Reply)
        call = asyncio.create_task(client.call(Add(1, 2), deadline=LONG))
        await until(lambda: client._waiting)
        await client.close()
        with pytest.raises(BusError, match="closed before the answer"):
            await call


async def test_a_client_survives_its_servers_death(script, tmp_path):
    address = f"ipc://{tmp_path}/s"
    first = script("bus_server.py", address)
    first.receive()
    async with Client(address, Reply) as client:
        assert await client.call(Add(1, 2), deadline=LONG) == Sum(3)
        first.kill()
        with pytest.raises(DeadlineExceeded):
            await client.call(Add(1, 2), deadline=0.1)
        second = script("bus_server.py", address)  # the dead one left its socket file
        second.receive()
        assert await client.call(Add(2, 2), deadline=LONG) == Sum(4)


async def test_a_server_is_restarted_in_place(tmp_path):
    address = f"ipc://{tmp_path}/s"
    async with Client(address, Reply) as client:
        for n in range(20):
            async with Server(address, Request, handle), asyncio.timeout(LONG):
                while True:
                    try:
                        assert await client.call(Add(n, 1), deadline=0.5) == Sum(n + 1)
                        break
                    except DeadlineExceeded:
                        continue  # it was on its way to the server before, or the machine is slow


async def test_an_address_in_use_is_an_error_and_the_holder_keeps_it(tmp_path):
    async with Server(f"ipc://{tmp_path}/s", Request, handle) as server, Client(server.address, Reply) as client:
        for thief in (Server(server.address, Request, handle), Publisher(server.address)):
            with pytest.raises(BusError, match="choose another address"):
                await thief.start()
        assert await client.call(Add(1, 2), deadline=LONG) == Sum(3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BusError, match="choose another address"):
            await Server(f"tcp://127.0.0.1:{taken.getsockname()[1]}", Request, handle).start()
    for wrong in (f"ipc://{tmp_path}/{'x' * 120}", f"ipc://{tmp_path}/no/such/folder", "nonsense"):
        with pytest.raises(BusError):
            await Server(wrong, Request, handle).start()


async def test_bytes_that_do_not_decode_are_refused_by_the_server(address, caplog):
    async with Server(address, Request, handle) as server, Client(server.address, Reply) as client:
        raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(server.address)
        try:
            for payload in (b"\xc1", b"", os.urandom(64), msgspec.msgpack.encode({"type": "unknown"})):
                await raw.send_multipart([b"\x01", framing.header(None), payload])
                async with asyncio.timeout(LONG):
                    request_id, status, body = await raw.recv_multipart()
                assert (request_id, status) == (b"\x01", b"error")
                assert msgspec.msgpack.decode(body, type=framing.Fault).kind == "ProtocolError"
            with caplog.at_level(logging.ERROR):
                await raw.send_multipart([b"alone"])
                await until(lambda: "expected [peer, id, header, request]" in caplog.text)
        finally:
            raw.close()
        assert await client.call(Add(1, 2), deadline=LONG) == Sum(3)


async def test_replies_that_do_not_decode_fail_the_call_and_not_the_client(address):
    fake = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    fake.setsockopt(zmq.LINGER, 0)
    fake.bind(address)
    endpoint = fake.getsockopt_string(zmq.LAST_ENDPOINT)
    answers = [
        [b"ok", b"\xc1"],
        [b"ok", msgspec.msgpack.encode({"type": "unknown"})],
        [b"error", b"\xc1"],
        [b"maybe", b""],
    ]

    async def serve() -> None:
        for answer in answers:
            peer, request_id, _, _ = await fake.recv_multipart()
            await fake.send_multipart([peer, b"too few"])
            await fake.send_multipart([peer, request_id, *answer])
        peer, request_id, _, _ = await fake.recv_multipart()
        await fake.send_multipart([peer, request_id, b"ok", msgspec.msgpack.encode(Sum(1))])

    server = asyncio.create_task(serve())
    try:
        async with Client(endpoint, Reply) as client:
            for _ in answers:
                with pytest.raises(ProtocolError, match="another version"):
                    await client.call(Add(1, 2), deadline=LONG)
            assert await client.call(Add(1, 2), deadline=LONG) == Sum(1)
    finally:
        server.cancel()
        fake.close()


async def test_what_is_too_large_is_not_sent(address, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_BYTES", 1 << 16)

    async def much(request: Fail) -> Text:
        return Text("x" * (1 << 17)) if request.kind == "much" else Text("little")

    async with Server(address, Fail, much) as server, Client(server.address, Reply) as client:
        with pytest.raises(BusError, match=r"131,\d+ bytes, a message at most 65,536; send it in parts"):
            await client.call(Fail("x" * (1 << 17)), deadline=LONG)
        with pytest.raises(RemoteError, match=r"Text for .* at most 65,536"):
            await client.call(Fail("much"), deadline=LONG)
        assert await client.call(Fail("little"), deadline=LONG) == Text("little")
        with BlockingClient(server.address, Reply) as blocking, pytest.raises(BusError, match="at most 65,536"):
            blocking.call(Fail("x" * (1 << 17)), deadline=LONG)


async def test_who_sends_too_much_all_the_same_is_disconnected_and_the_server_goes_on(address, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sockets, "MAX_BYTES", 1 << 16)
        server = Server(address, Fail, handle)
        await server.start()
    async with Client(server.address, Reply) as client:
        with pytest.raises(DeadlineExceeded):
            await client.call(Fail("x" * (1 << 17)), deadline=0.3)
    async with Client(server.address, Reply) as client:
        with pytest.raises(RemoteError, match="not today"):
            await client.call(Fail("refused"), deadline=LONG)
    await server.close()


async def test_an_address_that_is_none():
    for wrong in ("nonsense", "tcp://127.0.0.1:port"):
        with pytest.raises(BusError, match="cannot connect"):
            BlockingClient(wrong, Reply)
        with pytest.raises(BusError, match="cannot connect"):
            await Client(wrong, Reply).call(Add(1, 2), deadline=LONG)


# --- publish/subscribe ---------------------------------------------------------------------------------------------


async def test_subscribers_get_what_is_published(address):
    async with Publisher(address, heartbeat=0.01) as publisher:
        first, second = (Subscriber(publisher.address, Reply, silence=LONG) for _ in range(2))
        await first.connected(LONG)
        await second.connected(LONG)
        for n in range(100):
            await publisher.publish(Sum(n))
        await publisher.publish(Text("end"))
        for subscriber in (first, second):
            got = [await subscriber.receive() for _ in range(101)]
            assert got == [*(Sum(n) for n in range(100)), Text("end")]
            await subscriber.close()


async def test_a_silent_publisher_is_an_error_until_it_is_back(tmp_path):
    address = f"ipc://{tmp_path}/p"
    subscriber = Subscriber(address, Reply, silence=0.1)
    with pytest.raises(PublisherSilent, match=r"silent for 0\.1 s"):
        await subscriber.receive()
    with pytest.raises(DeadlineExceeded):
        await subscriber.connected(0.01)
    async with Publisher(address, heartbeat=0.01) as publisher:
        await subscriber.connected(LONG)
        await publisher.publish(Sum(1))

        async def received() -> object:
            while True:
                try:
                    return await subscriber.receive()
                except PublisherSilent:
                    continue  # a slow machine

        async with asyncio.timeout(LONG):
            assert await received() == Sum(1)
    await subscriber.close()


async def test_heartbeats_break_the_silence(address, monkeypatch):
    waits, plain = [], asyncio.timeout

    def timeout(seconds):
        waits.append(seconds)
        return plain(seconds)

    async with Publisher(address, heartbeat=0.01) as publisher:
        subscriber = Subscriber(publisher.address, Reply, silence=LONG)
        await subscriber.connected(LONG)
        monkeypatch.setattr(publish.asyncio, "timeout", timeout)
        receiving = asyncio.create_task(subscriber.receive())
        end = time.monotonic() + LONG
        while len(waits) < 5 and time.monotonic() < end:  # each heartbeat starts the wait anew
            await asyncio.sleep(0.005)
        assert len(waits) >= 5
        await publisher.publish(Sum(1))
        assert await receiving == Sum(1)
        await subscriber.close()


async def test_a_published_message_that_does_not_decode(address):
    class Other(msgspec.Struct, frozen=True, tag="other"):
        x: int

    async with Publisher(address, heartbeat=0.01) as publisher:
        subscriber = Subscriber(publisher.address, Reply, silence=LONG)
        await subscriber.connected(LONG)
        await publisher.publish(Other(1))
        await publisher.publish(Sum(2))
        with pytest.raises(ProtocolError, match="does not decode"):
            await subscriber.receive()
        assert await subscriber.receive() == Sum(2)
        await subscriber.close()


async def test_publishing_needs_a_start(tmp_path):
    publisher = Publisher(f"ipc://{tmp_path}/p")
    with pytest.raises(BusError, match="start"):
        await publisher.publish(Sum(1))
    async with publisher:
        await publisher.publish(Sum(1))  # nobody listens: dropped
