"""gyre-agent-proxy run | harnesses | tasks"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_agent_proxy.runner.single import Finished

HARNESS_FAILED, NO_SCORE = 3, 4

_RUN = """\
Start the proxy, run one execution under a harness, score it if the task has a verifier, print outcome and tree.

exit codes: 0 the harness ended with exit code 0, and there is a score if there is a verifier; 1 it could not be run;
2 wrong usage; 3 the harness failed or its budget ended it; 4 no score although the task has a verifier
"""


def add(commands: Any) -> None:
    """Add the three commands to the parser's sub-commands."""
    run = commands.add_parser(
        "run",
        help="run one task under one harness, print outcome and tree",
        description=_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program = run.add_mutually_exclusive_group(required=True)
    program.add_argument("--harness", metavar="NAME", help="a harness that is built in, or a TOML file like theirs")
    program.add_argument("--command", dest="program", metavar="COMMAND", help="any other, with placeholders")
    task = run.add_mutually_exclusive_group(required=True)
    task.add_argument("--task", type=Path, metavar="FOLDER", help="a task folder in Harbor's layout")
    task.add_argument("--instruction", metavar="TEXT", help="what the agent is asked")
    run.add_argument("--workspace", type=Path, metavar="FOLDER", help="with --instruction: copied for the agent")
    run.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the harness; repeatable")
    run.add_argument("--engine", action="append", required=True, metavar="URL", help="an SGLang server; repeatable")
    run.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="the Hugging Face folder they serve")
    run.add_argument("--name", default="", help="what the harness calls the model (default: the folder's name)")
    run.add_argument("--template", default="auto", help="auto, chatml, or a name of the renderers package")
    run.add_argument("--context", type=int, default=0, help="tokens an engine takes (default: what the model says)")
    run.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="default: %(default)g")
    run.add_argument("--tokens", type=int, default=0, help="that may be sampled in all (default: no bound)")
    run.add_argument(
        "--sandbox", choices=("auto", "bubblewrap", "container", "none"), default="auto", help="default: %(default)s"
    )
    run.add_argument("--image", default="", metavar="NAME", help="of the container, if the task brings none")
    run.add_argument("--network", choices=("proxy", "host"), default="proxy", help="what is reached from the sandbox")
    run.add_argument("--out", type=Path, metavar="FOLDER", help="where all of it is kept (default: a new one in runs/)")
    run.add_argument("--json", action="store_true", help="print the result as JSON")
    known = commands.add_parser("harnesses", help="list the harnesses that are built in")
    known.add_argument("--json", action="store_true")
    tasks = commands.add_parser("tasks", help="list the tasks of a folder or of a Harbor dataset, which is fetched")
    tasks.add_argument("source", help="a folder, harbor:NAME@VERSION or harbor:./FOLDER, as in runner.tasks")
    tasks.add_argument("--registry", default="", metavar="FILE|URL", help="where Harbor looks (default: its own)")
    tasks.add_argument("--only", action="append", default=[], metavar="PATTERN", help="of names; repeatable")
    tasks.add_argument("--except", dest="leave", action="append", default=[], metavar="PATTERN", help="repeatable")
    tasks.add_argument("--into", type=Path, metavar="FOLDER", help="copy them into a new folder of task folders")
    tasks.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """`gyre-agent-proxy run`. Raises `ProxyError`, `TransportError` or `TrajError`."""
    import asyncio

    from gyre_agent_proxy.config import ModelConfig, ProxyConfig
    from gyre_agent_proxy.runner.config import RunnerConfig
    from gyre_agent_proxy.runner.errors import RunnerError
    from gyre_agent_proxy.runner.single import asked, execute
    from gyre_agent_proxy.runner.tasks import load_task

    try:
        program = args.harness or tuple(shlex.split(args.program))
        config = RunnerConfig(
            harness=program,
            folder=str(Path.cwd()),
            env=_environment(args.env),
            budget=args.budget,
            sandbox=args.sandbox,
            sandbox_network=args.network,
            container_image=args.image,
        )
        serving = ProxyConfig(
            engines=tuple(args.engine), template=args.template, context=args.context, token_budget=args.tokens
        )
    except ValueError as e:
        raise RunnerError(f"{e}; correct the command line") from e
    label = _label(program if isinstance(program, str) else "".join(program[:1]))
    out: Path = (args.out or Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunnerError(f"--out {str(out)!r} is not an empty folder; name another")
    if not args.model.is_dir():
        raise RunnerError(
            f"--model {str(args.model)!r} is not a folder; give the Hugging Face folder the engines serve"
        )
    model = ModelConfig(path=str(args.model), name=args.name or args.model.resolve().name)
    task = load_task(args.task, scored=False) if args.task else asked(args.instruction, out / "task", args.workspace)
    say = lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)  # noqa: E731
    finished = asyncio.run(_ended_by_signals(execute(config, serving, model, task, out, say)))
    _show(finished, as_json=args.json)
    if finished.end.why != "exit 0":
        return HARNESS_FAILED
    return NO_SCORE if finished.outcome is not None and finished.outcome.score is None else 0


