"""The life of a cell's trainer process: what it is, what it should be, and starting it again when it ends.

trainer ── TrainerReport(state) ──▶ report ──▶ TrainerOrder(want)      held back while state == want
agent ── become("training" | "idle") ──▶ waits until the trainer reports it

A trainer finds a name of its own, its instance, in the environment variable GYRE_TRAINER, and reports it: what one that
has ended still had under way is not taken for its successor's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gyre_sched.attempts import Attempts
from gyre_sched.errors import TrainerError
from gyre_sched.protocol import TrainerOrder, TrainerReport
from gyre_transport.errors import ProcessError
from gyre_transport.process import Child

log = logging.getLogger(__name__)

_LONGEST = 30.0  # seconds a report is held back at most
STATES = ("starting", "idle", "training")
INSTANCE = "GYRE_TRAINER"  # the environment variable


class TrainerHost:
    """Owns one trainer, or none while it was not started. `changed` is called whenever `alive`, `state` or `detail`
    does."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_file: Path,
        env: Mapping[str, str],
        attempts: Attempts,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.state = "starting"  # as it reported last
        self.want = "idle"
        self.detail = ""  # why it is not alive
        self._argv = list(argv)
        self._log_file = log_file
        self._env = dict(env)
        self._attempts = attempts
        self._given_up = False
        self._changed = changed
        self._child: Child | None = None
        self._instance = ""  # of the process that runs
        self._news = asyncio.Condition()

    @property
    def alive(self) -> bool:
        """Up, and it has reported in."""
        return self._child is not None and self._child.returncode is None and self.state != "starting"

    @property
    def pid(self) -> int | None:
        """Process id; None while there is none."""
        return self._child.pid if self._child else None

    async def report(self, message: TrainerReport) -> TrainerOrder:
        """Take a report; answers at once when another state is wanted, else after at most `message.wait` seconds.

        Raises `TrainerError`: an unknown state, or another process than the one that runs.
        """
        if message.state not in STATES:
            raise TrainerError(f"expected a trainer state of {STATES}, got {message.state!r}")
        if message.instance and message.instance != self._instance:
            raise TrainerError(
                f"expected a report of {self.name}'s instance {self._instance!r}, got one of {message.instance!r}, "
                "which has ended"
            )
        async with self._news:
            if self.state != message.state:
                if self.state == "starting":
                    self.detail = ""
                self.state = message.state
                self._news.notify_all()
                self._changed()
            try:
                async with asyncio.timeout(min(message.wait, _LONGEST)):
                    await self._news.wait_for(lambda: self.want != message.state)
            except TimeoutError:
                pass
            return TrainerOrder(want=self.want)

    async def order(self, want: str) -> None:
        """Say what the trainer should be, without waiting."""
        async with self._news:
            self.want = want
            self._news.notify_all()

    def require(self) -> None:
        """Raise `TrainerError` when there is no trainer, or it was given up: it will never enter again."""
        if self._child is None:
            raise TrainerError(f"{self.name} was never started: this cell only samples, and does not train")
        if self._given_up:
            raise TrainerError(f"{self.name} {self.detail}")

    async def become(self, want: str, *, deadline: float) -> None:
        """Order `want` and wait until the trainer is that. A trainer that has ended counts as idle: it holds nothing.

        Raises `TrainerError` at the deadline, or when the trainer was given up.
        """
        await self.order(want)

        def settled() -> bool:
            return self._given_up or self.state == want or (want == "idle" and self.state == "starting")

        try:
            async with self._news, asyncio.timeout(deadline):
                await self._news.wait_for(settled)
        except TimeoutError:
            raise TrainerError(
                f"{self.name} was ordered {want!r} and is {self.state!r} after {deadline:g} s; see "
                f"{str(self._log_file)!r}"
            ) from None
        if want != "idle":
            self.require()

    # --- the process ------------------------------------------------------------------------------------------------

    async def start(self, *, deadline: float) -> None:
        """Start the process and wait for its first report. Raises `TrainerError`, nothing left running."""
        await self._launch()
        child = self._child
        assert child is not None  # noqa: S101  (just started)
        ended = asyncio.ensure_future(child.wait())
        here = asyncio.ensure_future(self._reported())
        try:
            await asyncio.wait({ended, here}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
            if not here.done():
                how = f"ended with exit code {ended.result()}" if ended.done() else f"was silent for {deadline:g} s"
                raise TrainerError(f"{self.name} {how} before it reported in; {child.tail()}")
        except BaseException:
            await child.stop()
            raise
        finally:
            ended.cancel()
            here.cancel()
            await asyncio.gather(ended, here, return_exceptions=True)

    async def _reported(self) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self.state != "starting")

    async def _launch(self) -> None:
        self._instance = secrets.token_hex(8)
        env = {**self._env, INSTANCE: self._instance}
        try:
            self._child = await Child.start(self.name, self._argv, log=self._log_file, env=env, ready_within=None)
        except ProcessError as e:
            raise TrainerError(f"{e} (sched.trainer)") from e

    async def watch(self) -> None:
        """Start the trainer again whenever it ends unordered. Raises `TrainerError` when it was given up."""
        while self._child is not None:
            code = await self._child.wait()
            if self.want == "stop":
                return
            self.detail = f"ended with exit code {code}; {self._child.tail()}"
            log.warning("%s %s", self.name, self.detail)
            self._given_up = not self._attempts.again(time.monotonic())
            async with self._news:
                self.state = "starting"
                self._news.notify_all()
            self._changed()
            if self._given_up:
                raise TrainerError(f"{self.name} ended {self._attempts.ends} times and was given up: it {self.detail}")
            await self._launch()

    async def finish(self, *, deadline: float) -> None:
        """Order it to save what must be saved and to exit. Raises `TrainerError` unless it exits with 0 by then."""
        await self.order("stop")
        if self._child is None:
            return
        try:
            async with asyncio.timeout(deadline):
                code = await self._child.wait()
        except TimeoutError:
            raise TrainerError(f"{self.name} did not stop in {deadline:g} s; {self._child.tail()}") from None
        if code:
            raise TrainerError(f"{self.name} ended with exit code {code} when it was to stop; {self._child.tail()}")

    async def stop(self) -> None:
        """End it now: SIGTERM, then the hard end."""
        self.want = "stop"
        if self._child is not None:
            await self._child.stop()
