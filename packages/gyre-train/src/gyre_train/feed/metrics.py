"""One line a step: what went into it, who computed it, what came out. `metrics/steps.jsonl` in the run directory."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from gyre_train.feed.batch import Batch
from gyre_train.feed.prepare import Fated, PreparedExecution
from gyre_train.protocol import CloseBatch
from gyre_traj.metrics import mean_metrics, merge_metrics


def step_record(batch: Batch, close: CloseBatch, seconds: float) -> dict[str, Any]:
    """The record of a batch about to be closed, `seconds` after it was opened; README.md describes the keys."""
    groups = batch.groups
    members = [m for g in groups for m in g.executions]
    inside = [m for m in members if m.fated is not Fated.EXCLUDED]
    targets = sum(m.targets for m in inside)
    versioned = sum(m.versioned for m in inside)
    behaviour = sum(m.version_sum for m in inside)
    left_out: Counter[str] = Counter()
    for m in inside:
        left_out.update(m.left_out)
    cells: Counter[int] = Counter()
    for step in batch.leases.steps:
        if step.cell is not None:
            cells[step.cell] += 1
    computed = batch.targets_computed
    sums = merge_metrics(step.metrics for step in batch.leases.steps)
    sums.pop("targets", None)
    return {
        "step": batch.index + 1,
        "version": batch.version,
        "new_version": close.version,
        "groups": [g.name for g in groups],
        "executions": len(inside),
        "excluded": len(members) - len(inside),
        "excluded_reasons": dict(Counter(m.reason for m in members if m.fated is Fated.EXCLUDED)),
        "missing": sum(g.missing for g in groups),
        "placeholders": sum(m.fated is Fated.PLACEHOLDER for m in inside),
        "mean_score": sum(m.score for m in inside) / len(inside) if inside else None,
        "trajectories": sum(m.trajectories for m in inside),
        "tokens_total": sum(m.tokens_total for m in inside),
        "tokens_unique": sum(m.tokens_unique for m in inside),
        "tokens_computed": batch.tokens_computed,
        "largest_micro_step": batch.largest,
        "targets": targets,
        "targets_computed": computed,
        "zero_advantage_executions": sum(_zero(m) for m in inside),
        "left_out": dict(left_out),
        "untrainable_calls": sum(m.untrainable_calls for m in inside),
        "staleness": batch.version - behaviour / versioned if versioned else None,
        "micro_steps": {str(cell): n for cell, n in sorted(cells.items())},
        "micro_steps_returned": batch.leases.returned,
        "resets": batch.resets,
        "loss": close.loss,
        "grad_norm": close.grad_norm,
        "learning_rate": close.learning_rate,
        "seconds": seconds,
        "optimizer_seconds": close.seconds,
        "checkpoint": close.checkpoint,
        "sums": sums,
        "means": mean_metrics({**sums, "targets": computed}),
    }


def _zero(execution: PreparedExecution) -> bool:
    return execution.fated is Fated.TRAINED and execution.advantage == 0.0


def append(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line and flush it to the disk; a number that is not finite becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as f:
        f.write(msgspec.json.encode(record) + b"\n")
        f.flush()
        os.fsync(f.fileno())
