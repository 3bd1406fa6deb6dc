"""`gyre-transport bench`."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from gyre_transport.bench.owner import Owner
from gyre_transport.bench.report import measure, text
from gyre_transport.errors import DataError

_COPIES = 5  # of the memory: two at the owner, two here, and what is on its way


def bench(arguments: argparse.Namespace) -> int:
    """Measure and print. Raises `TransportError`."""
    if not (1 <= arguments.size <= 1 << 20 and arguments.count >= 1 and arguments.rounds >= 1):
        raise DataError("--size is at least 1 (MiB), --count and --rounds at least 1")
    size = arguments.size << 20
    _need_room(size)
    with Owner(size) as owner:
        report = measure(owner, size, arguments.count, arguments.rounds)
    sys.stdout.write((json.dumps(msgspec.to_builtins(report)) if arguments.json else text(report)) + "\n")
    return 0


def _need_room(size: int) -> None:
    with open("/proc/meminfo") as file:
        free = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file}.get("MemAvailable", 1 << 62)
    if free < _COPIES * size:
        raise DataError(f"{size:,} bytes take {_COPIES * size:,} here, {free:,} are free; give a smaller --size")
