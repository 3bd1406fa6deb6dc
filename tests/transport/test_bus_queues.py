"""What `bus` says of messages that nobody takes: each sentence of its docstring as a test."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import pytest
import zmq
import zmq.asyncio

from gyre_transport import framing, sockets
from gyre_transport.bus import BlockingClient, Client, Publisher, Server, Subscriber
from gyre_transport.errors import DeadlineExceeded

LONG = 60.0


class Number(msgspec.Struct, frozen=True, tag="number"):
    n: int
    padding: bytes = b""


async def echo(request: Number) -> Number:
    return request


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(sockets, "HIGH_WATER", 10)


async def test_requests_wait_for_a_server_up_to_the_high_water_mark(few, tmp_path):
    address = f"ipc://{tmp_path}/s"
    seen = []

    async def note(request: Number) -> Number:
        seen.append(request.n)
        return request

    async with Client(address, Number) as client:
        calls = [asyncio.create_task(client.call(Number(n), deadline=LONG)) for n in range(10)]
        for _ in range(3):
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded):  # there is no room: it waits for some, and was never sent
            await client.call(Number(-1), deadline=0.1)
        async with Server(address, Number, note):
            assert [(await c).n for c in calls] == list(range(10))
            assert (await client.call(Number(10), deadline=LONG)).n == 10
    assert -1 not in seen
    assert sorted(seen) == list(range(11))


async def test_a_blocking_call_without_room_ends_at_its_deadline(few, tmp_path):
    with BlockingClient(f"ipc://{tmp_path}/s", Number) as client:
        for n in range(12):
            with pytest.raises(DeadlineExceeded):
                await asyncio.to_thread(client.call, Number(n), deadline=0.02)


async def test_who_asks_and_does_not_listen_loses_replies_and_nobody_waits_for_it(few, tmp_path):
    async with Server(f"ipc://{tmp_path}/s", Number, echo) as server:
        deaf = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.RCVHWM, 10)
        deaf.connect(server.address)
        payload = msgspec.msgpack.encode(Number(0, bytes(64 << 10)))
        async with asyncio.timeout(LONG):
            while not server.undelivered:
                await deaf.send_multipart([bytes(8), framing.header(None), payload])
        async with Client(server.address, Number) as other:
            assert (await other.call(Number(1), deadline=LONG)).n == 1
        deaf.close()


async def test_more_requests_than_run_at_once_are_all_answered(tmp_path):
    async with (
        Server(f"ipc://{tmp_path}/s", Number, echo, max_in_flight=3) as server,
        Client(server.address, Number) as client,
    ):
        replies = await asyncio.gather(*(client.call(Number(n), deadline=LONG) for n in range(500)))
        assert [r.n for r in replies] == list(range(500))
        assert server.undelivered == 0


async def test_replies_to_a_caller_that_is_gone_are_dropped(tmp_path):
    gate, begun = asyncio.Event(), asyncio.Event()

    async def hold(request: Number) -> Number:
        begun.set()
        if request.n == 0:
            await gate.wait()
        return request

    async with Server(f"ipc://{tmp_path}/s", Number, hold) as server:
        leaver = Client(server.address, Number)
        call = asyncio.create_task(leaver.call(Number(0), deadline=LONG))
        await begun.wait()
        await leaver.close()
        assert await asyncio.gather(call, return_exceptions=True)
        gate.set()
        async with Client(server.address, Number) as other:
            assert (await other.call(Number(1), deadline=LONG)).n == 1
        assert server.malformed == 0
        assert server.undelivered in (0, 1)  # 0: it was on its way


async def test_who_does_not_keep_up_loses_messages_and_the_publisher_waits_for_nobody(few, tmp_path):
    async with Publisher(f"ipc://{tmp_path}/p", heartbeat=0.02) as publisher:
        slow = Subscriber(publisher.address, Number, silence=LONG)
        other = Subscriber(publisher.address, Number, silence=LONG)
        await slow.connected(LONG)
        await other.connected(LONG)

        async def go_on() -> None:
            while True:  # until there is room again
                await publisher.publish(Number(-1))
                await asyncio.sleep(0.01)

        async with asyncio.timeout(LONG):
            for n in range(500):
                await publisher.publish(Number(n, bytes(64 << 10)))
            going_on = asyncio.create_task(go_on())
            for subscriber in (slow, other):
                got = [(await subscriber.receive()).n]
                while got[-1] != -1:
                    got.append((await subscriber.receive()).n)
                first = [n for n in got if n >= 0]
                assert first == sorted(set(first))  # in order, none twice
                assert 0 < len(first) < 500
                await subscriber.close()
            going_on.cancel()


def test_libzmq_keeps_no_heartbeats():
    """Their timeout ends the process (an assertion of libzmq 4.3.5) when a socket that was full for long is read."""
    dialer = sockets.Dialer(zmq.Context.instance(), zmq.SUB, "tcp://127.0.0.1:1")
    assert dialer.socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
    assert dialer.socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
    dialer.close()


async def test_what_was_published_before_a_subscriber_came_is_not_kept(tmp_path):
    async with Publisher(f"ipc://{tmp_path}/p", heartbeat=0.01) as publisher:
        for n in range(100):
            await publisher.publish(Number(n))
        subscriber = Subscriber(publisher.address, Number, silence=LONG)
        await subscriber.connected(LONG)
        await publisher.publish(Number(-1))
        assert (await subscriber.receive()).n == -1
        await subscriber.close()


async def test_a_server_forgets_peers_that_left(tmp_path):
    async with Server(f"ipc://{tmp_path}/s", Number, echo) as server:
        for n in range(30):
            async with Client(server.address, Number) as client:
                assert (await client.call(Number(n), deadline=LONG)).n == n
        gc.collect()
        assert not server._tasks
