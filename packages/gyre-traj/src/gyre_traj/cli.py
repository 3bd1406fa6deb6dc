"""gyre-traj: look at call logs.

gyre-traj inspect LOG [--json]      numbers, tree and leaves of one execution
gyre-traj check LOG... [--json]     are the logs sound? exit status 1 when one is not
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 good, 1 findings, 2 a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="gyre-traj", description="Look at call logs of agent executions.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="numbers, tree and leaves of one execution")
    inspect.add_argument("log", metavar="LOG")
    check = commands.add_parser("check", help="check the invariants of logs")
    check.add_argument("logs", metavar="LOG", nargs="+")
    for command in (inspect, check):
        command.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)

    from gyre_traj.errors import TrajError

    try:
        if arguments.command == "inspect":
            return _inspect(arguments.log, as_json=arguments.json)
        return _check(arguments.logs, as_json=arguments.json)
    except TrajError as error:
        print(f"gyre-traj: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `gyre-traj inspect LOG | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _inspect(path: str, *, as_json: bool) -> int:
    import msgspec

    from gyre_traj.log import read_log
    from gyre_traj.report import describe, render
    from gyre_traj.tree import Tree

    log = read_log(path)
    tree = Tree.from_log(log)
    if as_json:
        print(msgspec.json.encode(describe(tree)).decode())
        return 0
    print(render(tree))
    if log.torn or log.skipped:
        print(f"  {log.torn} bytes of a torn tail, {log.skipped} records of unknown kinds")
    return 0


def _check(paths: Sequence[str], *, as_json: bool) -> int:
    import msgspec

    from gyre_traj.check import check_log
    from gyre_traj.log import read_log

    found = {}
    for path in paths:
        log = read_log(path)
        found[path] = check_log(log)
        if not as_json:
            errors = sum(finding.level == "error" for finding in found[path])
            print(f"{path}: {len(log.calls)} calls, {errors} errors, {len(found[path]) - errors} notes")
            for finding in found[path]:
                print(f"  {finding.level}: {f'{finding.call}: ' if finding.call else ''}{finding.text}")
    if as_json:
        print(msgspec.json.encode(found).decode())
    return int(any(finding.level == "error" for findings in found.values() for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
