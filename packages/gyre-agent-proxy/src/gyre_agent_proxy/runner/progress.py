"""The runner's counters, in `metrics/runner.json` for whoever shows them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from gyre_agent_proxy.runner.ledger import Ledger, State
from gyre_traj.intake import Ending

_PERIOD = 1.0  # seconds
_LIFE = tuple(State)  # in the order of an execution's life

Counters = dict[str, int | float | None]


def counters(ledger: Ledger, evaluator_failures: int) -> Counters:
    """Where the run's executions stand; `mean_score` is over those that have a score (None: none has).

    evaluator_failures: tries of verifiers that gave no score.
    """
    tally = ledger.tally()

    def reached(state: State) -> int:
        return sum(t.n for t in tally if _LIFE.index(t.state) >= _LIFE.index(state))

    def stands(state: State) -> int:
        return sum(t.n for t in tally if t.state is state)

    replaced, not_replaced = ledger.refills()
    scores = sum(t.scores for t in tally)
    return {
        "dispatched": reached(State.DISPATCHED),
        "started": reached(State.STARTED),
        "terminated": reached(State.TERMINATED),
        "judged": reached(State.JUDGED),
        "submitted": reached(State.SUBMITTED),
        "trained": stands(State.TRAINED),
        "excluded": stands(State.EXCLUDED),
        "placeholders": stands(State.PLACEHOLDER),
        **{ending.value: sum(t.n for t in tally if t.ending is ending) for ending in Ending},
        "mean_score": sum(t.score for t in tally) / scores if scores else None,
        "over_budget": sum(t.n for t in tally if t.why == "budget"),
        "harness_failures": sum(t.n for t in tally if t.why.startswith("exit ") and t.why != "exit 0"),
        "evaluator_failures": evaluator_failures,
        "replaced": replaced,
        "not_replaced": not_replaced,
        "calls": sum(t.calls for t in tally),
    }


def write(path: Path, values: Counters) -> None:
    """Replace `path` at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    partial.rename(path)


async def report(path: Path, read: Callable[[], Counters]) -> None:
    """Write what `read` returns every second, until cancelled."""
    while True:
        write(path, read())
        await asyncio.sleep(_PERIOD)
