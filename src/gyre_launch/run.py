"""One run, from the config file to the summary.

    resolve ─▶ preflight ─▶ RUN/config.toml ─▶ start ─▶ watch (progress beside it) ─▶ stop ─▶ summary, report

The same `stop` ends a finished run, a failed one and an interrupted one.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre_launch import preflight, summary
from gyre_launch.config import Resolved
from gyre_launch.errors import LaunchError, RunFailed
from gyre_launch.plan import plan
from gyre_launch.progress import Progress
from gyre_launch.supervisor import Supervisor
from gyre_sched.errors import SchedError
from gyre_sched.face.follow import Follower
from gyre_sched.face.page import write_report
from gyre_transport import keys
from gyre_transport.run import Context


def prepare(resolved: Resolved) -> Context:
    """Check, then create the run directory with its config. Raises `LaunchError`."""
    preflight.check(resolved)
    run_dir = Path(resolved.run.dir)
    try:
        for folder in ("logs", "metrics", "calls"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
        resolved.write(run_dir / "config.toml")
        if resolved.bus.kind == "ipc":
            Path(resolved.bus.dir).mkdir(mode=0o700, parents=True)
        elif resolved.bus.keys and not Path(resolved.bus.keys).exists():
            keys.make(Path(resolved.bus.keys))
        if resolved.engine.key and not Path(resolved.engine.key).exists():
            keys.make_token(Path(resolved.engine.key))
    except OSError as e:
        raise LaunchError(f"cannot create the run directory {str(run_dir)!r}: {e.strerror}; set run.dir") from e
    return Context(run_dir / "config.toml")


async def execute(resolved: Resolved, context: Context) -> dict[str, Any]:
    """Run to the end and return the summary, written to summary.json however the run ends.

    SIGINT and SIGTERM stop everything in order and raise `RunFailed` that says what can be resumed. Raises `RunFailed`
    and transport errors.
    """
    progress = Progress(context, resolved.metrics)
    supervisor = Supervisor(context, plan(resolved), progress.say)
    loop = asyncio.get_running_loop()
    main = asyncio.create_task(_main(supervisor))
    stopped: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        if stopped:
            progress.say("still stopping; processes end by themselves when this one is killed")
            return
        stopped.append(number)
        progress.say("stopping in order: runner, cells, proxy, feed, scheduler")
        main.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    watching = asyncio.create_task(progress.follow())
    interrupted = False
    try:
        await main
    except asyncio.CancelledError:
        if not stopped:
            raise
        interrupted = True
    finally:
        faults = await supervisor.stop()
        await progress.finish(watching)
        if resolved.bus.kind == "ipc":
            shutil.rmtree(resolved.bus.dir, ignore_errors=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        result = summary.build(context.dir)
        summary.write(result, context.dir.summary)
        report(context, progress.say)
    if interrupted:
        raise RunFailed(f"stopped by {stopped[0].name}; {resumable(context)}")
    if faults:
        raise RunFailed("the run was trained to its end, but it did not end well: " + "; ".join(faults))
    return result


def report(context: Context, say: Callable[[str], None]) -> None:
    """Write RUN/report.html, the run's page as it ended; without one the run ended all the same."""
    try:
        write_report(Follower(context.dir.path).look(), context.dir.report)
    except SchedError as e:
        say(f"no report: {e}")
    else:
        say(f"report: {context.dir.report}")


async def _main(supervisor: Supervisor) -> None:
    await supervisor.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            halt = tasks.create_task(supervisor.watch_scheduler())
            await supervisor.watch()
            halt.cancel()
    except ExceptionGroup as e:
        raise e.exceptions[0] from None


def resumable(context: Context) -> str:
    """What an interrupted run leaves behind, in words."""
    kept = sorted(context.dir.checkpoints.glob("step-*"), key=lambda p: int(p.name.partition("-")[2]))
    logs = sum(1 for _ in context.dir.calls.glob("*.gtraj"))
    last = f"the last complete checkpoint is {str(kept[-1])!r}" if kept else "no checkpoint was complete"
    return f"{last}; {logs} call logs are in {str(context.dir.calls)!r}"
