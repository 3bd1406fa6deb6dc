"""The bus: tagged msgspec messages over ZeroMQ.

Request/reply                                   Publish/subscribe
    Client ──[id, request]──▶ Server                Publisher ──[message | heartbeat]──▶ Subscriber
    Client ◀─[id, ok|error, reply]── Server

What happens to a message when the peer is gone (the numbers are in `gyre_transport.sockets`)
    request   stays queued, up to HIGH_WATER messages, while ZeroMQ reconnects. One that was already on its way to a
              server that ends is lost, or was carried out: `call` cannot tell, and raises `DeadlineExceeded` at its
              deadline. Requests that must not happen twice carry an identity.
    reply     dropped when the caller's deadline has passed (counted in `Client.late`).
    published dropped for a subscriber that is absent or more than HIGH_WATER messages behind. Publish whole states, or
              let the reader ask the server for what it missed.
Bounds: a server runs at most `max_in_flight` handlers and leaves further requests in the socket; messages over
MAX_BYTES are refused by the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from gyre_transport.errors import BusError, DeadlineExceeded, ProtocolError, PublisherSilent, RemoteError
from gyre_transport.sockets import bound, prepare, release

log = logging.getLogger(__name__)

_OK, _ERROR, _HEARTBEAT = b"ok", b"error", b"\x00heartbeat"


class Fault(msgspec.Struct, frozen=True):
    """What a failed handler sends back."""

    kind: str
    message: str


def _unpack(frames: list[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> tuple[int, Any]:
    """Return (request id, reply) of a reply's frames; raise what it says."""
    if len(frames) != 3:
        raise ProtocolError(f"expected a reply of 3 frames, got {len(frames)}; is the peer another version of Gyre?")
    request_id = int.from_bytes(frames[0], "big")
    try:
        if frames[1] == _OK:
            return request_id, decoder.decode(frames[2])
        fault = msgspec.msgpack.decode(frames[2], type=Fault)
        return request_id, RemoteError(fault.kind, fault.message)
    except msgspec.DecodeError as e:
        return request_id, ProtocolError(f"a reply does not decode: {e}; is the peer another version of Gyre?")


