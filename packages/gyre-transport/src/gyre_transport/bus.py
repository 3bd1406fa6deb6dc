"""The bus: tagged msgspec messages over ZeroMQ.

Request/reply                                           Publish/subscribe (`publish`)
    Client ──[id, header, request]──▶ Server                Publisher ──[header, message]──▶ Subscriber
    Client ◀──[id, ok|error, reply]── Server                          ──[header]───────────▶   heartbeat

What happens to a message when the peer is gone (the numbers are in `gyre_transport.sockets`)
    request   stays queued, up to HIGH_WATER messages, while ZeroMQ reconnects; then `call` waits for room, up to its
              deadline. One that was already on its way to a server that ends is lost, or was carried out: `call` cannot
              tell, and raises `DeadlineExceeded` at its deadline. One that must not happen twice carries an identity.
    reply     dropped when the caller is gone, or more than HIGH_WATER replies behind (counted in `Server.undelivered`),
              or when its deadline has passed (counted in `Client.late`).
    published dropped for a subscriber that is absent or more than HIGH_WATER messages behind. Publish whole states, or
              let the reader ask the server for what it missed.
Bounds: a server runs at most `max_in_flight` handlers and leaves further requests in the socket; what is larger than
MAX_BYTES is not sent, and a peer that sends it all the same is disconnected.
Peers: the header of every message says which protocol it is of, and which version; another one's is answered with
`VersionMismatch` and never decoded. On tcp, who does not have the run's keys is refused and counted (`Server.refused`);
it gets `AccessDenied` at its deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from gyre_transport import framing, sockets
from gyre_transport.errors import BusError, DeadlineExceeded, ProtocolError
from gyre_transport.framing import ERROR, OK, Fault, unpack
from gyre_transport.keys import Keys
from gyre_transport.publish import Publisher, Subscriber
from gyre_transport.sockets import Dialer, Listener

__all__ = ["BlockingClient", "Client", "Publisher", "Server", "Subscriber"]

log = logging.getLogger(__name__)


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
        keys: Keys | None = None,
    ) -> None:
        """keys: who may connect over tcp; default: who has this process's."""
        self.address = address
        self.malformed = 0  # messages that could not even be answered
        self.undelivered = 0  # replies whose caller was gone, or too far behind
        self._header = framing.header(requests)
        self._keys = keys
        self._decoder = msgspec.msgpack.Decoder(requests)
        self._encoder = msgspec.msgpack.Encoder()
        self._handler = handler
        self._slots = asyncio.Semaphore(max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Bind and serve; `address` then holds the real endpoint (tcp port 0 is resolved). Raises `BusError`."""
        self._listener = Listener(zmq.ROUTER, self.address, self._keys)
        self.address = self._listener.address
        self._listener.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tell when a reply cannot be delivered
        self._loop_task = asyncio.create_task(self._loop(self._listener.socket), name=f"bus server {self.address}")

    @property
    def refused(self) -> int:
        """Peers turned away at the socket since the start: without keys, or with another run's."""
        return 0 if self._listener is None else self._listener.refused

    async def close(self) -> None:
        """Stop reading, cancel the handlers still running and close the socket."""
        tasks = [t for t in (self._loop_task, *self._tasks) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close()
            self._listener = None

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
        if len(frames) < 3:
            self.malformed += 1
            log.error("%s: expected [peer, id, header, request], got %d frames; dropped", self.address, len(frames))
            return
        status, body = await self._reply(frames[2:])
        try:
            await socket.send_multipart([*frames[:2], status, body], zmq.NOBLOCK)
        except zmq.ZMQError as e:  # too far behind, or gone: nobody is made to wait for it
            self.undelivered += 1
            log.warning("%s: a reply was dropped: its caller does not take it (%s)", self.address, e)

    async def _reply(self, frames: list[bytes]) -> tuple[bytes, bytes]:
        """Return (status, reply) to [header, request]."""
        try:
            if len(frames) != 2 or frames[0] != self._header:
                came = frames[0] if len(frames) > 1 else b""
                raise framing.mismatch(self.address, serves=self._header, came=came)
            reply = await self._handler(framing.decode(self._decoder, frames[1], "a request"))
            return OK, _fitting(self._encoder.encode(reply), reply, self.address)
        except Exception as e:
            if isinstance(e, ProtocolError):
                log.warning("%s: refused a message: %s", self.address, e)
            elif not isinstance(e, BusError):
                log.warning("%s: a request failed: %s: %s", self.address, type(e).__name__, e, exc_info=True)
            return ERROR, self._encoder.encode(Fault(type(e).__name__, str(e)))


class Client:
    """Call a `Server` from asyncio code; any number of calls may be in flight."""

    def __init__(self, address: str, replies: Any, *, keys: Keys | None = None) -> None:
        """keys: what to prove over tcp; default: this process's."""
        self.address = address
        self.late = 0  # replies that came after their deadline
        self._header = framing.header(replies)
        self._keys = keys
        self._decoder = msgspec.msgpack.Decoder(replies)
        self._encoder = msgspec.msgpack.Encoder()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._dialer: Dialer | None = None
        self._loop_task: asyncio.Task[None] | None = None

    async def call(self, request: Any, *, deadline: float) -> Any:
        """Send `request` and return the reply; `deadline` is in seconds from now.

        Raises `DeadlineExceeded`, `RemoteError` (the handler refused), `VersionMismatch` or another `ProtocolError`;
        `BusError` at once when the request is too large, or the address needs keys and there are none.
        """
        payload = _fitting(self._encoder.encode(request), request, self.address)
        if self._dialer is None:
            self._dialer = Dialer(zmq.asyncio.Context.instance(), zmq.DEALER, self.address, self._keys)
            self._loop_task = asyncio.create_task(self._loop(self._dialer.socket), name=f"bus client {self.address}")
        request_id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            async with asyncio.timeout(deadline):
                await self._dialer.socket.send_multipart([request_id.to_bytes(8, "big"), self._header, payload])
                return await future
        except TimeoutError:
            raise _expired(request, deadline, self._dialer) from None
        finally:
            self._waiting.pop(request_id, None)

    async def _loop(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            try:
                request_id, reply = unpack(await socket.recv_multipart(), self._decoder)
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
        if self._dialer is not None:
            self._dialer.close()
            self._dialer = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class BlockingClient:
    """Call a `Server` from a thread that has no event loop, one call at a time; not shared between threads."""

    def __init__(self, address: str, replies: Any, *, keys: Keys | None = None) -> None:
        """Raises `BusError` when the address needs keys and there are none."""
        self.address = address
        self._header = framing.header(replies)
        self._decoder = msgspec.msgpack.Decoder(replies)
        self._encoder = msgspec.msgpack.Encoder()
        self._ids = itertools.count(1)
        self._dialer = Dialer(zmq.Context.instance(), zmq.DEALER, address, keys)

    def call(self, request: Any, *, deadline: float) -> Any:
        """As `Client.call`."""
        payload = _fitting(self._encoder.encode(request), request, self.address)
        request_id = next(self._ids)
        end = time.monotonic() + deadline
        socket: zmq.Socket[bytes] = self._dialer.socket
        socket.setsockopt(zmq.SNDTIMEO, max(1, int(deadline * 1000)))
        try:
            socket.send_multipart([request_id.to_bytes(8, "big"), self._header, payload])
        except zmq.Again:
            raise _expired(request, deadline, self._dialer) from None
        while (left := end - time.monotonic()) > 0:
            if not socket.poll(max(1, int(left * 1000))):
                break
            got, reply = unpack(socket.recv_multipart(), self._decoder)
            if got != request_id:
                continue  # the late answer to a call that gave up
            if isinstance(reply, BusError):
                raise reply
            return reply
        raise _expired(request, deadline, self._dialer)

    def close(self) -> None:
        """Close the socket."""
        self._dialer.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _fitting(payload: bytes, message: Any, address: str) -> bytes:
    """`payload`. Raises `BusError` when the peer would disconnect whoever sends it."""
    if len(payload) > sockets.MAX_BYTES:
        raise BusError(
            f"{type(message).__name__} for {address!r} takes {len(payload):,} bytes, a message at most "
            f"{sockets.MAX_BYTES:,}; send it in parts, or register the memory and send its descriptor"
        )
    return payload


def _expired(request: Any, deadline: float, dialer: Dialer) -> DeadlineExceeded:
    return dialer.late(f"{type(request).__name__} to {dialer.address!r} got no answer in {deadline:g} s")
