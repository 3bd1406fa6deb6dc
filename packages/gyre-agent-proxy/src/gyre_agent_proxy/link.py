"""The scheduler's side of the pool: routes in; drains acknowledged and lost engines reported.

ProxyHello ─▶ Routes (reply, then published) ─▶ pool
    draining engine: its requests are told to move ─ none left ─▶ Drained
scheduler silent: keep the last routes, say hello again until it answers; its routes then count whatever their epoch
"""

from __future__ import annotations

import asyncio
import logging

from gyre_agent_proxy.engines import Pool, Route
from gyre_sched import protocol
from gyre_transport.bus import Client, Subscriber
from gyre_transport.errors import BusError, ProtocolError
from gyre_transport.run import BusConfig

log = logging.getLogger(__name__)

_DEADLINE = 10.0  # seconds for one request
_HELLO = 3.0  # seconds between two hellos
_AGAIN = 2.0  # seconds after which an ack that had no effect is repeated
_REPORT = 5.0  # seconds between two reports of the same engine


class Link:
    """Keeps `pool` as the scheduler wants it, from `run` until that is cancelled."""

    def __init__(self, bus: BusConfig, pool: Pool, url: str, *, silence: float = 10.0) -> None:
        self._name = f"proxy-{url.rpartition(':')[2]}"  # the same after a restart on its port
        self._url = url
        self._pool = pool
        self._events = bus.address("scheduler.events")
        self._silence = silence
        self._client = Client(bus.address("scheduler"), protocol.Reply)
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._acked: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follow the scheduler until cancelled; never fails because the scheduler does, only by an error of its own."""
        subscriber = Subscriber(self._events, protocol.Publication, silence=self._silence)
        ways = {asyncio.create_task(way, name="link") for way in (self._greet(), self._follow(subscriber))}
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()  # neither returns, so this raises
        finally:
            tasks = [*ways, *self._draining.values(), *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await subscriber.close()
            await self._client.close()

    async def _follow(self, subscriber: Subscriber) -> None:
        """Take over what is published."""
        while True:
            try:
                message = await subscriber.receive()
            except BusError as e:
                log.warning("%s; keeping the last routes", e)
                continue
            if isinstance(message, protocol.Routes):
                await self._apply(message)

    async def _greet(self) -> None:
        """Say hello again and again: a scheduler that was restarted must learn of this proxy."""
        heard = True
        while True:
            before = self._pool.epoch
            try:
                reply = await self._client.call(
                    protocol.ProxyHello(proxy=self._name, url=self._url), deadline=_DEADLINE
                )
                if not isinstance(reply, protocol.Routes):
                    raise ProtocolError(f"expected Routes in answer to ProxyHello, got {reply!r:.200}")
                # Routes older than what was known before asking are those of a scheduler that began anew.
                await self._apply(reply, reset=reply.epoch < before)
                heard = True
            except BusError as e:
                if heard:
                    log.warning("no scheduler: %s; keeping %d engines and asking again", e, len(self._pool.engines))
                heard = False
            await asyncio.sleep(_HELLO if heard else 1.0)

    async def _apply(self, routes: protocol.Routes, *, reset: bool = False) -> None:
        pool = self._pool
        engines = [Route(e.engine, e.url.rstrip("/"), e.capacity, e.version, e.lasting, e.kv) for e in routes.engines]
        if not pool.update(routes.epoch, engines, routes.draining, term=routes.term, reset=reset):
            return
        await pool.notify()
        for name in list(self._acked):
            if name not in routes.draining:
                del self._acked[name]
        now = asyncio.get_running_loop().time()
        for name in routes.draining:
            if name not in self._draining and now - self._acked.get(name, -_AGAIN) >= _AGAIN:
                task = asyncio.create_task(self._drain(name), name=f"drain {name}")
                self._draining[name] = task
                task.add_done_callback(lambda _, n=name: self._draining.pop(n, None))  # type: ignore[misc]

    async def _drain(self, name: str) -> None:
        """Move what is at `name`, wait until nothing is, and say so."""
        pool = self._pool
        while True:
            state = pool.engines.get(name)
            if state is not None and not state.draining:
                return  # the scheduler changed its mind
            if state is None or not (state.active or state.leaving):
                break
            pool.drain(name)
            async with pool.changed:
                if state.active or state.leaving:
                    await pool.changed.wait()
        drained = protocol.Drained(
            proxy=self._name, engine=name, epoch=pool.epoch, moved=state.moved if state is not None else 0
        )
        try:
            await self._client.call(drained, deadline=_DEADLINE)
            self._acked[name] = asyncio.get_running_loop().time()
            log.info("engine %s is drained, %d requests moved", name, drained.moved)
        except BusError as e:
            log.warning("the scheduler did not take Drained for %s: %s; telling it again", name, e)

    def lost(self, engine: str, detail: str) -> None:
        """Report a lost engine, each at most every few seconds."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._reported.get(engine, -_REPORT) < _REPORT:
            return
        self._reported[engine] = loop.time()
        task = loop.create_task(self._report(engine, detail))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, engine: str, detail: str) -> None:
        try:
            await self._client.call(
                protocol.EngineFailed(proxy=self._name, engine=engine, detail=detail), deadline=_DEADLINE
            )
        except BusError as e:
            log.warning("the scheduler did not take the failure of %s: %s", engine, e)


def static_routes(urls: tuple[str, ...]) -> list[Route]:
    """Routes without a scheduler; an engine is called by its URL."""
    return [Route(url, url.rstrip("/")) for url in urls]
