"""Start a run's processes, notice the first that ends too early, stop all in order.

start: stage by stage, each process ready before the next stage starts
watch: the runner's exit 0 ends the run; a scheduler (journal), a proxy (call logs) or a satellite's agent (it joins
       like a new one) that ends is started again, a few times; any other exit is a failure
stop:  runner (harnesses), cells (trainers save and export, engines end), then proxy, feed, scheduler
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from gyre_launch.errors import RunFailed
from gyre_launch.plan import Planned
from gyre_sched.attempts import Attempts
from gyre_sched.protocol import AgentReply, Failed, GetStatus, Reply, Shutdown, StopCell
from gyre_transport.bus import Client
from gyre_transport.errors import BusError, ProcessError
from gyre_transport.process import Child
from gyre_transport.run import Context

_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}  # spinning threads stall shared cores
_EXPORT = 330.0  # seconds a cell may take to save, export and end: more than its agent gives its trainer
_LOOK = 5.0  # seconds between questions to the scheduler
_RESTARTS, _WINDOW = 3, 600.0  # of one process, within so many seconds


class Supervisor:
    """The processes of one run."""

    def __init__(self, context: Context, planned: Sequence[Planned], say: Callable[[str], None]) -> None:
        self._context = context
        self._planned = planned
        self._say = say
        self.children: dict[str, Child] = {}
        self._attempts: dict[str, Attempts] = {}

    async def start(self) -> None:
        """Start every process; raises `gyre_transport.errors.ProcessError` at the first that does not become ready."""
        env = {**os.environ, **_ENV}
        for _, group in itertools.groupby(self._planned, key=lambda p: p.stage):
            stage = list(group)
            self._say("starting " + ", ".join(p.name for p in stage))
            try:
                async with asyncio.TaskGroup() as tasks:
                    for p in stage:
                        tasks.create_task(self._start(p, env))
            except ExceptionGroup as e:  # the others were stopped; the first failure is the one to show
                raise e.exceptions[0] from None

    async def _start(self, p: Planned, env: dict[str, str]) -> None:
        log = self._context.dir.logs / f"{p.name}.log"
        child = await Child.start(p.name, p.argv, log=log, env=env, ready_within=p.ready_within)
        self.children[p.name] = child
        if page := child.info.get("web"):
            self._say(f"watch the run at {page}")

    async def watch(self) -> None:
        """Return when the runner has ended well; raises `RunFailed` when a process ends before that which cannot go on
        where it was."""
        while True:
            waits = {asyncio.create_task(child.wait()): child for child in self.children.values()}
            try:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()
            ended = [waits[task] for task in sorted(done, key=lambda t: waits[t].name == "runner")]
            for child in ended:
                if child.name != "runner" or child.returncode != 0:
                    await self._again(child)
            if any(child.name == "runner" for child in ended):
                return

    async def _again(self, child: Child) -> None:
        """Start a process that ended and can go on where it was; raises `RunFailed` if it cannot or ends too often."""
        how = f"{child.name} ended with exit code {child.returncode} during the run; {child.tail()}"
        attempts = self._attempts.setdefault(child.name, Attempts(_RESTARTS, _WINDOW))
        if not _goes_on(child.name) or not attempts.again(time.monotonic()):
            raise RunFailed(how)
        self._say(f"{how}; it is started again")
        planned = next(p for p in self._planned if p.name == child.name)
        await child.stop()  # whatever it left behind
        try:
            await self._start(planned, {**os.environ, **_ENV})
        except ProcessError as e:
            raise RunFailed(f"{child.name} could not be started again: {e}") from e

    async def watch_scheduler(self) -> None:
        """Ask the scheduler now and then whether it still can dispatch; raises `RunFailed` when it cannot any more."""
        async with Client(self._context.bus.address("scheduler"), Reply) as scheduler:
            while True:
                with contextlib.suppress(BusError):  # a scheduler that is gone is `watch`'s to notice
                    status = await scheduler.call(GetStatus(), deadline=10.0)
                    if status.halted:
                        raise RunFailed(f"the scheduler can dispatch nothing more: {status.halted}")
                await asyncio.sleep(_LOOK)

    async def stop(self) -> list[str]:
        """Stop everything, in order; returns what did not end as it should. Never raises for a process that is gone."""
        scheduler = self.children.get("scheduler")
        if scheduler is not None and scheduler.returncode is None:
            fault = await self._tell("scheduler", Shutdown(reason="the run ends"), Reply, deadline=5.0)
            if fault:
                self._say(fault)
        runner = self.children.get("runner")
        if runner is not None:
            await runner.stop()
        cells = [c for name, c in sorted(self.children.items()) if name.startswith("cell-")]
        faults = await asyncio.gather(*(self._stop_cell(cell) for cell in cells))
        for name in ("proxy", "feed", "scheduler"):
            if (child := self.children.get(name)) is not None:
                await child.stop()
        return [fault for fault in faults if fault]

    async def _stop_cell(self, cell: Child) -> str:
        """End a cell; returns what went wrong, "" if nothing did."""
        fault = ""
        if cell.returncode is None:
            service = cell.name.replace("cell", "agent")
            fault = await self._tell(service, StopCell(), AgentReply, deadline=_EXPORT)
        code = await cell.stop()
        return fault or (f"{cell.name} ended with exit code {code}; {cell.tail()}" if code else "")

    async def _tell(self, service: str, request: Any, replies: Any, *, deadline: float) -> str:
        """Ask a process to end its work well; returns why it did not, "" if it did. It is ended all the same."""
        async with Client(self._context.bus.address(service), replies) as client:
            try:
                reply = await client.call(request, deadline=deadline)
            except BusError as e:
                return f"{service} did not confirm {type(request).__name__}: {e}"
        return f"{service} failed at its end: {reply.detail}" if isinstance(reply, Failed) else ""


def _goes_on(name: str) -> bool:
    """Whether a process finds on the disk, or is told, all it needs to go on where it was."""
    return name in ("scheduler", "proxy") or (name.startswith("cell-") and name != "cell-0")
