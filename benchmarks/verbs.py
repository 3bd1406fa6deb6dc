"""Reads over verbs against perftest's ib_read_bw, in one emulated machine with soft-RoCE, taken in turns.

    uv run --no-sync python benchmarks/verbs.py [--rounds 5]

Only the ratio means anything: what an emulated machine moves a second says nothing about any network. Needs what
tests/transport/verbs needs, and perftest. `--guest` is what the machine itself runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from gyre_transport.memory import Descriptor, allocate, read

_HERE = Path(__file__).resolve()
_NBYTES, _MESSAGE, _PAIRS = 64 << 20, 4 << 20, 2
_FEW = 5  # messages a queue pair of ib_read_bw's short run
_READS = 4  # one after another in a round; ib_read_bw moves as many bytes at a stretch
_DEADLINE = 120.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--guest", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--owner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.owner:
        own()
    elif arguments.guest:
        print(json.dumps(measure(arguments.rounds)))
    else:
        print(report(in_a_machine(arguments.rounds)))


def in_a_machine(rounds: int) -> dict[str, list[float]]:
    """Run this file in a virtual machine; seconds a read of each kind."""
    sys.path.insert(0, str(_HERE.parents[1] / "tests" / "transport" / "verbs"))
    import vm

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre" / "vm"
    argv = [sys.executable, str(_HERE), "--guest", "--rounds", str(rounds)]
    paths = shlex.quote(os.environ.get("PYTHONPATH", ""))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        out.mkdir()
        with vm.Machine(vm.prepare(cache), out, f"PYTHONPATH={paths} {shlex.join(argv)}\n") as machine:
            said = machine.wait(1_200.0)
    return json.loads(said.splitlines()[-1])


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds to read `_NBYTES` `_READS` times each way, in turns; the first round of each is not counted.

    Ours is all that a reader waits for on a connection that is kept: its memory registered and let go again each time,
    requests, completions, checks. Theirs is requests and completions alone, into one registered message of memory: a
    run that reads as much after a few messages, less one that reads those few. Not what it says itself, which rests on
    cycle counters that are not emulated.
    """
    argv = [sys.executable, str(_HERE), "--owner"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        descriptor = msgspec.msgpack.decode(bytes.fromhex(owner.stdout.readline()), type=Descriptor)
        into = np.zeros(_NBYTES, np.uint8)
        seconds: dict[str, list[float]] = {"gyre": [], "few": [], "many": []}
        for _ in range(rounds + 1):
            began = time.perf_counter()
            for _ in range(_READS):
                read(descriptor, into, deadline=_DEADLINE, via="verbs")
            seconds["gyre"].append(time.perf_counter() - began)
            for name, count in (("few", _FEW), ("many", _FEW + _READS * _NBYTES // _MESSAGE // _PAIRS)):
                seconds[name].append(ib_read_bw(count))
        owner.kill()
    return {name: times[1:] for name, times in seconds.items()}


def ib_read_bw(count: int) -> float:
    """Seconds from start to end of a client that reads `count` messages on each queue pair."""
    argv = ["ib_read_bw", "-d", "rxe0", "-x", "1", "-F", "-s", str(_MESSAGE), "-n", str(count), "-q", str(_PAIRS)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        for _ in range(100):  # until it listens
            began = time.perf_counter()
            done = subprocess.run([*argv, "127.0.0.1"], capture_output=True, text=True, timeout=_DEADLINE)
            if done.returncode == 0:
                break
            time.sleep(0.1)
        seconds = time.perf_counter() - began
        server.wait(_DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return seconds


def own() -> None:
    with allocate(_NBYTES) as region:
        region.array()[:] = 7
        print(msgspec.msgpack.encode(region.descriptor).hex(), flush=True)
        sys.stdin.read()


def report(seconds: dict[str, list[float]]) -> str:
    """One row: of the medians; and of the shortest, which other work on the machine touches least."""
    middle, best = ({name: f(times) for name, times in seconds.items()} for f in (statistics.median, min))
    ratios = [(s["many"] - s["few"]) / s["gyre"] for s in (middle, best)]
    return (
        "| way | bytes a second, of ib_read_bw's | of the shortest times |\n| --- | --- | --- |\n"
        f"| gyre over verbs, {_READS} reads of {_NBYTES >> 20} MiB in messages of {_MESSAGE >> 20} MiB, {_PAIRS} queue "
        f"pairs | "
        f"{ratios[0]:.2f} | {ratios[1]:.2f} |\n\n"
        f"seconds a round: {'; '.join(f'{name} {_list(times)}' for name, times in seconds.items())}"
    )


def _list(times: list[float]) -> str:
    return ", ".join(f"{t:.2f}" for t in times)


if __name__ == "__main__":
    main()