class Server:
    """Answer one protocol's requests on a ROUTER socket.

    `handler` gets a decoded request and returns a reply struct. An exception it raises travels back as `RemoteError`
    and is logged here; it never stops the server.
    """

    def __init__(
        self,
        address: str,
        requests: Any,
        handler: Callable[[Any], Awaitable[Any]],
        *,
        max_in_flight: int = 256,
    ) -> None:
        self.address = address
        self._decoder = msgspec.msgpack.Decoder(requests)
        self._encoder = msgspec.msgpack.Encoder()
        self._handler = handler
        self._slots = asyncio.Semaphore(max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._socket: zmq.asyncio.Socket | None = None

    async def start(self) -> None:
        """Bind and serve; `address` then holds the real endpoint (tcp port 0 is resolved). Raises `BusError`."""
        socket, self.address = bound(zmq.ROUTER, self.address)
        self._socket = socket
        self._loop_task = asyncio.create_task(self._loop(socket), name=f"bus server {self.address}")

    async def close(self) -> None:
        """Stop reading, cancel the handlers still running and close the socket."""
        tasks = [t for t in (self._loop_task, *self._tasks) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            await release(self._socket, self.address)
            self._socket = None

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _loop(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await self._slots.acquire()
            frames = await socket.recv_multipart()
            task = asyncio.create_task(self._answer(socket, frames))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (e := task.exception()) is not None:
            log.error("answering on %s failed", self.address, exc_info=e)

    async def _answer(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        if len(frames) != 3:
            log.error("%s: expected [peer, id, request], got %d frames; dropped", self.address, len(frames))
            return
        peer, request_id, payload = frames
        try:
            reply = await self._handler(self._decoder.decode(payload))
            status, body = _OK, self._encoder.encode(reply)
        except Exception as e:
            if not isinstance(e, BusError):
                log.warning("%s: a request failed: %s: %s", self.address, type(e).__name__, e, exc_info=True)
            status, body = _ERROR, self._encoder.encode(Fault(type(e).__name__, str(e)))
        await socket.send_multipart([peer, request_id, status, body])


class Client:
    """Call a `Server` from asyncio code; any number of calls may be in flight."""

    def __init__(self, address: str, replies: Any) -> None:
        self.address = address
        self.late = 0  # replies that came after their deadline
        self._decoder = msgspec.msgpack.Decoder(replies)
        self._encoder = msgspec.msgpack.Encoder()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._loop_task: asyncio.Task[None] | None = None

    async def call(self, request: Any, *, deadline: float) -> Any:
        """Send `request` and return the reply; `deadline` is in seconds from now.

        Raises `DeadlineExceeded`, `RemoteError` (the handler refused) or `ProtocolError`.
        """
        if self._socket is None:
            self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            prepare(self._socket)
            self._socket.connect(self.address)
            self._loop_task = asyncio.create_task(self._loop(self._socket), name=f"bus client {self.address}")
        request_id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            async with asyncio.timeout(deadline):
                await self._socket.send_multipart([request_id.to_bytes(8, "big"), self._encoder.encode(request)])
                return await future
        except TimeoutError:
            raise _expired(request, self.address, deadline) from None
        finally:
            self._waiting.pop(request_id, None)

    async def _loop(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            try:
                request_id, reply = _unpack(await socket.recv_multipart(), self._decoder)
            except ProtocolError as e:
                log.error("%s: %s", self.address, e)
                continue
            future = self._waiting.get(request_id)
            if future is None or future.done():
                self.late += 1
            elif isinstance(reply, BusError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    async def close(self) -> None:
        """Close the socket; calls still waiting raise `BusError`."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            self._loop_task = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BusError(f"the client of {self.address!r} was closed before the answer came"))
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class BlockingClient:
    """Call a `Server` from a thread that has no event loop, one call at a time; not shared between threads."""

    def __init__(self, address: str, replies: Any) -> None:
        self.address = address
        self._decoder = msgspec.msgpack.Decoder(replies)
        self._encoder = msgspec.msgpack.Encoder()
        self._ids = itertools.count(1)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        prepare(self._socket)
        self._socket.connect(address)

    def call(self, request: Any, *, deadline: float) -> Any:
        """As `Client.call`."""
        request_id = next(self._ids)
        end = time.monotonic() + deadline
        self._socket.setsockopt(zmq.SNDTIMEO, max(1, int(deadline * 1000)))
        try:
            self._socket.send_multipart([request_id.to_bytes(8, "big"), self._encoder.encode(request)])
        except zmq.Again:
            raise _expired(request, self.address, deadline) from None
        while (left := end - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(left * 1000))):
                break
            got, reply = _unpack(self._socket.recv_multipart(), self._decoder)
            if got != request_id:
                continue  # the late answer to a call that gave up
            if isinstance(reply, BusError):
                raise reply
            return reply
        raise _expired(request, self.address, deadline)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _expired(request: Any, address: str, deadline: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{type(request).__name__} to {address!r} got no answer in {deadline:g} s; is the process up? see its log"
    )


class Publisher:
    """Send messages to whoever listens; a heartbeat every `heartbeat` seconds tells subscribers it is alive."""

    def __init__(self, address: str, *, heartbeat: float = 1.0) -> None:
        self.address = address
        self._heartbeat = heartbeat
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind; `address` then holds the real endpoint. Raises `BusError`."""
        socket, self.address = bound(zmq.PUB, self.address)
        self._socket = socket
        self._task = asyncio.create_task(self._beat(), name=f"bus publisher {self.address}")

    async def publish(self, message: Any) -> None:
        """Send one message to all subscribers; never blocks on a slow one (it loses messages instead)."""
        if self._socket is None:
            raise BusError(f"publisher {self.address!r} was not started; await start() first")
        await self._socket.send(self._encoder.encode(message))

    async def _beat(self) -> None:
        while True:
            assert self._socket is not None  # noqa: S101  (set before the task starts)
            await self._socket.send(_HEARTBEAT)
            await asyncio.sleep(self._heartbeat)

    async def close(self) -> None:
        """Stop the heartbeat and close the socket."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            await release(self._socket, self.address)
            self._socket = None

    async def __aenter__(self) -> Publisher:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Subscriber:
    """Receive a publisher's messages; silence for longer than `silence` seconds is an error."""

    def __init__(self, address: str, messages: Any, *, silence: float = 10.0) -> None:
        self.address = address
        self._silence = silence
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        prepare(self._socket)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    async def receive(self) -> Any:
        """Return the next message. Raises `PublisherSilent` or `ProtocolError`; may be called again after either."""
        while True:
            try:
                async with asyncio.timeout(self._silence):
                    payload = await self._socket.recv()
            except TimeoutError:
                raise PublisherSilent(
                    f"{self.address!r} was silent for {self._silence:g} s; is the process up? see its log"
                ) from None
            if payload == _HEARTBEAT:
                continue
            try:
                return self._decoder.decode(payload)
            except msgspec.DecodeError as e:
                raise ProtocolError(f"{self.address!r} sent a message that does not decode: {e}") from e

    async def connected(self, deadline: float) -> None:
        """Wait until the publisher is heard once (a message waiting is not consumed). Raises `DeadlineExceeded`."""
        if not await self._socket.poll(int(deadline * 1000)):
            raise DeadlineExceeded(f"{self.address!r} was not heard in {deadline:g} s; is the process up?")

    async def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.close()

    async def __aenter__(self) -> Subscriber:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
