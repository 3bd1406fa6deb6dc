"""The scheduler's process: the policy, fed by the bus and the clock.

    bus requests ──▶ Received ─┐                  ┌─▶ Answer, Refuse ──▶ bus replies
    agents' answers ▶ Returned ┼─▶ Policy.step ───┼─▶ Record ──▶ journal, then published as Event
    clock ──▶ Tick, Silent ────┘                  ├─▶ Publish ─▶ published as Routes
                                                  └─▶ Call ────▶ a task a call; its end is a Returned

A step is never interrupted: inputs are taken one at a time, in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from pathlib import Path
from typing import Any

from gyre_sched import protocol as p
from gyre_sched.actions import (
    Action,
    Answer,
    Call,
    Input,
    Publish,
    Received,
    Record,
    Refuse,
    Restarted,
    Returned,
    Stopped,
)
from gyre_sched.config import SchedConfig
from gyre_sched.errors import Refused, SchedError
from gyre_sched.journal import Journal
from gyre_sched.leases import Leases
from gyre_sched.policy import Policy
from gyre_sched.replay import restore, says_nothing_new
from gyre_transport.bus import Client, Publisher, Server
from gyre_transport.config import section
from gyre_transport.errors import BusError
from gyre_transport.process import ready
from gyre_transport.run import Context

log = logging.getLogger(__name__)

_OUTBOX = 10_000  # publications waiting to be sent; subscribers that need every event read the journal


class Service:
    """The scheduler on the bus. `start`, then `close`; `failed` ends when it cannot go on."""

    def __init__(
        self,
        config: SchedConfig,
        *,
        address: str,
        events_address: str,
        journal: Path,
        per_burst: int,
        steps: int,
    ) -> None:
        """Goes on where the journal ends, if there is one. Raises `JournalError` when it cannot be read or written."""
        self._config = config
        self._journal = Journal(journal)
        before = self._journal.before
        # unix seconds that never go back, not even behind what an earlier scheduler wrote
        self._clock = max(time.time(), before[-1].input.at if before else 0.0) - time.monotonic()
        began = before[0].input.at if before else self._now()
        self._policy = Policy(config, per_burst=per_burst, steps=steps, at=began, past=_past(config.past))
        try:
            restore(self._policy, before)
        except BaseException:
            self._journal.close()
            raise
        self._leases = Leases(len(self._policy.state.cells), config.lease, self._now())
        self._server = Server(address, p.Request, self._handle)
        self._publisher = Publisher(events_address, p.Publication, heartbeat=config.heartbeat)
        self._agents: dict[str, Client] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._outbox: asyncio.Queue[p.Publication] = asyncio.Queue(_OUTBOX)
        self._closed = False
        self._loops: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def address(self) -> str:
        """Where requests are answered."""
        return self._server.address

    @property
    def events_address(self) -> str:
        """Where `Routes` and `Event`s are published."""
        return self._publisher.address

    async def start(self) -> None:
        """Bind both sockets and begin. Raises `BusError`."""
        self._step(Restarted(self._now(), self._journal.torn))
        await self._publisher.start()
        await self._server.start()
        self._loops = [asyncio.create_task(self._beat()), asyncio.create_task(self._send())]
        for task in self._loops:
            task.add_done_callback(self._loop_ended)

    async def close(self) -> None:
        """Stop answering, drop calls in flight and close the journal. Agents and proxies are left as they are."""
        if self._closed:
            return
        self._closed = True
        await self._server.close()
        tasks = [*self._loops, *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._agents.values():
            await client.close()
        await self._publisher.close()
        try:
            if not self.failed.done():
                self._step(Stopped(self._now()))
        finally:
            self._journal.close()

    async def __aenter__(self) -> Service:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _now(self) -> float:
        return self._clock + time.monotonic()

    # --- inputs -------------------------------------------------------------------------------------------------

    async def _handle(self, request: p.Request) -> p.Reply:
        event = Received(self._now(), request)
        self._leases.hear(event)
        reply = self._step(event)
        if reply is None:
            raise SchedError(f"{type(request).__name__} was not answered; this is a bug in the policy")
        return reply

    async def _beat(self) -> None:
        while True:
            for event in self._leases.tick(self._now()):
                self._step(event)
            self._queue(self._policy.state.routes())
            await asyncio.to_thread(self._journal.sync)
            await asyncio.sleep(self._config.heartbeat)

    async def _call(self, call: Call) -> None:
        client = self._agents.get(call.agent)
        if client is None:
            client = self._agents[call.agent] = Client(call.agent, p.AgentReply)
        try:
            reply = await client.call(call.request, deadline=call.deadline)
        except BusError as e:
            reply = p.Failed(detail=str(e))
        if not isinstance(reply, p.Done | p.Failed | p.Fenced):
            reply = p.Failed(
                detail=f"expected Done, Failed or Fenced, got {reply!r}; is the agent another version of Gyre?"
            )
        self._step(Returned(self._now(), call.cell, call.call, reply))

    # --- actions ------------------------------------------------------------------------------------------------

    def _step(self, event: Input) -> p.Reply | None:
        """Take one input and carry out what follows; returns the reply, if one is due. Raises `Refused`."""
        reply: p.Reply | None = None
        try:
            repeated = says_nothing_new(event, self._policy.state)
            actions = self._policy.step(event)
            if not repeated or any(not isinstance(action, Answer) for action in actions):
                self._write(event, actions)  # before anything is done about it
        except Exception as e:  # neither a half-taken step nor a lost line can be gone on from
            if not self.failed.done():
                self.failed.set_exception(e)
            raise
        for action in actions:
            match action:
                case Publish(routes):
                    self._queue(routes)
                case Call():
                    task = asyncio.create_task(self._call(action), name=f"call {action.call} to cell {action.cell}")
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                case Answer(reply):
                    pass
                case Refuse(reason):
                    raise Refused(reason)
        return reply

    def _write(self, event: Input, actions: list[Action]) -> None:
        for written in self._journal.append(event, [a for a in actions if isinstance(a, Record)]):
            self._queue(written)

    def _queue(self, publication: p.Publication) -> None:
        try:
            self._outbox.put_nowait(publication)
        except asyncio.QueueFull:
            log.error("%d publications wait to be sent; one %s is lost", _OUTBOX, type(publication).__name__)

    async def _send(self) -> None:
        while True:
            await self._publisher.publish(await self._outbox.get())

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (e := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(e)


def _past(path: str) -> list[tuple[str, float]]:
    if not path:
        return []
    from gyre_sched.simulate.trace import load_trace, past

    return past(load_trace(path))


async def serve(context: Context) -> None:
    """Run the scheduler of `context` until SIGTERM or SIGINT. Raises `ConfigError`, `BusError` or `SchedError`."""
    config = section(context.data, "sched", SchedConfig)
    if context.run.steps % context.batch.per_burst:
        log.warning(
            "run.steps = %d is no multiple of batch.per_burst = %d: the last steps are not run",
            context.run.steps,
            context.batch.per_burst,
        )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    service = Service(
        config,
        address=context.bus.address("scheduler"),
        events_address=context.bus.address("scheduler.events"),
        journal=context.dir.journal,
        per_burst=context.batch.per_burst,
        steps=context.run.steps,
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(service)
        page = ""
        if config.web.on:
            from gyre_sched.face.web import Web

            page = (await stack.enter_async_context(Web(context.dir.path, config.web))).url
        ready(scheduler=service.address, events=service.events_address, web=page)
        log.info("the scheduler serves at %s", service.address)
        if page:  # without the token: others may read a log
            token = context.dir.path / "sched" / "web-token"
            log.info("this run's page is at %s?token=TOKEN, the token in %s", page.partition("?")[0], token)
        stopped = asyncio.create_task(stop.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [stopped, service.failed]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if service.failed.done():
            service.failed.result()
