"""gyre-sched: serve the scheduler or a cell agent, ask a scheduler for its status, read a journal."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from gyre_sched import __version__
from gyre_sched.cli_simulate import add_parsers


def _serve(args: argparse.Namespace) -> int:
    from gyre_sched.service import serve
    from gyre_transport.process import follow_parent
    from gyre_transport.run import Context

    follow_parent()
    _log()
    asyncio.run(serve(Context(args.config)))
    return 0


def _agent(args: argparse.Namespace) -> int:
    from gyre_sched.agent import serve
    from gyre_transport.process import follow_parent
    from gyre_transport.run import Context

    follow_parent()
    _log()
    asyncio.run(serve(Context(args.config), args.cell))
    return 0


def _status(args: argparse.Namespace) -> int:
    import msgspec

    from gyre_sched import protocol as p
    from gyre_transport.bus import BlockingClient
    from gyre_transport.run import Context

    with BlockingClient(Context(args.config).bus.address("scheduler"), p.Reply) as client:
        status: p.Status = client.call(p.GetStatus(), deadline=args.timeout)
    if args.json:
        print(msgspec.json.encode(status).decode())
        return 0
    burst = "no burst yet" if status.burst is None else f"burst {status.burst}"
    print(
        f"{burst}: {status.dispatched} dispatched, {status.started} started, {status.terminated} terminated; "
        f"water {status.water} of capacity {status.capacity}; version {status.version}, routes {status.epoch}"
    )
    if status.backlog:
        b = status.backlog
        print(f"feed: {b.waiting} waiting, batch {b.open_batch} open, {b.batches_closed} batches closed")
    for cell in status.cells:
        trainer = f"trainer {_alive(cell.trainer_alive)}" if cell.trains else "samples only"
        health = f"engine {_alive(cell.engine_alive)}, {trainer}"
        print(f"cell {cell.cell}: {cell.role} for {cell.since:.0f} s, version {cell.version}, {health}")
    return 0


def _alive(alive: bool) -> str:
    return "up" if alive else "down"


def _journal(args: argparse.Namespace) -> int:
    from gyre_sched.journal import durations, read_journal

    reading = read_journal(args.file)
    if reading.torn and not reading.steps and not reading.more:  # not a journal with a torn tail: no journal at all
        from gyre_sched.errors import JournalError

        raise JournalError(f"expected a journal, got {str(args.file)!r}: {reading.damage}; name RUN/sched/journal")
    if args.json:
        import msgspec

        for event in reading.events:
            print(msgspec.json.encode(event).decode())
        if reading.torn:
            print(f"{reading.torn} bytes not read: {reading.damage}", file=sys.stderr)
        return 0
    for event in reading.events:
        if args.all or event.kind not in ("backlog", "started", "terminated"):
            print(_line(event.at, event.kind, event.cell, event.numbers))
    for cell, roles in sorted(durations(reading.events).items()):
        print(f"cell {cell}: " + ", ".join(f"{role} {seconds:.1f} s" for role, seconds in roles.items()))
    if reading.torn:
        print(f"{reading.torn} bytes at the end were not read: {reading.damage}")
    return 0


def _top(args: argparse.Namespace) -> int:
    try:
        from gyre_sched.face.top import watch
    except ImportError as e:
        raise _extra_missing("top", e) from e

    watch(args.run_dir, period=args.period)
    return 0


def _report(args: argparse.Namespace) -> int:
    from gyre_sched.face.follow import Follower
    from gyre_sched.face.page import write_report

    out = args.out or args.run_dir / "report.html"
    size = write_report(Follower(args.run_dir).look(), out)
    print(json.dumps({"report": str(out), "bytes": size}) if args.json else f"{out}: {size:,} bytes")
    return 0


def _web(args: argparse.Namespace) -> int:
    from gyre_sched.errors import SchedError
    from gyre_sched.face.config import WebConfig
    from gyre_sched.face.web import Web

    try:
        config = WebConfig(host=args.host, port=args.port)
    except ValueError as e:
        raise SchedError(str(e)) from None

    async def show() -> None:
        async with Web(args.run_dir, config) as page:
            print(f"{page.url}\nuntil interrupted", flush=True)
            await asyncio.Event().wait()

    asyncio.run(show())
    return 0


def _extra_missing(command: str, error: ImportError) -> Exception:
    from gyre_sched.errors import SchedError

    return SchedError(f"`{command}` needs the package {error.name!r}: install gyre-sched[face]")


def _line(at: float, kind: str, cell: int | None, numbers: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
    where = "" if cell is None else f"cell {cell}"
    told = "  ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in numbers.items())
    return f"{clock}  {kind:<18} {where:<8} {told}".rstrip()


def _log() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="gyre-sched", description=__doc__)
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="run the scheduler until SIGTERM")
    serve.add_argument("--config", type=Path, required=True, help="a run's resolved config.toml")
    serve.set_defaults(run=_serve)

    agent = commands.add_parser("agent", help="run the agent of one cell until SIGTERM")
    agent.add_argument("--config", type=Path, required=True, help="a run's resolved config.toml")
    index = "index of the cell; 0 is the core, from sched.cells on they are standalone engines"
    agent.add_argument("--cell", type=int, required=True, help=index)
    agent.set_defaults(run=_agent)

    status = commands.add_parser("status", help="print what a running scheduler knows")
    status.add_argument("--config", type=Path, required=True, help="the run's config.toml")
    status.add_argument("--json", action="store_true", help="one JSON object")
    status.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for the answer (default 5)")
    status.set_defaults(run=_status)

    journal = commands.add_parser("journal", help="print the decisions in a journal")
    journal.add_argument("file", type=Path, help="RUN/sched/journal")
    journal.add_argument("--json", action="store_true", help="every event, one JSON object a line")
    journal.add_argument("--all", action="store_true", help="executions and backlog too")
    journal.set_defaults(run=_journal)

    screen = commands.add_parser("top", help="watch a run in this terminal (extra [face])")
    screen.add_argument("run_dir", type=Path, help="its run directory, of a running or an ended run")
    screen.add_argument("--period", type=float, default=1.0, help="seconds between two looks (default 1)")
    screen.set_defaults(run=_top)

    page = commands.add_parser("web", help="serve a run's page, as its scheduler does")
    page.add_argument("run_dir", type=Path, help="its run directory, of a running or an ended run")
    page.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    page.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    page.set_defaults(run=_web)

    report = commands.add_parser("report", help="write a run's page to a file that needs no server")
    report.add_argument("run_dir", type=Path, help="its run directory")
    report.add_argument("--out", type=Path, help="file to write (default RUN/report.html)")
    report.add_argument("--json", action="store_true", help="one JSON object")
    report.set_defaults(run=_report)
    add_parsers(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run `argv`; returns the exit code: 0, 1 for an error that was told, 130 when interrupted."""
    from gyre_sched.errors import SchedError

    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough; what is buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SchedError as e:
        return _told(args, e)
    except Exception as e:
        from gyre_transport.errors import TransportError

        if isinstance(e, TransportError):
            return _told(args, e)
        raise
    return code


def _told(args: argparse.Namespace, error: Exception) -> int:
    if getattr(args, "json", False):
        print(json.dumps({"error": str(error)}))
    print(f"gyre-sched: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
