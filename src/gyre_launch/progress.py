"""Progress of a run on the terminal: live lines on a screen, plain lines elsewhere.

Everything shown is asked for or read; nothing here can disturb the run: a process that does not answer is shown as is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gyre_launch.trackers import MetricsConfig, Trackers
from gyre_launch.view import View, lines, step_table, switch_line
from gyre_sched.face.readings import read_counters, read_steps
from gyre_sched.protocol import Event, GetStatus, Publication, Reply
from gyre_transport.bus import Client, Subscriber
from gyre_transport.errors import BusError
from gyre_transport.run import Context

_PERIOD = 1.0  # seconds between looks
_PLAIN_PERIOD = 15.0  # seconds between blocks of lines where there is no screen


class Progress:
    """Follow a run and print it."""

    def __init__(self, context: Context, metrics: MetricsConfig) -> None:
        self._context = context
        self._console = Console()
        self._view = View(total_steps=context.run.steps, executions=context.run.steps * context.batch.executions)
        self._live: Live | None = None
        self._shown_steps = 0
        self._plain_at = time.monotonic()
        self._started = time.monotonic()
        self._trackers = Trackers(metrics, context.dir.metrics, context.run.name, self.say)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(f"{self._elapsed()} {text}", markup=False, highlight=False, soft_wrap=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"[{minutes:3d}:{seconds:02d}]"

    async def follow(self) -> None:
        """Run until cancelled."""
        with contextlib.ExitStack() as stack:
            if self._console.is_terminal:
                self._live = stack.enter_context(Live(console=self._console, refresh_per_second=4, transient=True))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look())
                tasks.create_task(self._listen())

    async def finish(self, task: asyncio.Task[None]) -> None:
        """Stop following; show the steps that ended last."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._live = None
        self._steps()
        self._trackers.close()

    async def _listen(self) -> None:
        async with Subscriber(self._context.bus.address("scheduler.events"), Publication) as events:
            while True:
                try:
                    message = await events.receive()
                except BusError:
                    continue  # silent or restarting: the status line tells
                if isinstance(message, Event) and (line := switch_line(message)) is not None:
                    self.say(line)

    async def _look(self) -> None:
        async with Client(self._context.bus.address("scheduler"), Reply) as scheduler:
            while True:
                with contextlib.suppress(BusError):
                    self._view.status = await scheduler.call(GetStatus(), deadline=2.0)
                self._view.runner = read_counters(self._context.dir.metrics / "runner.json") or self._view.runner
                self._view.proxy = read_counters(self._context.dir.metrics / "proxy.json") or self._view.proxy
                self._steps()
                self._draw()
                await asyncio.sleep(_PERIOD)

    def _steps(self) -> None:
        self._view.steps = read_steps(self._context.dir.metrics / "steps.jsonl")
        for step in self._view.steps[self._shown_steps :]:
            self.say(f"step {step.get('step')} done")
            self._console.print(step_table(step), markup=False, highlight=False, soft_wrap=True)
            self._trackers.step(step)
        self._shown_steps = len(self._view.steps)

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(Text("\n".join((self._elapsed(), *lines(self._view)))))
        elif time.monotonic() - self._plain_at >= _PLAIN_PERIOD:
            self._plain_at = time.monotonic()
            for line in lines(self._view):
                self.say(line)
