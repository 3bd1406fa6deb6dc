"""The ledger: every execution ends exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre_agent_proxy.runner.errors import LedgerError
from gyre_agent_proxy.runner.ledger import FATES, Ledger, State, allowed
from gyre_agent_proxy.runner.progress import counters
from gyre_traj.intake import Ending, Fate, Outcome

S = State
LINE = [S.DISPATCHED, S.STARTED, S.TERMINATED, S.JUDGED, S.SUBMITTED]


def test_the_transitions_are_a_line_with_three_ends() -> None:
    edges = {(a, b) for a, b in itertools.product(State, State) if allowed(a, b)}
    assert edges == set(itertools.pairwise(LINE)) | {(S.SUBMITTED, end) for end in FATES}
    assert not any(allowed(end, state) for end in FATES for state in State)


SCORED = Outcome(ending=Ending.SCORED, score=0.5)

STEPS: dict[State, Callable[[Ledger, str], object]] = {
    S.STARTED: lambda ledger, e: ledger.started(e),
    S.TERMINATED: lambda ledger, e: ledger.terminated(e, "exit 0"),
    S.JUDGED: lambda ledger, e: ledger.judged(e, SCORED, 3),
    S.SUBMITTED: lambda ledger, e: ledger.submitted(e),
    S.TRAINED: lambda ledger, e: ledger.fate(Fate(execution=e, step=2)),
    S.EXCLUDED: lambda ledger, e: ledger.fate(Fate(execution=e, reason="no calls")),
}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "run" / "ledger.sqlite")
    made.dispatch([("b0-g00-e0", "t", "b0-g00"), ("b0-g00-e1", "t", "b0-g00")], 0)
    yield made
    made.close()


def walk(ledger: Ledger, execution: str, until: State) -> None:
    for state in [*LINE[1:], S.TRAINED]:
        if ledger.row(execution).state is until:
            return
        STEPS[state](ledger, execution)


@pytest.mark.parametrize(("now", "then"), list(itertools.product([*LINE, S.TRAINED, S.EXCLUDED], STEPS)))
def test_a_step_happens_when_allowed_and_changes_nothing_otherwise(ledger: Ledger, now: State, then: State) -> None:
    e = "b0-g00-e0"
    if now is S.EXCLUDED:
        walk(ledger, e, S.SUBMITTED)
        STEPS[S.EXCLUDED](ledger, e)
    else:
        walk(ledger, e, now)
    before = ledger.row(e)
    if allowed(now, then):
        STEPS[then](ledger, e)
        assert ledger.row(e).state is then
    elif now is then and now in FATES:
        assert STEPS[then](ledger, e) is False  # the same fate read again
        assert ledger.row(e) == before
    else:
        with pytest.raises(LedgerError, match=f"is {now.value} and cannot become {then.value}"):
            STEPS[then](ledger, e)
        assert ledger.row(e) == before
    assert ledger.row("b0-g00-e1").state is S.DISPATCHED


def test_a_second_fate_is_refused(ledger: Ledger) -> None:
    e = "b0-g00-e0"
    walk(ledger, e, S.SUBMITTED)
    assert ledger.fate(Fate(execution=e, step=1))
    for other in (Fate(execution=e, step=2), Fate(execution=e, reason="late")):
        with pytest.raises(LedgerError, match="is trained and cannot become"):
            ledger.fate(other)
    assert ledger.row(e).trained_step == 1


def test_a_placeholder_is_told_from_a_trained_execution(ledger: Ledger) -> None:
    e = "b0-g00-e0"
    walk(ledger, e, S.TERMINATED)
    ledger.judged(e, Outcome(ending=Ending.NOTHING_TO_SCORE))
    ledger.submitted(e)
    ledger.fate(Fate(execution=e, step=3))
    assert ledger.row(e).state is S.PLACEHOLDER


def test_dispatching_again_keeps_what_is_there(ledger: Ledger) -> None:
    walk(ledger, "b0-g00-e0", S.JUDGED)
    ledger.dispatch([("b0-g00-e0", "t", "b0-g00"), ("b0-g01-e0", "u", "b0-g01")], 0)
    assert [(r.id, r.state) for r in ledger.rows(0)] == [
        ("b0-g00-e0", S.JUDGED),
        ("b0-g00-e1", S.DISPATCHED),
        ("b0-g01-e0", S.DISPATCHED),
    ]
    assert ledger.rows(1) == []


def test_survives_its_process(tmp_path: Path, ledger: Ledger) -> None:
    walk(ledger, "b0-g00-e0", S.JUDGED)
    ledger.close()
    again = Ledger(tmp_path / "run" / "ledger.sqlite")
    row = again.row("b0-g00-e0")
    assert (row.state, row.ending, row.score, row.calls, row.why) == (S.JUDGED, Ending.SCORED, 0.5, 3, "exit 0")
    assert again.without_fate() == ["b0-g00-e0", "b0-g00-e1"]
    again.close()


def test_unknown_execution(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="knows no execution 'x'"):
        ledger.started("x")


def test_not_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("no database at all, but long enough to be read as one" * 40)
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger(tmp_path / "ledger.sqlite")


def test_counters(ledger: Ledger) -> None:
    assert counters(ledger, 0)["mean_score"] is None
    walk(ledger, "b0-g00-e0", S.TRAINED)
    ledger.started("b0-g00-e1")
    ledger.terminated("b0-g00-e1", "budget")
    ledger.judged("b0-g00-e1", Outcome(ending=Ending.EVALUATOR_FAILED), 2)
    seen = counters(ledger, 4)
    expected = {
        "dispatched": 2, "started": 2, "terminated": 2, "judged": 2, "submitted": 1, "trained": 1, "excluded": 0,
        "scored": 1, "evaluator_failed": 1, "mean_score": 0.5, "over_budget": 1, "harness_failures": 0, "calls": 5,
        "evaluator_failures": 4,
    }  # fmt: skip
    assert {key: seen[key] for key in expected} == expected
