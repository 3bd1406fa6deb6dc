"""gyre-agent-proxy serve | run | replay | runner | harnesses | tasks | roles"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from gyre_agent_proxy import __version__
from gyre_agent_proxy.runner import cli as cli_run


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 done, 1 failed, 2 wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="gyre-agent-proxy", description="A token-exact LLM proxy and execution runner for agent harnesses."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the proxy: for a run (--config), or alone (--engine and --model)")
    serve.add_argument("--config", type=Path, help="the run's resolved config")
    serve.add_argument("--engine", action="append", default=[], metavar="URL", help="an SGLang server; repeatable")
    serve.add_argument("--model", type=Path, metavar="FOLDER", help="the Hugging Face folder the engines serve")
    serve.add_argument("--name", default="", help="what clients call the model (default: the folder's name)")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8100, help="0 takes a free one (default: %(default)s)")
    serve.add_argument("--calls", type=Path, default=Path("calls"), metavar="FOLDER", help="where call logs go")
    serve.add_argument("--template", default="auto", help="auto, chatml, or a name of the renderers package")
    serve.add_argument("--context", type=int, default=0, help="tokens an engine takes (default: what the model says)")
    serve.add_argument("--secret", type=Path, help="file that signs API keys; without it every key is an execution")
    cli_run.add(commands)
    again = commands.add_parser("replay", help="send recorded traffic through a proxy, print how it went and the tree")
    again.add_argument("capture", type=Path, help="JSON list, or JSON Lines, of path, headers, body, response")
    again.add_argument("--engine", action="append", required=True, metavar="URL", help="an SGLang server; repeatable")
    again.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="the Hugging Face folder they serve")
    again.add_argument("--template", default="auto", help="auto, chatml, or a name of the renderers package")
    again.add_argument("--calls", type=Path, metavar="FOLDER", help="where the call log goes (default: it is not kept)")
    again.add_argument("--json", action="store_true", help="print the result as JSON")
    runner = commands.add_parser("runner", help="run a run's executions and score them")
    runner.add_argument("--config", type=Path, required=True, help="the run's resolved config")
    roles = commands.add_parser("roles", help="print a role table")
    roles.add_argument("table", nargs="?", default="default", help="a TOML file (default: the table that is built in)")
    roles.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.command == "serve" and (args.config is None) == (not args.engine or args.model is None):
        parser.error("serve takes either --config FILE, or --engine URL and --model FOLDER")
    if args.command == "run" and args.workspace is not None and args.task is not None:
        parser.error("run takes --workspace with --instruction only: a task has its environment/")
    if args.command in ("roles", "harnesses"):
        return _guard(lambda: _roles(args) if args.command == "roles" else cli_run.show_harnesses(args))
    import logging

    if args.command == "tasks":
        return _guard(lambda: cli_run.show_tasks(args))
    if args.command in ("run", "replay"):
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        return _guard(lambda: cli_run.run(args) if args.command == "run" else _replay(args))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    return _guard(lambda: _runner(args) if args.command == "runner" else _serve(args))


def _guard(command: Callable[[], int]) -> int:
    """Run a command; errors of Gyre's packages are one line, not a traceback."""
    from gyre_agent_proxy.errors import ProxyError
    from gyre_traj.errors import TrajError
    from gyre_transport.errors import TransportError

    try:
        return command()
    except (ProxyError, TransportError, TrajError) as e:
        print(f"gyre-agent-proxy: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(args: argparse.Namespace) -> int:
    import uvloop

    from gyre_transport.process import follow_parent

    follow_parent()

    from gyre_agent_proxy import serve

    if args.config is not None:
        from gyre_transport.run import Context

        uvloop.run(serve.serve(Context(args.config)))
    else:
        uvloop.run(_alone(args))
    return 0


async def _alone(args: argparse.Namespace) -> None:
    from gyre_agent_proxy.config import ModelConfig, ProxyConfig
    from gyre_agent_proxy.keys import load_secret
    from gyre_agent_proxy.serve import proxy, until_stopped

    config = ProxyConfig(
        host=args.host, port=args.port, template=args.template, engines=tuple(args.engine), context=args.context
    )
    model = ModelConfig(path=str(args.model), name=args.name or args.model.resolve().name)
    secret = load_secret(args.secret) if args.secret is not None else None
    async with proxy(config, model, calls=args.calls, secret=secret) as running:
        print(f"serving at {running.url}/v1", flush=True)
        await until_stopped(running)


def _replay(args: argparse.Namespace) -> int:
    """Exit code 1 when an exchange was not answered with 200."""
    import asyncio
    import tempfile

    import msgspec

    from gyre_agent_proxy.config import ModelConfig, ProxyConfig
    from gyre_agent_proxy.replay import Replayed, load_capture, replay
    from gyre_agent_proxy.serve import proxy
    from gyre_traj import Tree, read_log
    from gyre_traj.report import describe, render

    capture = load_capture(args.capture)
    config = ProxyConfig(engines=tuple(args.engine), template=args.template)
    model = ModelConfig(path=str(args.model), name=args.model.resolve().name)

    async def run(calls: Path) -> tuple[list[Replayed], dict[str, int], list[Tree]]:
        found = []
        async with proxy(config, model, calls=calls) as running:
            async for one in replay(capture, running.url, "replay"):
                print(
                    f"{one.index:4} {one.method:5}{one.path:32}{one.status:4}{one.seconds:9.3f} s {one.detail}",
                    file=sys.stderr,
                )
                found.append(one)
            counts = dict(running.service.metrics.counts)
        return found, counts, [Tree.from_log(read_log(log)) for log in sorted(calls.glob("*.gtraj"))]

    with tempfile.TemporaryDirectory() as scratch:
        exchanges, counts, trees = asyncio.run(run(args.calls or Path(scratch)))
    if args.json:
        report = {"exchanges": exchanges, "counters": counts, "trees": [describe(tree) for tree in trees]}
        print(msgspec.json.encode(report).decode())
    else:
        print("counters", ", ".join(f"{name} {n}" for name, n in counts.items() if n))
        for tree in trees:
            print(render(tree))
    return int(any(one.status != 200 for one in exchanges))


def _runner(args: argparse.Namespace) -> int:
    import asyncio

    from gyre_agent_proxy.runner.service import serve
    from gyre_transport.run import Context

    asyncio.run(serve(Context(args.config)))
    return 0


def _roles(args: argparse.Namespace) -> int:
    import msgspec

    from gyre_agent_proxy.roles import Roles

    table = Roles.load(args.table)
    if args.json:
        shown = {"role_header": table.role_header, "caller_headers": table.caller_headers, "rules": table.rules}
        print(msgspec.json.encode(shown).decode())
        return 0
    print(f"header {table.role_header}: the role it names")
    print(f"headers {', '.join(table.caller_headers) or 'none'}: tell agents of one execution apart")
    for rule in table.rules:
        conditions = ", ".join(
            f"{f} {v!r}"
            for f in rule.__struct_fields__
            if f not in ("role", "harness") and (v := getattr(rule, f)) not in (None, {})
        )
        print(f"{rule.role:18} {rule.harness:12} {conditions}")
    print("main               otherwise, counted as unknown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
