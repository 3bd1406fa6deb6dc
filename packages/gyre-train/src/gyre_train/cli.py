"""gyre-train: the feed, the trainers, and exporting a checkpoint."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from gyre_train import __version__


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gyre-train", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    feed = commands.add_parser("feed", help="serve finished executions as micro-steps")
    feed.add_argument("--config", type=Path, required=True, help="the run's resolved config.toml")

    replica = commands.add_parser("replica", help="run the trainer of a cell")
    replica.add_argument("--config", type=Path, required=True, help="the run's resolved config.toml")
    replica.add_argument("--cell", type=int, required=True, help="index of the cell; 0 is the core")

    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    export.add_argument("checkpoint", type=Path, help="a run's checkpoints/step-<n>")
    export.add_argument("--model", type=Path, required=True, help="Hugging Face folder the run started from")
    export.add_argument("--out", type=Path, required=True, help="folder to write")

    args = parser.parse_args(argv)
    if args.command == "feed":
        return _feed(args.config)
    if args.command == "replica":
        from gyre_train.trainer import main as replica_main

        return replica_main(args.config, args.cell)
    return _export(args.checkpoint, args.model, args.out)


def _feed(config: Path) -> int:
    import logging

    from gyre_train.errors import TrainError
    from gyre_train.feed.service import serve
    from gyre_transport.errors import TransportError
    from gyre_transport.run import Context

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(Context(config)))
    except (TrainError, TransportError) as e:
        print(f"gyre-train: the feed ends: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0


def _export(path: Path, model: Path, out: Path) -> int:
    from gyre_train.errors import TrainError

    try:
        from gyre_train.export import export_checkpoint

        print(export_checkpoint(path, model, out))
    except TrainError as e:
        print(f"gyre-train: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
