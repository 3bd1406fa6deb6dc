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
        _progress(f"{name} …")
        results.append(run(scenario, runs, name, past=known))
    _progress("")
    if args.json:
        print(msgspec.json.encode({"scenario": scenario, "results": results}).decode())
        return 0
    print(table(results))
    print(legend(scenario))
    return 0


def plan(args: argparse.Namespace) -> int:
    """Recommend cells, slots, burst and schedule, or say that elasticity does not pay."""
    import msgspec

    from gyre_sched.simulate import load_trace
    from gyre_sched.simulate.plan import plan
    from gyre_sched.simulate.scenario import load_scenario

    overrides = [*args.set, *([f"workload.trace={args.trace!r}"] if args.trace else [])]
    scenario = load_scenario(args.scenario, overrides)
    found = plan(scenario, load_trace(scenario.workload.trace or None), max_staleness=args.max_staleness, say=_progress)
    _progress("")
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    for text in found.advice:
        print(text)
    print("\nschedules, hours a step:")
    for r in sorted(found.tried, key=lambda r: r.step_seconds):
        split = "" if r.trainers is None else f" ({r.trainers} train)"
        print(f"  {r.step_seconds / 3600:7.2f}  {r.says}{split}, at most {r.staleness_max} versions stale")
    print(f"\nthe same machines otherwise, {found.schedule}, hours a step:")
    for cells, slots, seconds in found.shapes:
        print(f"  {seconds / 3600:7.2f}  {cells} cells of {slots} slots")
    print("\nrecommended:")
    for key, value in found.settings.items():
        print(f"  {key} = {value}")
    return 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def replay(args: argparse.Namespace) -> int:
    """Tell a journal's inputs to the run's own policy and to a changed one, and print where they differ."""
    import json
    from dataclasses import asdict

    from gyre_sched.config import SchedConfig
    from gyre_sched.errors import ScenarioError
    from gyre_sched.journal import read_journal
    from gyre_sched.policy import Policy
    from gyre_sched.replay import restore
    from gyre_sched.simulate.trace import load_trace, past
    from gyre_sched.whatif import Decision, differences, what_if
    from gyre_transport.config import load, section
    from gyre_transport.run import BatchConfig, RunConfig

    steps = read_journal(args.journal).steps
    if not steps:
        raise ScenarioError(f"expected a journal with steps, got none in {str(args.journal)!r}")
    config = args.config or args.journal.parent.parent / "config.toml"
    policies = []
    for overrides in (list[str](), list[str](), args.set):
        data = load(config, overrides)
        sched, batch = section(data, "sched", SchedConfig), section(data, "batch", BatchConfig)
        known = past(load_trace(sched.past)) if sched.past else []
        run = section(data, "run", RunConfig)
        began = steps[0].input.at
        policies.append(Policy(sched, per_burst=batch.per_burst, steps=run.steps, at=began, past=known))
    check, *policies = policies
    # what is told as recorded has to be what was decided then
    restore(check, steps, remedy="name the config that it was written with (--config), or replay with that version")
    before, after = what_if(steps, *policies)
    pairs = differences(before, after, within=args.within)
    if args.json:
        told = [{"recorded": a and asdict(a), "changed": b and asdict(b)} for a, b in pairs]
        roles = {"recorded": dict(before.role_seconds), "changed": dict(after.role_seconds)}
        print(json.dumps({"differences": told, "cell_seconds": roles, "refused": after.refused}))
        return 0

    def say(d: Decision | None) -> str:
        if d is None:
            return "-"
        keys = ("w", "C_R", "C_e", "train_seconds", "burst_seconds", "staleness", "why")
        numbers = [
            f"{k} {v:.0f}" if isinstance(v, float) else f"{k} {v}" for k in keys if (v := d.numbers.get(k)) is not None
        ]
        return f"+{d.seconds:.1f} s ({', '.join(numbers)})"

    for a, b in pairs:
        d = a or b
        assert d is not None  # noqa: S101
        where = "" if d.cell is None else f" cell {d.cell}"
        print(f"burst {'-' if d.burst is None else d.burst}: {d.kind}{where}: recorded {say(a)}, now {say(b)}")
    if after.refused:
        print(f"not granted any more: {after.refused}")
    for kind in ("transfer", "held"):
        print(f"{kind}: {len(before.of(kind))} recorded, {len(after.of(kind))} now")
    for role in ("rollout", "training"):
        was, now = before.role_seconds[role], after.role_seconds[role]
        print(f"cell-seconds in {role}, of cells that left it: {was:.0f} recorded, {now:.0f} now")
    print(
        "Executions, feed and failures are as recorded; what another schedule would have made of them, simulate tells."
    )
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

    advise = commands.add_parser("plan", help="recommend cells, slots, burst and schedule for a fleet and a trace")
    advise.add_argument("trace", nargs="?", help="trace file, call logs or journal (default: the shipped trace)")
    _scenario(advise)
    advise.add_argument("--max-staleness", type=int, default=1, help="versions data may be behind (default 1)")
    advise.set_defaults(run=plan)

    again = commands.add_parser("replay", help="what a changed policy would have decided in a recorded run")
    again.add_argument("journal", type=Path, help="RUN/sched/journal")
    again.add_argument("--config", type=Path, help="the run's config.toml (default: the one of its run directory)")
    again.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="sched.KEY=VALUE",
        help="what to change, e.g. sched.leave=deadline",
    )
    again.add_argument("--within", type=float, default=1.0, help="seconds that count as the same moment (default 1)")
    again.add_argument("--json", action="store_true", help="one JSON object")
    again.set_defaults(run=replay)


def _scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", type=Path, help="TOML with [workload] [fleet] [training] [switch] [length]")
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override, e.g. fleet.cells=16"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
