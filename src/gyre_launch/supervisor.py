"""Start a run's processes, notice the first that ends too early, stop all in order.

start: stage by stage, each process ready before the next stage starts
watch: the runner's exit 0 ends the run; any other exit is a failure
stop:  runner (harnesses), cells (trainers save and export, engines end), then proxy, feed, scheduler
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from gyre_launch.errors import RunFailed
from gyre_launch.plan import Planned
from gyre_sched.protocol import AgentReply, Reply, Shutdown, StopCell
from gyre_transport.bus import Client
from gyre_transport.errors import BusError
from gyre_transport.process import Child
from gyre_transport.run import Context

_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}  # spinning threads stall shared cores
_EXPORT = 180.0  # seconds a cell may take to save, export and end


class Supervisor:
    """The processes of one run."""

    def __init__(self, context: Context, planned: Sequence[Planned], say: Callable[[str], None]) -> None:
        self._context = context
        self._planned = planned
        self._say = say
        self.children: dict[str, Child] = {}

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
        self.children[p.name] = await Child.start(p.name, p.argv, log=log, env=env, ready_within=p.ready_within)

    async def watch(self) -> None:
        """Return when the runner has ended well; raises `RunFailed` when any process ends before that."""
        waits = {asyncio.create_task(child.wait()): child for child in self.children.values()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        for task in sorted(done, key=lambda t: waits[t].name == "runner"):
            child = waits[task]
            if child.name != "runner" or task.result() != 0:
                raise RunFailed(f"{child.name} ended with exit code {task.result()} during the run; {child.tail()}")

    async def stop(self) -> None:
        """Stop everything, in order; never raises for a process that is already gone."""
        scheduler = self.children.get("scheduler")
        if scheduler is not None and scheduler.returncode is None:
            await self._tell("scheduler", Shutdown(reason="the run ends"), Reply, deadline=5.0)
        runner = self.children.get("runner")
        if runner is not None:
            await runner.stop()
        cells = [c for name, c in self.children.items() if name.startswith("cell-")]
        await asyncio.gather(*(self._stop_cell(cell) for cell in cells))
        for name in ("proxy", "feed", "scheduler"):
            if (child := self.children.get(name)) is not None:
                await child.stop()

    async def _stop_cell(self, cell: Child) -> None:
        if cell.returncode is None:
            await self._tell(cell.name.replace("cell", "agent"), StopCell(), AgentReply, deadline=_EXPORT)
        await cell.stop()

    async def _tell(self, service: str, request: Any, replies: Any, *, deadline: float) -> None:
        """Ask a process to end its work well; one that does not answer is ended all the same."""
        async with Client(self._context.bus.address(service), replies) as client:
            try:
                await client.call(request, deadline=deadline)
            except BusError as e:
                self._say(f"{service} did not confirm {type(request).__name__}: {e}")
