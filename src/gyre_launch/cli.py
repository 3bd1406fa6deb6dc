"""`gyre`: run, watch and check an elastic RL run."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gyre", description="Elastic online reinforcement learning for LLM agents.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    run = commands.add_parser("run", help="run a training from its config file")
    run.add_argument("config", type=Path, help="the run's TOML file")
    run.add_argument("overrides", nargs="*", metavar="section.key=value", help="change a setting for this run")
    run.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and the process plan, start nothing"
    )
    run.add_argument("--json", action="store_true", help="print the summary as JSON at the end")

    status = commands.add_parser("status", help="what a running training does now")
    status.add_argument("run_dir", type=Path, help="its run directory")
    status.add_argument("--json", action="store_true")

    top = commands.add_parser("top", help="watch a training in this terminal, or look at one that has ended")
    top.add_argument("run_dir", type=Path, help="its run directory")

    show = commands.add_parser("summary", help="the summary of a run, made again from its files")
    show.add_argument("run_dir", type=Path)
    show.add_argument("--json", action="store_true")

    doctor = commands.add_parser("doctor", help="what this machine offers a run")
    doctor.add_argument("--json", action="store_true")

    arguments = parser.parse_args(argv)
    if arguments.version:
        from gyre_launch import __version__

        print(__version__)
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    return _guarded(arguments)


def _guarded(arguments: argparse.Namespace) -> int:
    """Run the command; an error of ours is one message and exit code 1, anything else is a bug and shows its trace."""
    from gyre_agent_proxy.errors import ProxyError
    from gyre_launch.errors import LaunchError
    from gyre_sched.errors import SchedError
    from gyre_train.errors import TrainError
    from gyre_transport.errors import TransportError

    command = {"run": _run, "status": _status, "top": _top, "summary": _summary, "doctor": _doctor}[arguments.command]
    try:
        return command(arguments)
    except (LaunchError, TransportError, SchedError, ProxyError, TrainError) as e:
        print(f"gyre {arguments.command}: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"gyre {arguments.command}: {e.strerror}: {e.filename!r}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    from gyre_launch.config import resolve

    resolved = resolve(arguments.config, arguments.overrides, convert_model=not arguments.dry_run)
    if arguments.dry_run:
        return _dry_run(resolved, arguments.json)

    from gyre_launch import run, summary

    context = run.prepare(resolved)
    print(f"run directory: {context.dir.path}", file=sys.stderr)
    result = asyncio.run(run.execute(resolved, context))
    print(json.dumps(result, indent=2) if arguments.json else summary.text(result))
    return 0


def _dry_run(resolved: Any, as_json: bool) -> int:
    import msgspec

    from gyre_launch.plan import plan

    planned = plan(resolved)
    if as_json:
        config = {name: msgspec.to_builtins(s) for name, s in resolved.sections.items()}
        print(json.dumps({"config": config, "processes": [msgspec.to_builtins(p) for p in planned]}, indent=2))
        return 0
    print(resolved.toml())
    print("# processes, in starting order")
    for p in planned:
        print(f"# {p.stage}  {p.name:10s} {' '.join(p.argv)}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    import msgspec

    from gyre_launch.view import View, lines
    from gyre_sched.protocol import GetStatus, Reply
    from gyre_transport.bus import Client
    from gyre_transport.run import Context

    context = Context(arguments.run_dir / "config.toml")

    async def ask() -> Any:
        async with Client(context.bus.address("scheduler"), Reply) as scheduler:
            return await scheduler.call(GetStatus(), deadline=5.0)

    status = asyncio.run(ask())
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(status), indent=2))
    else:
        print(lines(View(status=status, total_steps=context.run.steps))[0])
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from gyre_sched.face.top import watch

    watch(arguments.run_dir)
    return 0


def _summary(arguments: argparse.Namespace) -> int:
    from gyre_launch import summary
    from gyre_transport.run import RunDir

    result = summary.build(RunDir(arguments.run_dir))
    print(json.dumps(result, indent=2) if arguments.json else summary.text(result))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from gyre_launch import preflight

    facts = preflight.facts()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name:22s} {'missing' if value is None else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