async def _ended_by_signals(execution: Coroutine[Any, Any, Finished]) -> Finished:
    """SIGTERM does what SIGINT does. Raises `KeyboardInterrupt` once harness and proxy have ended."""
    import asyncio
    import signal

    running = asyncio.ensure_future(execution)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _environment(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--env takes NAME=VALUE, got {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)


def _label(program: str) -> str:
    return "".join(c for c in Path(program).name.removesuffix(".toml") if c.isalnum() or c in "._-") or "command"


def _show(finished: Finished, *, as_json: bool) -> None:
    from gyre_traj.report import describe, render
    from gyre_traj.tree import Tree

    log = finished.calls()
    tree = Tree.from_log(log) if log is not None else None
    if as_json:
        import msgspec

        report = {
            "task": finished.task,
            "harness": finished.end,
            "outcome": finished.outcome,
            "counters": finished.counters,
            "workspace": str(finished.workspace),
            "log": str(finished.log) if log is not None else None,
            "output": str(finished.output),
            "tree": describe(tree) if tree is not None else None,
        }
        print(msgspec.json.encode(report).decode())
        return
    outcome, end = finished.outcome, finished.end
    print(f"task       {finished.task}")
    print(f"harness    {end.why} after {end.seconds:.1f} s; it printed {str(finished.output)!r}")
    if outcome is None:
        print("outcome    not scored: the task has no verifier")
    else:
        score = "" if outcome.score is None else f" {outcome.score:g}"
        print(f"outcome    {outcome.ending.value}{score}{f' ({outcome.detail})' if outcome.detail else ''}")
    print(f"workspace  {str(finished.workspace)!r}")
    odd = {n: v for n, v in finished.counters.items() if v and n in _ODD}
    print(f"noticed    {', '.join(f'{n} {v}' for n, v in odd.items()) or 'nothing odd'}")
    print(f"calls      {str(finished.log)!r}" if log is not None else "calls      none")
    if tree is not None:
        print()
        print(render(tree))


_ODD = (
    *("calls_failed", "calls_refused", "calls_aborted", "calls_untrainable", "engine_failures", "undelivered"),
    *("forks", "foreign_turns", "unknown_roles", "media_omitted", "left_out", "tools_ignored"),
)


def show_tasks(args: argparse.Namespace) -> int:
    """`gyre-agent-proxy tasks`. Raises `RunnerError`."""
    import shutil

    import msgspec

    from gyre_agent_proxy.runner import sources
    from gyre_agent_proxy.runner.config import RunnerConfig
    from gyre_agent_proxy.runner.errors import RunnerError

    config = RunnerConfig(
        tasks=args.source,
        folder=str(Path.cwd()),
        harbor_registry=args.registry,
        tasks_only=tuple(args.only),
        tasks_except=tuple(args.leave),
    )
    if args.into is not None and args.into.exists():
        raise RunnerError(f"--into {str(args.into)!r} is there already; name a new folder")
    tasks = sources.load(config)
    if args.into is not None:
        partial = args.into.with_name(f"{args.into.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            for task in tasks:
                shutil.copytree(task.folder, partial / task.name)
            partial.rename(args.into)
        except (OSError, shutil.Error) as e:
            raise RunnerError(f"the tasks cannot be copied into {str(args.into)!r}: {e}; check its space") from e
    if args.json:
        shown = [{"name": task.name, "folder": str(task.folder), "machine": task.machine} for task in tasks]
        print(msgspec.json.encode(shown).decode())
        return 0
    for task in tasks:
        where = task.machine.image or ("Dockerfile" if task.machine.dockerfile else "")
        print(f"{task.name:40} {where:30} {task.folder}")
    return 0


def show_harnesses(args: argparse.Namespace) -> int:
    """`gyre-agent-proxy harnesses`."""
    import shutil

    from gyre_agent_proxy.runner import harnesses

    found = {name: harnesses.load(name) for name in harnesses.names()}
    if args.json:
        import msgspec

        print(msgspec.json.encode(found).decode())
        return 0
    for name, adapter in found.items():
        here = "installed" if shutil.which(adapter.command[0]) else "not found"
        print(f"{name:15} {adapter.dialect:10} {', '.join(adapter.versions):10} {here:10} {adapter.install}")
    return 0
