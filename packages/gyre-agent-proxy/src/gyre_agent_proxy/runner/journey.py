"""An execution's way through the runner: from dispatched to submitted, one ledger step at a time.

    dispatched ─ start ─▶ started ─ it ends, or its budget does ─▶ terminated ─ score ─▶ judged ─ submit ─▶ submitted
                                                                       no result: another one is dispatched ─▶ …

Each step begins from what the ledger says, so the same code carries on after the runner itself was restarted: a harness
that ran then has ended with the runner ("lost"), and what its workspace holds is scored.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from gyre_agent_proxy.keys import make_key
from gyre_agent_proxy.runner import cleanup, refill
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.containers import ContainerError
from gyre_agent_proxy.runner.errors import HarnessError
from gyre_agent_proxy.runner.execution import Harness, finish, start
from gyre_agent_proxy.runner.ledger import RUNNABLE, UNFINISHED, Ledger, State
from gyre_agent_proxy.runner.owner import mark
from gyre_agent_proxy.runner.peers import Closed, Peers
from gyre_agent_proxy.runner.places import Place, Places
from gyre_agent_proxy.runner.scoring import Scorer
from gyre_agent_proxy.runner.slots import Slots
from gyre_agent_proxy.runner.tasks import Task
from gyre_agent_proxy.runner.workspace import prepare
from gyre_traj.intake import Ending, Outcome, Submit
from gyre_transport.errors import ProcessError
from gyre_transport.run import RunDir

log = logging.getLogger(__name__)

_NO_START = "could not start: "
_LOST = "lost"


class Suspicion:
    """Notices a harness that can do nothing: the first `enough` executions all failed without anything to score."""

    def __init__(self, enough: int) -> None:
        self._left: int | None = enough

    def saw(self, why: str, outcome: Outcome, harness_log: Path) -> None:
        """Look at one execution; raises `HarnessError` when the first ones failed, all of them."""
        if self._left is None:
            return
        if why == "exit 0" or not why.startswith("exit ") or outcome.ending is not Ending.NOTHING_TO_SCORE:
            self._left = None
            return
        self._left -= 1
        if self._left == 0:
            raise HarnessError(
                f"the harness failed ({why}) in every execution so far and left nothing to score; correct the harness "
                f"and start again; its log {str(harness_log)!r} ends:\n{_end(harness_log)}"
            )


class Journey:
    """Takes executions from wherever the ledger has them to submitted; what all executions of a run share."""

    def __init__(
        self,
        config: RunnerConfig,
        folders: RunDir,
        group_size: int,
        tasks: dict[str, Task],
        harness: Harness,
        ledger: Ledger,
        peers: Peers,
        scorer: Scorer,
        secret: bytes,
        places: Places | None = None,
    ) -> None:
        self._config = config
        self._dir = folders
        self._group_size = group_size
        self._tasks = tasks
        self._harness = harness
        self._ledger = ledger
        self._peers = peers
        self._scorer = scorer
        self._secret = secret
        self._places = places
        self._suspicion = Suspicion(group_size)

    async def travel(self, name: str, slots: Slots) -> None:
        """Take execution `name`, and each one that replaces it, to submitted.

        `slots` is held from before a start until the scheduler knows the end. Cancelling stops the harness and judges
        the execution ABORTED; one that was not started stays dispatched.
        Raises `HarnessError` and `PeerError`, after which no execution can get any further.
        """
        while name:
            await self._one(name, slots)
            name = self._ledger.row(name).replaced_by

    async def _one(self, name: str, slots: Slots) -> None:
        row = self._ledger.row(name)
        if row.state not in UNFINISHED:
            return
        async with slots:
            if row.state is State.DISPATCHED:
                await self._run(name, self._tasks[row.task])
            elif row.state is State.STARTED:
                self._ledger.terminated(name, _LOST)
            await cleanup.removal(self._home(name))
            closed = await self._peers.close_execution(name, make_key(self._secret, name))
            ended = self._ledger.row(name)
            if ended.state is State.TERMINATED and ended.why.startswith(_NO_START):
                self._ledger.judged(name, Outcome(ending=Ending.ABORTED, detail=ended.why), closed.calls)
            # A judged one is told of, too: the runner may have been stopped before it said so.
            if not await self._replaced(name):
                await self._peers.terminated(name, again=row.state not in RUNNABLE)
        row = self._ledger.row(name)
        if row.state is State.TERMINATED:
            outcome = await self._judge(name, self._tasks[row.task], row.why, closed)
            self._ledger.judged(name, outcome, closed.calls)
            await self._replaced(name)
            self._suspicion.saw(row.why, outcome, self._log(name))
        await self._submit(name)

    async def _replaced(self, name: str) -> bool:
        """Whether another execution is dispatched in place of `name` (the scheduler knows): one without a result."""
        row = self._ledger.row(name)
        if row.state is not State.JUDGED or not refill.replaceable(row.ending):
            return False
        row = self._ledger.refill(name, self._config.refills)
        if row.replaced_by and (declined := await self._peers.replace(name, row.replaced_by, row.burst)):
            self._ledger.withdraw(name, f"the scheduler declined: {declined}")
            row = self._ledger.row(name)
        without = f"{name} ended without a result ({row.ending}: {row.detail})"
        if not row.replaced_by:
            log.warning("%s and is not replaced: %s; group %s goes on without it", without, row.not_replaced, row.grp)
            return False
        log.warning("%s and is replaced by %s", without, row.replaced_by)
        return True

    def _log(self, name: str) -> Path:
        return self._dir.logs / "harness" / f"{name}.log"

    def _workspace(self, name: str) -> Path:
        return self._dir.workspaces / name

    def _home(self, name: str) -> Path:
        return cleanup.homes(self._dir) / name

    def _prepare(self, name: str, task: Task) -> None:
        for folder in (self._workspace(name), self._home(name)):
            mark(folder, self._harness.owner, name)
        prepare(task, self._workspace(name))

    async def _at(self, task: Task) -> tuple[Task, Place]:
        """The task as it is where it runs, and where that is. Raises `ContainerError`."""
        return (task, self._harness.sandbox) if self._places is None else await self._places.of(task)

    async def _run(self, name: str, task: Task) -> None:
        why = ""
        place: Place = self._harness.sandbox
        try:
            task, place = await self._at(task)
            await asyncio.to_thread(self._prepare, name, task)
        except ContainerError as e:
            log.error("%s: %s", name, e)
            why = f"{_NO_START}{e}"
        self._ledger.started(name)
        try:
            await self._peers.started(name, task.name)
            why = why or await self._hold(name, task, place)
        except asyncio.CancelledError:
            self._ledger.terminated(name, refill.STOPPED)
            self._ledger.judged(name, Outcome(ending=Ending.ABORTED, detail="the run was stopped"))
            raise
        except HarnessError as e:
            self._ledger.terminated(name, f"{_NO_START}{e}")
            raise
        self._ledger.terminated(name, why)

    async def _hold(self, name: str, task: Task, place: Place) -> str:
        """Run the harness within its budget; returns how it ended. Raises `ContainerError` if it may not have."""
        key = make_key(self._secret, name)
        harness = msgspec.structs.replace(self._harness, sandbox=place)
        try:
            try:
                child = await start(harness, task, name, key, self._workspace(name), self._log(name), self._home(name))
                end = await finish(child, min(self._config.budget, task.agent_timeout or self._config.budget))
            finally:
                await place.ended(name)
        except (ProcessError, OSError) as e:  # the machine's doing, not the harness's: no process or file handle left
            log.error("%s: %s", name, e)
            return f"{_NO_START}{e}"
        return end.why

    async def _judge(self, name: str, task: Task, why: str, closed: Closed) -> Outcome:
        try:
            task, place = await self._at(task)
        except ContainerError as e:
            return Outcome(ending=Ending.EVALUATOR_FAILED, detail=str(e))
        outcome = await self._scorer.score(task, name, self._workspace(name), place)
        if outcome.ending is Ending.NOTHING_TO_SCORE:  # which may not be the harness's doing
            if why == _LOST:
                return Outcome(ending=Ending.ABORTED, detail="the runner ended while the harness ran; nothing to score")
            if closed.failing:
                return Outcome(ending=Ending.ABORTED, detail=f"its last call failed: {closed.failing}")
        return outcome

    async def _submit(self, name: str) -> None:
        row = self._ledger.row(name)
        assert row.ending is not None  # noqa: S101  (a judged row has it)
        await self._peers.submit(
            Submit(
                execution=name,
                task=row.task,
                group=row.grp,
                group_size=self._group_size,
                log=str(self._dir.log(name)),
                outcome=Outcome(ending=row.ending, score=row.score, detail=row.detail),
                seconds=max(0.0, (row.terminated or row.dispatched) - row.dispatched),
                burst=row.burst,
                replaced_by=row.replaced_by,
            )
        )
        self._ledger.submitted(name)
        if not cleanup.keeps(self._config.keep_workspaces, row.ending):
            await cleanup.removal(self._workspace(name))


def _end(path: Path, characters: int = 2000) -> str:
    try:
        with path.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - characters))
            return f.read().decode(errors="replace")
    except OSError as e:
        return f"(cannot be read: {e.strerror})"
