"""`gyre-transport`: what the transport can do on this machine, how fast, and model folders moved between machines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gyre_transport import __version__

if TYPE_CHECKING:
    type _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 well, 1 with a message on stderr, 2 wrong usage."""
    arguments = _parser().parse_args(argv)
    from gyre_transport.errors import TransportError

    try:
        return int(_COMMANDS[arguments.command](arguments))
    except TransportError as e:
        print(f"gyre-transport: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gyre-transport", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = _add(
        commands, "doctor", "try every way to read another process's memory; exit code 1 if a needed one does not work"
    )
    doctor.add_argument("--json", action="store_true", help="print a list of objects instead of text")

    bench = _add(commands, "bench", "measure every way here, beside memcpy, plain sockets, ZeroMQ, Mooncake")
    bench.add_argument("--size", type=int, default=256, metavar="MIB", help="of the large read (default: 256)")
    bench.add_argument("--count", type=int, default=1_000, metavar="N", help="small reads, 64 KiB each (default: 1000)")
    bench.add_argument("--rounds", type=int, default=3, metavar="N", help="through all ways in turn (default: 3)")
    bench.add_argument("--json", action="store_true", help="print every time, in seconds, as an object")

    snapshot = _add(commands, "snapshot", "move a model folder between machines or processes")
    moves = snapshot.add_subparsers(dest="command", required=True, metavar="serve|pull")
    serve = _add(moves, "serve", "let others pull a folder, until interrupted")
    serve.set_defaults(command="snapshot serve")
    serve.add_argument("folder", type=Path, metavar="FOLDER", help="weights, config and tokenizer of a model")
    serve.add_argument(
        "--ticket", type=Path, metavar="FILE", help="where to write the ticket (NAME.ticket here; -: stdout)"
    )
    serve.add_argument(
        "--listen", default="127.0.0.1", metavar="ADDRESS", help="address to serve at (0.0.0.0: all; default: loopback)"
    )
    serve.add_argument("--port", type=int, default=0, help="default: a free one")
    serve.add_argument("--advertise", metavar="ADDRESS", help="address others reach this machine at, if not --listen")
    serve.add_argument("--for", type=float, dest="seconds", metavar="SECONDS", help="stop after that long")

    pull = _add(moves, "pull", "bring the folder that a ticket opens")
    pull.set_defaults(command="snapshot pull")
    pull.add_argument("ticket", type=Path, metavar="TICKET", help="file that `snapshot serve` wrote (-: stdin)")
    pull.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="must not exist, or be empty")
    pull.add_argument("--deadline", type=float, default=3600.0, metavar="SECONDS", help="default: an hour")
    pull.add_argument("--via", choices=("shm", "verbs", "tcp", "mooncake"), help="that way or none")
    pull.add_argument("--json", action="store_true", help="print what was done as an object")
    return parser


def _add(commands: _Commands, name: str, does: str) -> argparse.ArgumentParser:
    """A command that says in its own help what it says in the list."""
    return commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")


def _doctor(arguments: argparse.Namespace) -> int:
    import json

    import msgspec

    from gyre_transport.doctor import examine, text

    findings = examine()
    print(json.dumps(msgspec.to_builtins(findings), indent=2) if arguments.json else text(findings))
    return 1 if any(f.needed and not f.works for f in findings) else 0


def _bench(arguments: argparse.Namespace) -> int:
    from gyre_transport.bench.command import bench

    return bench(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from gyre_transport.folder.commands import serve_folder

    return serve_folder(arguments)


def _pull(arguments: argparse.Namespace) -> int:
    from gyre_transport.folder.commands import pull_folder

    return pull_folder(arguments)


_COMMANDS = {"doctor": _doctor, "bench": _bench, "snapshot serve": _serve, "snapshot pull": _pull}

if __name__ == "__main__":
    sys.exit(main())
