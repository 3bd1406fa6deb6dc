"""The summary of a run, made from the files it left: `summary.json` and what is printed at the end.

    metrics/steps.jsonl ─┐
    sched/journal       ─┼─▶ build ─▶ {run, steps, cells} ─▶ summary.json, text
    ledger.sqlite       ─┤
    metrics/proxy.json  ─┘

Nothing is kept in memory for it: it can be made again for any run directory, interrupted runs included.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

from gyre_launch.errors import LaunchError
from gyre_sched.face.readings import read_counters, read_steps
from gyre_sched.journal import durations, read_journal
from gyre_sched.protocol import Event
from gyre_transport.run import RunDir

_STEP_KEYS = (
    "step",
    "executions",
    "excluded",
    "placeholders",
    "mean_score",
    "trajectories",
    "tokens_total",
    "tokens_unique",
    "tokens_computed",
    "targets",
    "micro_steps",
    "loss",
    "grad_norm",
    "learning_rate",
    "staleness",
    "version",
    "new_version",
    "seconds",
    "checkpoint",
    "left_out",
)


def build(run_dir: RunDir) -> dict[str, Any]:
    """Return the summary of `run_dir`; raises `LaunchError` when it is not a run directory."""
    if not run_dir.config.is_file():
        raise LaunchError(f"{str(run_dir.path)!r} holds no config.toml; name the directory of a run")
    steps = _steps(run_dir.metrics / "steps.jsonl")
    journal = read_journal(run_dir.journal) if run_dir.journal.is_file() else None
    events = list(journal.events) if journal else []
    executions = _executions(run_dir.ledger)
    proxy = read_counters(run_dir.metrics / "proxy.json")
    return {
        "run": {
            "name": run_dir.path.name,
            "steps": len(steps),
            "calls": proxy.get("calls", 0),
            "calls_failed": proxy.get("calls_failed", 0),
            "calls_moved": proxy.get("calls_moved", 0),
            "proxy": proxy,
            "executions": executions,
            "weight_versions": sorted({e.numbers["version"] for e in events if e.kind == "published"}),
            "policy": str(run_dir.policy) if (run_dir.policy / "config.json").is_file() else None,
            "mean_score_first_2": _mean_score(steps[:2]),
            "mean_score_last_2": _mean_score(steps[-2:]),
            "journal_torn_bytes": journal.torn if journal else 0,
        },
        "steps": steps,
        "cells": _cells(events),
        "kv": _kv(proxy, run_dir.metrics),
    }


def write(summary: dict[str, Any], path: Path) -> None:
    """Write `summary` to `path` at once or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as f:
        json.dump(summary, f, indent=2)
        f.flush()
        os.fsync(f.fileno())
    partial.rename(path)


def _steps(path: Path) -> list[dict[str, Any]]:
    return [{key: record.get(key) for key in _STEP_KEYS} for record in read_steps(path)]


def _kv(proxy: dict[str, Any], metrics: Path) -> dict[str, Any]:
    """What requests that went to another engine than their execution's last one had computed again there.

    Tokens the new engine had computed itself (a prefix it shares) count on neither side. `pages`: counters of all
    engines' linkers together, see `gyre_transport.kv.counts`.
    """
    pages: Counter[str] = Counter()
    for path in sorted(metrics.glob("kv-*.json")):
        pages.update(read_counters(path))
    return {
        "requests": proxy.get("relocated", 0),
        "recomputed_without_moves": proxy.get("relocated_tokens", 0),
        "recomputed": proxy.get("relocated_recomputed", 0),
        "moves": proxy.get("kv_moves", 0),
        "moves_failed": proxy.get("kv_moves_failed", 0),
        "pages": dict(pages),
    }


def _executions(path: Path) -> dict[str, Any]:
    """Counts from the ledger; `dispatched` = trained + placeholders + excluded + `without_fate`.

    Of the excluded ones, `replaced` had another execution of their group dispatched in their place."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    if path.is_file():
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            db.row_factory = sqlite3.Row
            for row in db.execute("SELECT * FROM executions"):
                state, reason = row["state"], row["reason"]
                counts["dispatched"] += 1
                counts["terminated"] += row["terminated"] is not None
                counts["replaced"] += "replaced_by" in row.keys() and row["replaced_by"] != ""  # noqa: SIM118
                counts[state if state in ("trained", "excluded", "placeholder") else "without_fate"] += 1
                if state == "excluded":
                    reasons[reason] += 1
    keys = ("dispatched", "terminated", "trained", "placeholder", "excluded", "replaced", "without_fate")
    return {key: counts[key] for key in keys} | {"excluded_reasons": dict(reasons)}


def _cells(events: list[Event]) -> list[dict[str, Any]]:
    """Per cell its role changes with durations, and the seconds it spent in each role."""
    changes: dict[int, list[dict[str, Any]]] = {}
    spent = durations(events)
    for e in events:
        if e.kind != "role" or e.cell is None:
            continue
        n = e.numbers
        changes.setdefault(e.cell, []).append(
            {
                "at": e.at,
                "from": n["from"],
                "to": n["to"],
                "seconds_in_previous_role": round(float(n["seconds"] or 0), 3),
            }
        )
    return [
        {
            "cell": cell,
            "role_changes": changes[cell],
            "seconds_by_role": {role: round(seconds, 3) for role, seconds in spent.get(cell, {}).items()},
        }
        for cell in sorted(changes)
    ]


def _mean_score(steps: list[dict[str, Any]]) -> float | None:
    """Mean over executions of the given steps' scores."""
    pairs = [(s["mean_score"], s["executions"]) for s in steps if s["mean_score"] is not None and s["executions"]]
    total = sum(n for _, n in pairs)
    return sum(score * n for score, n in pairs) / total if total else None


def text(summary: dict[str, Any]) -> str:
    """The summary for a person."""
    run, executions = summary["run"], summary["run"]["executions"]
    first, last = run["mean_score_first_2"], run["mean_score_last_2"]
    rows = [
        f"{run['steps']} steps; executions: {executions['dispatched']} dispatched, {executions['terminated']} ended, "
        f"{executions['trained']} trained, {executions['placeholder']} placeholders, {executions['excluded']} excluded"
        + (f" ({executions['replaced']} of them replaced)" if executions.get("replaced") else ""),
        f"calls: {run['calls']}, {run['calls_failed']} failed to a harness, {run['calls_moved']} moved between engines",
    ]
    kv = summary.get("kv", {})
    if kv.get("requests"):
        rows.append(
            f"{kv['requests']} requests changed engines: {kv['recomputed']:,} tokens of context were computed again, "
            f"without KV moves it would have been {kv['recomputed_without_moves']:,}"
            + (f"; {kv['moves_failed']} of {kv['moves']} moves failed" if kv["moves_failed"] else "")
        )
    if first is not None and last is not None:
        rows.append(f"mean score: {first:.3f} in the first 2 steps, {last:.3f} in the last 2")
    for cell in summary["cells"]:
        roles = ", ".join(f"{role} {seconds:.0f} s" for role, seconds in cell["seconds_by_role"].items())
        rows.append(f"cell {cell['cell']}: {len(cell['role_changes'])} role changes; {roles}")
    rows.append(f"policy: {run['policy'] or 'not exported'}")
    return "\n".join(rows)
