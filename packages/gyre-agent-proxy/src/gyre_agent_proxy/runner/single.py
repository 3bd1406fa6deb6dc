"""One execution by itself: a proxy, a harness, its end, its score and its tree; no scheduler and no feed.

    engines answer? ─▶ proxy ─▶ workspace ─▶ harness ─▶ it ends, or its budget does ─▶ log complete ─▶ scored, if the
                                                                                       task has a verifier

All that remains of it is in one folder: workspaces/, calls/, logs/, and the task when it was made of an instruction.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from gyre_agent_proxy.config import ModelConfig, ProxyConfig
from gyre_agent_proxy.keys import load_secret, make_key
from gyre_agent_proxy.render import context_of
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import RunnerError
from gyre_agent_proxy.runner.execution import End, finish, harness, start
from gyre_agent_proxy.runner.owner import owner_name
from gyre_agent_proxy.runner.places import find
from gyre_agent_proxy.runner.scoring import Scorer
from gyre_agent_proxy.runner.tasks import Task, load_task
from gyre_agent_proxy.runner.workspace import prepare
from gyre_agent_proxy.serve import Proxy, proxy
from gyre_traj.intake import Outcome
from gyre_traj.log import Log, read_log
from gyre_transport.run import RunDir

EXECUTION = "e0"  # its name: there is one
_REACH = 10.0  # seconds for an engine to answer at all
_LOOK = 1.0  # seconds between looks at the counters

Say = Callable[[str], None]


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How the execution ended and where its parts are."""

    task: str
    end: End
    outcome: Outcome | None  # None: the task has no verifier
    counters: dict[str, int]  # the proxy's
    workspace: Path
    log: Path  # of the calls
    output: Path  # what the harness printed

    def calls(self) -> Log | None:
        """Its call log, None if it made no call. Raises `LogError`."""
        return read_log(self.log) if self.log.is_file() else None


def asked(instruction: str, folder: Path, environment: Path | None = None) -> Task:
    """Make a task without a verifier in `folder`; environment: a folder to copy into the workspace.

    Raises `TaskError` for an empty instruction and `RunnerError` where the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True)
        (folder / "task.toml").touch()
        (folder / "instruction.md").write_text(instruction)
        if environment is not None:
            shutil.copytree(environment, folder / "environment", symlinks=True)
    except (OSError, shutil.Error) as e:
        raise RunnerError(f"cannot make the task in {str(folder)!r}: {e}") from e
    return load_task(folder, scored=False)


async def execute(
    config: RunnerConfig, serving: ProxyConfig, model: ModelConfig, task: Task, folder: Path, say: Say
) -> Finished:
    """Run one execution of `task` and keep what it leaves in `folder`; `say` is told how it goes on.

    Cancelling ends the harness and the proxy. Raises `RunnerError` and what `serve.proxy` raises.
    """
    kept = RunDir(folder)
    tokens = serving.context or context_of(Path(model.path))
    program = harness(config, model.name, "", kept.path / "instructions", context=tokens)
    await _reach(serving.engines)
    secret = load_secret(kept.secret)
    async with contextlib.AsyncExitStack() as stack:
        # A sandbox reaches the proxy by a unix socket, whose path must be short.
        socket = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-")), "proxy", "http")
        # Codex names no limit, and gives up when an answer ends at one.
        serving = msgspec.structs.replace(serving, default_max_tokens=program.output, socket=str(socket))
        counts = kept.metrics / "proxy.json"
        running = await stack.enter_async_context(
            proxy(serving, model, calls=kept.calls, secret=secret, metrics=counts)
        )
        owner = owner_name(secret, kept.path)
        places = await find(config, [task], kept.path.resolve(), owner=owner, base_url=running.url, socket=socket)
        if config.sandbox == "container" or places.client is not None:
            say("making the container's image, or finding it")
        task, place = await places.of(task)
        hidden = (kept.path, task.folder.resolve())
        program = msgspec.structs.replace(program, base_url=running.url, sandbox=place, hidden=hidden)
        say(f"proxy at {running.url}/v1, engines {', '.join(serving.engines)}")
        workspace, output = kept.workspaces / EXECUTION, kept.logs / "harness.log"
        home = kept.path / "homes" / EXECUTION
        await asyncio.to_thread(prepare, task, workspace)
        program.instructions.mkdir(parents=True, exist_ok=True)
        (program.instructions / f"{task.name}.md").write_text(task.instruction + "\n")
        budget = min(config.budget, task.agent_timeout or config.budget)
        telling = asyncio.create_task(_tell(running, say), name="progress")
        try:
            say(f"harness started in {str(workspace)!r}, {budget:g} s at most; it prints to {str(output)!r}")
            child = await start(program, task, EXECUTION, make_key(secret, EXECUTION), workspace, output, home)
            end = await finish(child, budget)
        finally:
            telling.cancel()
            await place.ended(EXECUTION)
            await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
        calls = await running.service.close(EXECUTION)
        say(f"harness ended after {end.seconds:.1f} s ({end.why}); {calls} calls")
        counters = dict(running.service.metrics.counts)
    outcome = None
    if task.verifier:
        say("scoring")
        outcome = await Scorer(config, kept.path / "scoring", place).score(task, EXECUTION, workspace)
    return Finished(
        task=task.name,
        end=end,
        outcome=outcome,
        counters=counters,
        workspace=workspace,
        log=kept.log(EXECUTION),
        output=output,
    )


async def _reach(engines: Sequence[str]) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REACH)) as session:
        for url in engines:
            try:
                async with session.get(f"{url.rstrip('/')}/health"):
                    pass  # any answer will do: the calls say the rest
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                problem = str(e) or f"no answer in {_REACH:g} s"
                raise RunnerError(
                    f"the engine at {url!r} cannot be reached: {problem}; start it, or correct --engine"
                ) from e


async def _tell(running: Proxy, say: Say) -> None:
    seen: tuple[int, ...] = ()
    while True:
        counts = running.service.metrics.counts
        now = (counts["calls"], counts["prompt_tokens"], counts["completion_tokens"], counts["calls_failed"])
        if now != seen and any(now):
            failed = f", {now[3]} failed" if now[3] else ""
            say(f"{now[0]} calls, {now[1]:,} prompt and {now[2]:,} sampled tokens{failed}")
            seen = now
        await asyncio.sleep(_LOOK)
