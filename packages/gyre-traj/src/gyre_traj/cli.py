"""gyre-traj: look at call logs, and carry them to other RL stacks.

gyre-traj inspect LOG                         numbers, tree and leaves of one execution
gyre-traj check LOG...                        are the logs sound? exit status 1 when one is not
gyre-traj view LOG [-o FILE]                  the execution as one HTML page
gyre-traj select LOG...                       which trajectories would be trained on
gyre-traj export LOG... --to KIND -o OUT      rows for another stack
gyre-traj import openai FILE -o DIR           call logs from logged requests or conversations

Exit status: 0 good, 1 findings, 2 something given cannot be used; then one line on standard error says what, and
nothing was written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from gyre_traj import __version__

_KINDS = ("jsonl", "parquet", "slime", "trl", "verl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = _parser().parse_args(argv)

    from gyre_traj.errors import TrajError

    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        status = run(arguments)
        sys.stdout.flush()
        return status
    except TrajError as error:
        print(f"gyre-traj: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = {"pyarrow": "'gyre-traj[parquet]'", "torch": "'gyre-traj[torch]'"}.get(str(error.name), error.name)
        print(f"gyre-traj: this needs {error.name}; pip install {package}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `gyre-traj inspect LOG | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre-traj", description="Look at call logs of agent executions, and carry them to other RL stacks."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="numbers, tree and leaves of one execution")
    inspect.add_argument("log", metavar="LOG")
    inspect.set_defaults(run=_inspect)

    check = commands.add_parser("check", help="check the invariants of logs")
    check.add_argument("logs", metavar="LOG", nargs="+")
    check.set_defaults(run=_check)

    view = commands.add_parser("view", help="write an execution's tree as one HTML page")
    view.add_argument("log", metavar="LOG")
    view.add_argument("-o", "--out", metavar="FILE", help="default: LOG with the ending .html")
    view.add_argument("--tokenizer", metavar="PATH", help="a model's folder or tokenizer.json: shows text, not ids")
    view.add_argument("--open", action="store_true", dest="show", help="open it in a browser")
    _drawing(view)
    view.set_defaults(run=_view)

    select = commands.add_parser("select", help="say which trajectories would be trained on")
    select.add_argument("logs", metavar="LOG", nargs="+")
    _drawing(select)
    _roles(select)
    select.set_defaults(run=_select)

    export = commands.add_parser(
        "export",
        help="rows for another stack",
        description="Write the rows of logs for another stack. OUT is one file; for verl, a folder.",
    )
    export.add_argument("logs", metavar="LOG", nargs="+")
    export.add_argument("--to", required=True, choices=_KINDS)
    export.add_argument("-o", "--out", metavar="OUT", required=True, help="must not exist")
    export.add_argument(
        "--outcomes",
        metavar="FILE",
        help="JSONL of execution, group, and score in [0, 1] or ending (evaluator_failed, nothing_to_score, aborted); "
        "without it every advantage is 1",
    )
    _drawing(export)
    _roles(export)
    export.add_argument("--std", action="store_true", help="divide advantages by the group's standard deviation")
    export.add_argument("--aggregation", default="two-level", metavar="NAME", help="default: %(default)s")
    export.add_argument("--counting", default="per_execution", metavar="NAME", help="default: %(default)s")
    export.add_argument("--norm", type=float, default=1.0, metavar="X", help="the constant of seq-mean-token-sum-norm")
    export.add_argument("--pad-token-id", type=int, default=0, metavar="ID", help="verl: default %(default)s")
    export.set_defaults(run=_export)

    bring = commands.add_parser("import", help="call logs from logs of another kind")
    kinds = bring.add_subparsers(dest="kind", required=True, metavar="KIND")
    openai = kinds.add_parser("openai", help="JSONL of Chat Completions requests and responses, or of messages")
    openai.add_argument("file", metavar="FILE")
    openai.add_argument("--tokenizer", metavar="PATH", required=True, help="a model's folder, with its chat template")
    openai.add_argument("-o", "--out", metavar="DIR", required=True, help="a log an execution; must not exist")
    openai.add_argument("--execution-key", default="execution", metavar="KEY", help="dotted; default: %(default)s")
    openai.add_argument("--role-key", default="role", metavar="KEY", help="dotted; default: %(default)s")
    openai.set_defaults(run=_import_openai)

    for command in (inspect, check, select, export, openai):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _drawing(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--j-max", type=_j_max, default=5, metavar="N", help="trajectories an execution, or none for all; default 5"
    )
    command.add_argument("--seed", type=int, default=0, metavar="S", help="default 0")


def _roles(command: argparse.ArgumentParser) -> None:
    command.add_argument("--roles", metavar="TABLE", help="a TOML file, or a harness with a built-in table")


def _j_max(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, or none; got {text!r}")
    return int(text)


def _inspect(given: argparse.Namespace) -> int:
    from gyre_traj.commands import look

    return look.inspect(given.log, as_json=given.json)


def _check(given: argparse.Namespace) -> int:
    from gyre_traj.commands import look

    return look.check(given.logs, as_json=given.json)


def _view(given: argparse.Namespace) -> int:
    from gyre_traj.commands import look

    return look.view(
        given.log, given.out, tokenizer=given.tokenizer, j_max=given.j_max, seed=given.seed, show=given.show
    )


def _select(given: argparse.Namespace) -> int:
    from gyre_traj.commands import draw

    return draw.select(given.logs, j_max=given.j_max, seed=given.seed, roles=given.roles, as_json=given.json)


def _export(given: argparse.Namespace) -> int:
    from gyre_traj.commands.export import export
    from gyre_traj.export import Choices
    from gyre_traj.roles import DEFAULT_PRIORITY, resolve

    choices = Choices(
        j_max=given.j_max,
        seed=given.seed,
        priority=resolve(given.roles) if given.roles is not None else DEFAULT_PRIORITY,
        counting=given.counting,
        aggregation=given.aggregation,
        norm=given.norm,
        std=given.std,
    )
    return export(
        given.logs,
        to=given.to,
        out=given.out,
        outcomes=given.outcomes,
        choices=choices,
        pad_token_id=given.pad_token_id,
        as_json=given.json,
    )


def _import_openai(given: argparse.Namespace) -> int:
    from gyre_traj.commands import bring

    return bring.openai(
        given.file,
        given.out,
        tokenizer=given.tokenizer,
        execution=given.execution_key,
        role=given.role_key,
        as_json=given.json,
    )


if __name__ == "__main__":
    sys.exit(main())
