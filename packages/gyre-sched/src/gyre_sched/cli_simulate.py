"""gyre-sched simulate, plan and replay: what other schedules and rules would have cost."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def simulate(args: argparse.Namespace) -> int:
    """Run the schedules asked for in one scenario and print a table."""
    import msgspec

    from gyre_sched.simulate import SCHEDULES, load_trace, run
    from gyre_sched.simulate.calibrate import calibrated
    from gyre_sched.simulate.report import legend, table
    from gyre_sched.simulate.scenario import load_scenario
    from gyre_sched.simulate.trace import past

    if args.list:
        for name, schedule in SCHEDULES.items():
            print(f"{name:<24} {schedule.says}")
        return 0
    overrides = [*args.set, *([f"workload.trace={args.trace!r}"] if args.trace else [])]
    scenario = load_scenario(args.scenario, overrides)
    runs = load_trace(scenario.workload.trace or None)
    scenario = calibrated(scenario, runs)
    known = past(runs, scenario.scale) if args.seeded else []
    results = []
    for name in args.schedules or list(SCHEDULES):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{name} …", end="", file=sys.stderr, flush=True)
        results.append(run(scenario, runs, name, past=known))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if args.json:
        print(msgspec.json.encode({"scenario": scenario, "results": results}).decode())
        return 0
    print(table(results))
    print(legend(scenario))
    return 0


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommands of this module."""
    sim = commands.add_parser("simulate", help="what schedules would cost, from a trace of agent runs")
    sim.add_argument("trace", nargs="?", help="trace file, call logs or journal (default: the shipped trace)")
    _scenario(sim)
    sim.add_argument(
        "--schedules", nargs="+", metavar="NAME", help="which ones, the first is compared to (default: all)"
    )
    sim.add_argument("--list", action="store_true", help="list the schedules")
    sim.add_argument("--seeded", action="store_true", help="the predictor knows the trace's tasks beforehand")
    sim.set_defaults(run=simulate)


def _scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", type=Path, help="TOML with [workload] [fleet] [training] [switch] [length]")
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override, e.g. fleet.cells=16"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
