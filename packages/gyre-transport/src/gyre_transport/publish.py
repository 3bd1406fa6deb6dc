"""One-way messages: a publisher's states, and its heartbeats, to whoever listens. See `bus` for what may be lost."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from gyre_transport import framing
from gyre_transport.errors import BusError, ProtocolError, PublisherSilent
from gyre_transport.keys import Keys
from gyre_transport.sockets import Dialer, Listener


class Publisher:
    """Send messages to whoever listens; a heartbeat every `heartbeat` seconds tells subscribers it is alive."""

    def __init__(self, address: str, messages: Any = None, *, heartbeat: float = 1.0, keys: Keys | None = None) -> None:
        """messages: their type, which names the protocol. keys: who may listen over tcp; default: who has this
        process's."""
        self.address = address
        self._header = framing.header(messages)
        self._keys = keys
        self._heartbeat = heartbeat
        self._encoder = msgspec.msgpack.Encoder()
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind; `address` then holds the real endpoint. Raises `BusError`."""
        self._listener = Listener(zmq.PUB, self.address, self._keys)
        self.address = self._listener.address
        self._task = asyncio.create_task(self._beat(self._listener.socket), name=f"bus publisher {self.address}")

    @property
    def refused(self) -> int:
        """Peers turned away at the socket since the start: without keys, or with another run's."""
        return 0 if self._listener is None else self._listener.refused

    async def publish(self, message: Any) -> None:
        """Send one message to all subscribers; never blocks on a slow one (it loses messages instead)."""
        if self._listener is None:
            raise BusError(f"publisher {self.address!r} was not started; await start() first")
        await self._listener.socket.send_multipart([self._header, self._encoder.encode(message)])

    async def _beat(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await socket.send(self._header)
            await asyncio.sleep(self._heartbeat)

    async def close(self) -> None:
        """Stop the heartbeat and close the socket."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close()
            self._listener = None

    async def __aenter__(self) -> Publisher:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Subscriber:
    """Receive a publisher's messages; silence for longer than `silence` seconds is an error."""

    def __init__(
        self,
        address: str,
        messages: Any,
        *,
        silence: float = 10.0,
        keys: Keys | None = None,
    ) -> None:
        """Raises `BusError` when the address needs keys and there are none."""
        self.address = address
        self._header = framing.header(messages)
        self._silence = silence
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._dialer = Dialer(zmq.asyncio.Context.instance(), zmq.SUB, address, keys)
        self._socket = self._dialer.socket
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")

    async def receive(self) -> Any:
        """Return the next message.

        Raises `PublisherSilent`, `VersionMismatch` or another `ProtocolError`; may be called again after each.
        """
        while True:
            try:
                async with asyncio.timeout(self._silence):
                    header, *rest = await self._socket.recv_multipart()
            except TimeoutError:
                raise PublisherSilent(
                    f"{self.address!r} was silent for {self._silence:g} s; {self._dialer.why}"
                ) from None
            if header != self._header:
                raise framing.mismatch(self.address, serves=header, came=self._header)
            if len(rest) > 1:
                raise ProtocolError(f"{self.address!r} sent {len(rest) + 1} frames, expected [header, message]")
            if rest:
                return framing.decode(self._decoder, rest[0], f"a message of {self.address!r}")

    async def connected(self, deadline: float) -> None:
        """Wait until the publisher is heard once (a message waiting is not consumed). Raises `DeadlineExceeded`."""
        if not await self._socket.poll(int(deadline * 1000)):
            raise self._dialer.late(f"{self.address!r} was not heard in {deadline:g} s")

    async def close(self) -> None:
        """Close the socket."""
        self._dialer.close()

    async def __aenter__(self) -> Subscriber:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
