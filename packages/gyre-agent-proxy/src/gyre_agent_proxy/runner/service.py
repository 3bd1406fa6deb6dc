"""The runner process: bursts, one after the other, then the fates of their executions.

    open burst b ─▶ granted(capacity) ─▶ dispatch all its executions, at most `capacity` harnesses alive
         ▲                                        │ each travels to submitted (journey.py)
         └──────── all submitted ◀────────────────┘        after the last burst: wait for every fate, exit

With sched.admission = "continuous" the next burst is asked for as soon as nobody waits for a place.

Beside it: fates are polled from the feed into the ledger, counters are written to metrics/runner.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gyre_agent_proxy.config import ModelConfig, ProxyConfig, socket_path
from gyre_agent_proxy.keys import load_secret
from gyre_agent_proxy.render import context_of
from gyre_agent_proxy.runner import cleanup, dispatch, places, progress, sources
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import RunnerError
from gyre_agent_proxy.runner.execution import harness
from gyre_agent_proxy.runner.journey import Journey
from gyre_agent_proxy.runner.ledger import RUNNABLE, UNFINISHED, Ledger, State
from gyre_agent_proxy.runner.owner import alone, owner_name
from gyre_agent_proxy.runner.peers import Peers
from gyre_agent_proxy.runner.scoring import Scorer
from gyre_agent_proxy.runner.slots import Slots
from gyre_traj.intake import Fate
from gyre_transport.config import section
from gyre_transport.process import follow_parent, ready
from gyre_transport.run import Context

log = logging.getLogger(__name__)

_POLL = 0.5  # seconds between looks at the fates
_ALONE = 30.0  # seconds an earlier runner may take to end


class Runner:
    """One run's dispatching, from its resolved config."""

    def __init__(self, context: Context) -> None:
        """Validate everything that can be known before a burst is opened; raises `RunnerError` or `ConfigError`."""
        self._context = context
        self._config = config = section(context.data, "runner", RunnerConfig)
        self._proxy = proxy = section(context.data, "proxy", ProxyConfig)
        model = section(context.data, "model", ModelConfig)
        tasks = sources.load(config)
        self._tasks = {task.name: task for task in tasks}
        self._proxy_url = f"http://{proxy.host}:{proxy.port}"
        instructions = context.dir.path / "instructions"
        engine = context.data.get("engine", {})
        tokens = proxy.context or int(engine.get("context_length") or 0)
        if not tokens and model.path:
            tokens = context_of(Path(model.path))
        self._harness = harness(config, model.name, self._proxy_url, instructions, context=tokens)
        self._continuous = context.data.get("sched", {}).get("admission") == "continuous"
        self._order = dispatch.order(list(self._tasks), context.run.seed if config.order == "shuffled" else None)
        instructions.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            (instructions / f"{task.name}.md").write_text(task.instruction + "\n")
        self._scorer = Scorer(config, cleanup.scoring(context.dir))
        self._ledger = Ledger(context.dir.ledger)

    async def run(self) -> None:
        """Dispatch all bursts and return when every execution has its fate; the ledger is closed then."""
        metrics = self._context.dir.metrics / "runner.json"
        async with alone(self._context.dir.path, _ALONE):
            try:
                await self._all(metrics)
            finally:
                with contextlib.suppress(OSError):
                    progress.write(metrics, self._counters())
                self._ledger.close()

    async def _all(self, metrics: Path) -> None:
        secret = load_secret(self._context.dir.secret)
        name = owner_name(secret, self._context.dir.path)
        homes = await self._shut_in(name)
        await cleanup.clean(self._context.dir, name, self._ledger.rows(), self._config.keep_workspaces)
        async with Peers(self._context.bus, self._proxy_url) as peers:
            journey = Journey(
                self._config,
                self._context.dir,
                self._context.batch.group_size,
                self._tasks,
                self._harness,
                self._ledger,
                peers,
                self._scorer,
                secret,
                homes,
            )
            async with asyncio.TaskGroup() as tasks:
                beside = (
                    tasks.create_task(self._fates(peers), name="fates"),
                    tasks.create_task(progress.report(metrics, self._counters), name="progress"),
                )
                await self._bursts(journey, peers)
                await self._all_fates()
                for task in beside:
                    task.cancel()

    async def _shut_in(self, name: str) -> places.Places:
        """Find where harnesses and verifiers run; ends what an earlier runner left there.

        Raises `SandboxError` or `TaskError`.
        """
        bus, folder = self._context.bus, Path(self._config.folder).resolve()
        found = await places.find(
            self._config,
            self._tasks.values(),
            self._context.dir.path.resolve(),
            owner=name,
            base_url=self._proxy_url,
            socket=socket_path(self._proxy, bus),
        )
        await found.clean()
        hidden = [self._context.dir.path, *self._task_folders()]
        if bus.kind == "ipc" and not folder.is_relative_to(Path(bus.dir).resolve()):
            hidden.append(Path(bus.dir))
        self._harness = msgspec.structs.replace(self._harness, sandbox=found.sandbox, hidden=tuple(hidden), owner=name)
        self._scorer.sandbox, self._scorer.owner = found.sandbox, name
        return found

    def _task_folders(self) -> list[Path]:
        """What harnesses must not see of the tasks."""
        if self._config.tasks.startswith(sources.PREFIX):
            return [task.folder.resolve() for task in self._tasks.values()]
        return [Path(self._config.folder, self._config.tasks)]

    def _counters(self) -> progress.Counters:
        return progress.counters(self._ledger, self._scorer.failures)

    async def _bursts(self, journey: Journey, peers: Peers) -> None:
        """Dispatch all bursts; returns when all their executions were submitted."""
        slots = Slots()
        last = max((row.burst for row in self._ledger.rows()), default=0)  # an earlier runner came that far
        async with asyncio.TaskGroup() as group:
            for index in range(self._context.run.steps // self._context.batch.per_burst):
                names = await self._open(index, peers, slots, granted=index < last)
                burst = [group.create_task(journey.travel(name, slots), name=name) for name in names]
                if burst and not self._continuous:
                    await asyncio.wait(burst)
                elif index >= last:
                    await asyncio.sleep(0)  # they queue for places first, in this order: groups start one after another
                    await slots.nobody_waits()

    async def _open(self, index: int, peers: Peers, slots: Slots, *, granted: bool) -> list[str]:
        """The executions of burst `index`, in the order they start. granted: so was a later one, by which this one
        needs no grant."""
        planned = dispatch.burst(index, self._context.batch, self._order)
        before = {row.id: row for row in self._ledger.rows(index)}
        if before and not any(row.state in UNFINISHED for row in before.values()):
            return []  # an earlier runner of this run finished it
        # A replacement is counted by the scheduler once it was told, which is sure when what it replaces went further.
        counted = [r for r in before.values() if not r.replaces or before[r.replaces].state is not State.JUDGED]
        most = len(planned)
        if not granted and not (before and not any(row.state in RUNNABLE for row in counted)):
            size = self._context.batch.group_size
            tasks_of = [p.task for p in planned[::size]]
            grant = await peers.grant(index, len(planned), tasks_of, self._config.grant_within)
            most, planned = grant.capacity, dispatch.in_order(planned, grant.order, size)
            self._ledger.dispatch([(p.execution, p.task, p.group) for p in planned], index)
        # else only scoring and submission are left; the scheduler may have ended the burst
        if not granted:
            slots.resize(min(most, self._config.concurrency or most))
            log.info("burst %d: %d executions, at most %d harnesses at a time", index, len(planned), most)
        return [p.execution for p in planned]

    async def _fates(self, peers: Peers) -> None:
        since = 0
        early: list[Fate] = []  # decided before this process saw its submission accepted
        while True:
            found = await peers.fates(since)
            since = found.total
            early = [fate for fate in (*early, *found.fates) if not self._enter(fate)]
            await asyncio.sleep(_POLL)

    def _enter(self, fate: Fate) -> bool:
        if self._ledger.row(fate.execution).state is State.JUDGED:
            return False
        self._ledger.fate(fate)
        return True

    async def _all_fates(self) -> None:
        end = time.monotonic() + self._config.fates_within
        while missing := self._ledger.without_fate():
            if time.monotonic() > end:
                raise RunnerError(
                    f"{len(missing)} executions have no fate {self._config.fates_within:g} s after the last was "
                    f"submitted ({', '.join(missing[:5])} …): the feed neither trained nor excluded them; see its log"
                )
            await asyncio.sleep(_POLL)


async def serve(context: Context) -> None:
    """Run until every execution of the run has its fate, or until SIGTERM (harnesses are stopped, the ledger says so).

    Raises `RunnerError`, `ConfigError` or `KeyFileError` for what ends the run early.
    """
    follow_parent()
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(Runner(context).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stopper(running))
    ready()
    try:
        await running
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        log.warning("stopped; harnesses were ended, and the ledger says where each execution stands")
    except (BaseExceptionGroup, OSError, sqlite3.Error) as e:
        raise _explained(_first(e)) from e


def _stopper(task: asyncio.Task[None]) -> Callable[[], None]:
    """Cancel once: a second signal must not interrupt the stopping of harnesses."""
    cancelled = False

    def stop() -> None:
        nonlocal cancelled
        if not cancelled:
            cancelled = True
            task.cancel()

    return stop


def _first(found: BaseException) -> BaseException:
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _explained(e: BaseException) -> BaseException:
    """What a full disk or a lost folder looks like from here, with a remedy."""
    if isinstance(e, OSError | sqlite3.Error):
        return RunnerError(f"the run directory cannot be written: {e}; check its space and permissions, then resume")
    return e
