"""The agent of one cell: owns its engine and its trainer, and switches the cell between the two.

    scheduler ── EnterTraining ──▶ engine idle? ─▶ release its memory ─▶ trainer "training" ──▶ Done
              ── EnterRollout  ──▶ trainer "idle" (handed over) ─▶ engine resumes, refreshes, is probed ──▶ Done
              ── Refresh       ──▶ engine pauses, takes the weights, goes on ──▶ Done
              ── StopCell      ──▶ trainer "stop" (saves, exits) ─▶ engine ends ──▶ Done, and the agent exits
              ◀─ CellHello once, CellState at every heartbeat and change

Both processes stay up for the whole run. One switch is carried out at a time; StopCell interrupts it. A standalone
engine (`cell` from sched.cells on; in an async schedule, from sched.trainers on) is a cell without a trainer: it takes
weights, and never trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from gyre_sched import protocol as p
from gyre_sched.attempts import Attempts
from gyre_sched.config import SchedConfig
from gyre_sched.engine import launch
from gyre_sched.engine.config import EngineConfig
from gyre_sched.engine.host import EngineHost
from gyre_sched.engine.pages import make_pages
from gyre_sched.errors import EngineError, SchedError, TrainerError
from gyre_sched.fence import Fence
from gyre_sched.trainer import TrainerHost
from gyre_transport import endpoint
from gyre_transport.bus import Client, Server
from gyre_transport.config import section
from gyre_transport.errors import BusError, DeadlineExceeded, RemoteError
from gyre_transport.kv.config import KvConfig
from gyre_transport.process import ready
from gyre_transport.run import Context

log = logging.getLogger(__name__)

CORE = 0
_MARGIN = 0.9  # of the scheduler's patience: the answer that says why must come before it ends


class ModelPath(msgspec.Struct, frozen=True):
    """What an agent needs of [model]."""

    path: str


class CellAgent:
    """One cell's engine, trainer and role. `run` lives until the cell is stopped."""

    def __init__(self, context: Context, cell: int) -> None:
        self.cell = cell
        self._sched = section(context.data, "sched", SchedConfig)
        config = section(context.data, "engine", EngineConfig)
        model = Path(section(context.data, "model", ModelPath).path)
        self._config = config
        self._address = context.bus.address(f"agent-{cell}")
        self._scheduler = Client(context.bus.address("scheduler"), p.Reply)
        self._dirty = asyncio.Event()
        self._fence = Fence(self._sched.lease)
        self._instance = secrets.token_hex(8)
        self._role = "rollout"  # rollout | training | between
        self._switches: set[asyncio.Task[p.Done]] = set()  # one runs, the others wait for it
        self._switching = asyncio.Lock()
        self.stopping = False
        self._failure: SchedError | None = None
        self._pages = make_pages(section(context.data, "kv", KvConfig), config, model, context, cell)
        self.engine = EngineHost(
            f"cell-{cell}", config, model, context.dir.logs / f"engine-{cell}.log", self._dirty.set, self._pages
        )
        self.trainer = TrainerHost(
            f"the trainer of cell {cell}",
            trainer_command(self._sched, context.config_path, cell),
            context.dir.logs / f"trainer-{cell}.log",
            trainer_environment(config),
            Attempts(config.attempts, config.attempts_window),
            self._dirty.set,
        )
        self._ended = asyncio.Event()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def handle(self, request: p.AgentRequest) -> p.AgentReply:
        """Answer one request."""
        match request:
            case p.TrainerReport():
                return await self._report(request)
            case p.StopCell():
                return await self._stop_cell()
        if reason := self._fence.refusal(request, time.monotonic()):
            log.warning("cell %d did not take %s: %s", self.cell, type(request).__name__, reason)
            return p.Fenced(term=self._fence.term, detail=reason)
        match request:
            case p.EnterTraining():
                return await self._switched(self._enter_training)
            case p.EnterRollout(version=version, manifest=manifest):
                return await self._switched(lambda: self._enter_rollout(version, manifest))
            case p.Refresh(version=version, manifest=manifest):
                return await self._switched(lambda: self._refresh(version, manifest))

    async def _report(self, report: p.TrainerReport) -> p.TrainerOrder:
        if report.cell != self.cell:
            raise TrainerError(f"the trainer of cell {report.cell} reports to the agent of cell {self.cell}")
        return await self.trainer.report(report)

    async def _switched(self, work: Callable[[], Awaitable[None]]) -> p.Done | p.Failed:
        """Carry `work` out when no other switch is; a failure is an answer that says why."""
        began = time.monotonic()

        async def alone() -> p.Done:
            async with self._switching:
                await work()
            return p.Done(seconds=time.monotonic() - began, version=self.engine.version)

        if self.stopping:
            return p.Failed(detail=f"cell {self.cell} is stopping")
        task = asyncio.create_task(alone())
        self._switches.add(task)
        try:
            return await task
        except SchedError as e:
            log.error("cell %d: %s: %s", self.cell, type(e).__name__, e)
            return p.Failed(detail=f"{type(e).__name__}: {e}")
        except asyncio.CancelledError:
            if self.stopping and task.cancelled():
                return p.Failed(detail=f"cell {self.cell} is stopping")
            raise
        finally:
            self._switches.discard(task)
            self._dirty.set()

    async def _enter_training(self) -> None:
        end = time.monotonic() + self._sched.enter_timeout * _MARGIN
        self.trainer.require()
        self._role = "between"
        await self.engine.release()
        try:
            await self.trainer.become("training", deadline=end - time.monotonic())
        except TrainerError:
            await self.trainer.order("idle")
            raise
        self._role = "training"

    async def _enter_rollout(self, version: int, manifest: bytes) -> None:
        end = time.monotonic() + self._sched.return_timeout * _MARGIN
        self._role = "between"
        await self.trainer.become("idle", deadline=end - time.monotonic())
        self._dirty.set()
        await self.engine.come_back(version, manifest, deadline=end - time.monotonic())
        self._role = "rollout"

    async def _refresh(self, version: int, manifest: bytes) -> None:
        await self.engine.refresh(version, manifest, deadline=self._sched.return_timeout * _MARGIN)

    async def _stop_cell(self) -> p.Done | p.Failed:
        began = time.monotonic()
        self.stopping = True
        for switch in self._switches:
            switch.cancel()
        failure = None
        try:
            await self.trainer.finish(deadline=self._sched.return_timeout * _MARGIN)
        except TrainerError as e:
            failure = self._failure = e
        self._ended.set()  # `run` ends the rest, once the answer is on its way
        if failure is not None:
            return p.Failed(detail=str(failure))
        return p.Done(seconds=time.monotonic() - began, version=self.engine.version)

    # --- the scheduler ----------------------------------------------------------------------------------------------

    def _hello(self) -> p.CellHello:
        return p.CellHello(
            cell=self.cell,
            agent=self._address,
            engine=self.engine.name,
            engine_url=self.engine.url,
            capacity=self._sched.capacity,
            version=self.engine.version,
            kv=self._pages.addresses if self._pages else (),
            instance=self._instance,
            role=self._role,
        )

    def _state(self) -> p.CellState:
        return p.CellState(
            cell=self.cell,
            engine_alive=self.engine.alive,
            trainer_alive=self.trainer.alive,
            trainer="training" if self.trainer.state == "training" else "idle",
            version=self.engine.version,
            detail=self.engine.detail if not self.engine.alive else self.trainer.detail,
            routable=self.engine.alive and self._role == "rollout",
            registration=self._fence.registration,
        )

    async def _register(self) -> None:
        """Say hello. Raises `BusError`."""
        sent = time.monotonic()
        reply = await self._scheduler.call(self._hello(), deadline=5.0)
        if not isinstance(reply, p.Registered) or not self._fence.registered(reply, sent):
            raise BusError(f"cell {self.cell} said hello and got {reply!r}; is this scheduler the run's latest?")

    async def _first_hello(self) -> None:
        end = time.monotonic() + self._sched.start_timeout
        while True:
            try:
                await self._register()
                return
            except DeadlineExceeded:
                if time.monotonic() > end:
                    raise

    async def _beat(self) -> None:
        """Send the cell's state at every change and heartbeat; say hello first when the scheduler was not heard for a
        lease, or does not know this registration."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._sched.heartbeat):
                    await self._dirty.wait()
            self._dirty.clear()
            try:
                if not self._fence.holds(time.monotonic()):
                    await self._register()
                sent = time.monotonic()
                await self._scheduler.call(self._state(), deadline=max(1.0, self._sched.heartbeat))
                self._fence.acknowledged(sent)
            except RemoteError as e:
                log.warning("the scheduler refused cell %d: %s", self.cell, e)
                self._fence.lapse()
            except BusError as e:
                log.warning("cell %d: %s", self.cell, e)

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until StopCell, or until cancelled; engine and trainer have then ended.

        Raises `SchedError` when the engine or the trainer cannot be started, or the core's trainer was given up.
        """
        async with Server(self._address, p.AgentRequest, self.handle):
            life = asyncio.create_task(self._live())
            ended = asyncio.create_task(self._ended.wait())
            try:
                await asyncio.wait({life, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.stopping = True
                rest: list[asyncio.Task[Any]] = [life, ended, *self._switches]
                for task in rest:
                    task.cancel()
                await asyncio.gather(*rest, return_exceptions=True)
                await asyncio.gather(self.trainer.stop(), self.engine.stop())
                await self._scheduler.close()
        if life.done() and not life.cancelled() and (e := life.exception()) is not None:
            raise _leaf(e)
        if self._failure is not None:
            raise self._failure

    async def _live(self) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.engine.start())
            if self.cell < self._sched.with_trainer:
                group.create_task(self.trainer.start(deadline=self._sched.start_timeout))
        await self._first_hello()
        log.info("cell %d is up after %.1f s: %s", self.cell, time.monotonic() - began, self.engine.url)
        ready(engine_url=self.engine.url, engine_pid=self.engine.pid, trainer_pid=self.trainer.pid)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            group.create_task(self._watch_engine())
            group.create_task(self._watch_trainer())

    async def _watch_engine(self) -> None:
        try:
            await self.engine.watch()
        except EngineError as e:
            if self.cell == CORE:
                raise
            log.error("cell %d serves no more: %s", self.cell, e)

    async def _watch_trainer(self) -> None:
        try:
            await self.trainer.watch()
        except TrainerError as e:
            if self.cell == CORE:  # no run without the core
                raise
            log.error("cell %d stays in rollout: %s", self.cell, e)


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def trainer_command(config: SchedConfig, config_path: Path, cell: int) -> list[str]:
    """The trainer's command line: `sched.trainer`, or gyre-train's replica, and which cell of which run it is."""
    program = config.trainer or (sys.executable, "-m", "gyre_train.cli", "replica")
    return [*program, "--config", str(config_path), "--cell", str(cell)]


def trainer_environment(config: EngineConfig) -> dict[str, str]:
    """The trainer's environment: it shares its cores with engines, so its threads neither spread nor spin."""
    fixed = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, "OMP_NUM_THREADS": str(config.threads), **fixed}


async def serve(context: Context, cell: int) -> None:
    """Run the agent of `cell` until StopCell or SIGTERM. Raises `SchedError`, everything stopped."""
    endpoint.configure(context.transport)
    config = section(context.data, "engine", EngineConfig)
    if launch.uses_cuda(config):  # both processes of the cell inherit it
        os.environ["CUDA_VISIBLE_DEVICES"] = launch.devices(cell, config)
    agent = CellAgent(context, cell)
    running = asyncio.create_task(agent.run())

    def stop() -> None:
        if not agent.stopping:  # it ends by itself, in order; cancelling would cut that short
            running.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await running
