"""The feed process: two bus servers, a worker that prepares and packs in threads, and a voice to the scheduler.

    runner ──feed.intake──▶ ┌──────┐ ◀──feed── trainers
                            │ Feed │ ── Backlog ─▶ scheduler       at every change, and every second
                            └──▲───┘
               worker: prepare │ pack      (threads: the servers stay responsive)

Every message is answered at once from the state; nothing waits here, trainers are told to ask again. A failure of the
worker ends the process: a feed that silently stopped preparing would look like a slow rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable

import msgspec

from gyre_sched import protocol as sched
from gyre_train import protocol
from gyre_train.errors import FeedError
from gyre_train.feed.config import FeedConfig
from gyre_train.feed.feed import Feed
from gyre_train.feed.metrics import append
from gyre_train.feed.prepare import prepare_group
from gyre_traj import intake
from gyre_transport.bus import Client, Server
from gyre_transport.config import section
from gyre_transport.errors import BusError
from gyre_transport.process import follow_parent, ready
from gyre_transport.run import Context

log = logging.getLogger(__name__)

_HEARTBEAT = 1.0  # seconds between backlogs without a change, and between looks at the clock
_SCHEDULER_DEADLINE = 5.0


class FeedService:
    """Serve a `Feed` on the run's bus. `async with` starts and stops the servers; `work` does the rest.

    clock: seconds, monotonic.
    """

    def __init__(self, context: Context, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.config = section(context.data, "feed", FeedConfig)
        self.feed = Feed(self.config, size=context.batch.groups)
        self._seed = context.run.seed
        self._steps = context.dir.metrics / "steps.jsonl"
        self._work = asyncio.Event()
        self._changed = asyncio.Event()
        self._servers = (
            Server(context.bus.address("feed"), protocol.Request, self._trainer),
            Server(context.bus.address("feed.intake"), intake.Request, self._intake),
        )
        self._scheduler = Client(context.bus.address("scheduler"), sched.Reply)
        self._scheduler_heard = True

    async def __aenter__(self) -> FeedService:
        async with contextlib.AsyncExitStack() as stack:
            for server in self._servers:
                await stack.enter_async_context(server)
            stack.push_async_callback(self._scheduler.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def work(self) -> None:
        """Prepare, pack, keep time and tell the scheduler, until cancelled. Raises what went wrong."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prepare_and_pack(), name="feed worker")
            group.create_task(self._keep_time(), name="feed clock")
            group.create_task(self._tell_scheduler(), name="feed backlog")

    # --- messages in -------------------------------------------------------------------------------------------------

    async def _trainer(self, request: protocol.Request) -> protocol.Reply:
        try:
            if isinstance(request, protocol.CloseBatch):
                return self._close(request)
            if (implied := self.feed.implied_close(request)) is not None:
                log.warning("batch %d was stepped but not closed; it is closed now", implied.batch)
                self._close(implied)
            return self.feed.answer(request, self._clock())
        finally:
            self._touch()

    def _close(self, request: protocol.CloseBatch) -> protocol.Reply:
        """The record reaches the disk before anything changes: a core that is told of a failure may ask again."""
        closing = self.feed.closing(request, self._clock())
        if closing is not None:
            batch, record = closing
            try:
                append(self._steps, record)
            except OSError as e:
                raise FeedError(
                    f"cannot write step {record['step']} to {str(self._steps)!r}: {e.strerror}; make room and resume"
                ) from e
            self.feed.commit(batch, request)
            log.info("step %d: %d executions, loss %.6g", record["step"], record["executions"], request.loss)
        return protocol.Ok()

    async def _intake(self, request: intake.Request) -> intake.Reply:
        if isinstance(request, intake.Fates):
            return self.feed.buffer.fates(request.since)
        accepted = self.feed.submit(request, self._clock())
        self._touch()
        return accepted

    def _touch(self) -> None:
        self._work.set()
        self._changed.set()

    # --- work --------------------------------------------------------------------------------------------------------

    async def _prepare_and_pack(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while await self._one_piece():
                self._changed.set()

    async def _one_piece(self) -> bool:
        """Pack or prepare one group; False: nothing to do."""
        if (packing := self.feed.to_pack()) is not None:
            batch, group, rows = packing
            last = len(batch.groups) + 1 == batch.size
            self.feed.packed(batch, group, await asyncio.to_thread(batch.packer.push, rows, last=last))
            return True
        if (preparing := self.feed.to_prepare()) is not None:
            number, members = preparing
            self.feed.prepared(number, *await asyncio.to_thread(prepare_group, members, self.config, self._seed))
            return True
        return False

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT)
            self.feed.tick(self._clock())
            self._touch()

    async def _tell_scheduler(self) -> None:
        told: sched.Backlog | None = None
        last = 0.0
        while True:
            await self._changed.wait()
            self._changed.clear()
            backlog = self.feed.backlog()
            if backlog == told and self._clock() < last + _HEARTBEAT / 2:
                continue
            try:
                await self._scheduler.call(backlog, deadline=_SCHEDULER_DEADLINE)
            except BusError as e:
                if self._scheduler_heard:
                    log.warning("the scheduler does not take the backlog, asking on: %s", e)
                self._scheduler_heard = False
                told = None
                continue
            if not self._scheduler_heard:
                log.info("the scheduler takes the backlog again")
            self._scheduler_heard = True
            told, last = backlog, self._clock()


async def serve(context: Context) -> None:
    """Serve until SIGTERM or SIGINT. Raises `BusError` (address taken), `ConfigError`, or what broke the worker."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    follow_parent()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with FeedService(context) as service:
        working = asyncio.create_task(service.work(), name="feed")
        stopping = asyncio.create_task(stop.wait(), name="feed stop")
        ready(addresses=[context.bus.address("feed"), context.bus.address("feed.intake")])
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if working.done():
            working.result()
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
    log.info("stopped: %s", msgspec.json.encode(service.feed.stats()).decode())
