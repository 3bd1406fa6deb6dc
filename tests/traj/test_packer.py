"""The streaming packer: bounded delay, full micro-steps, the same loss as packing a whole batch."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_traj import Packed, Packer, Row, pack_forests, pack_rows
from gyre_traj.errors import BadRow

Layout = Literal["forests", "rows"]
few = settings(max_examples=150, deadline=None)


def row(n: int, execution: str = "e", first: int = 0) -> Row:
    """Ids count from `first`; all but the first token are targets."""
    return Row(execution, 0, np.arange(first, first + n), np.arange(n) > 0, np.zeros(n), 1 / max(1, n - 1), 1.0)


def test_less_than_the_window_waits_and_the_fullest_leave_first() -> None:
    packer = Packer(100, window=2)
    assert packer.add([row(60, first=0), row(70, first=100)]) == []
    assert packer.pending == 130
    (full,) = packer.add([row(40, first=200), row(50, first=300)])
    assert (full.tokens, packer.pending) == (100, 120)  # 60 + 40; 70 and 50 wait for company
    assert sorted(p.tokens for p in packer.flush()) == [50, 70]
    assert packer.pending == 0


def test_a_row_over_the_budget_never_waits() -> None:
    packer = Packer(10, window=3)
    assert packer.add([row(4)]) == []
    (alone,) = packer.add([row(25, first=50)])
    assert (alone.tokens, alone.over_budget, packer.pending) == (25, True, 4)


def test_shared_tokens_wait_once() -> None:
    trunk = list(range(90))
    branches = [Row("e", 0, [*trunk, 100 + i], [False] * 90 + [True], np.zeros(91), 0.25, 1.0) for i in range(4)]
    packer = Packer(100)
    assert packer.add(branches) == []
    assert packer.pending == 94
    (packed,) = packer.flush()
    assert packed.tokens == 94


def test_rows_are_numbered_through_the_batch_and_from_zero_in_the_next() -> None:
    packer = Packer(10)
    for _ in range(2):
        due = [p for i in range(3) for p in packer.add([row(6, first=20 * i), row(3, first=20 * i + 10)])]
        due += packer.flush()
        assert sorted({n for p in due for n in p.arrays().trajectory.tolist()}) == list(range(6))
    assert packer.flush() == []


def test_rows_without_targets_take_numbers_and_nothing_else() -> None:
    packer = Packer(10)
    idle = Row("e", 0, [1, 2], [False, False], [0, 0], 1.0, 1.0)
    packer.add([idle, row(3)])
    assert packer.pending == 3
    (packed,) = packer.flush()
    assert set(packed.arrays().trajectory.tolist()) == {1}


def test_looking_ahead_packs_fuller() -> None:
    sizes = np.random.default_rng(0).integers(5, 95, 300).tolist()
    rows = [row(n, first=1000 * i) for i, n in enumerate(sizes)]
    steps, room = 1, 100  # first come, first packed
    for n in sizes:
        steps, room = (steps + 1, 100 - n) if n > room else (steps, room - n)
    counts = []
    for window in (1, 2, 4):
        packer = Packer(100, window=window)
        counts.append(sum(len(packer.add([r])) for r in rows) + len(packer.flush()))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] < 0.9 * steps
    assert counts[1] < 0.85 * steps


def test_bad_rows_change_nothing() -> None:
    packer = Packer(10)
    packer.add([row(4)])
    with pytest.raises(BadRow, match="first token"):
        packer.add([row(3, first=50), Row("e", 0, [1, 2], [True, False], [0, 0], 1.0, 1.0)])
    assert packer.pending == 4
    packer.add([row(3, first=50)])
    numbers = {n for p in packer.flush() for n in p.arrays().trajectory.tolist()}
    assert numbers == {0, 1}


@pytest.mark.parametrize(
    ("budget", "layout", "window", "message"),
    [(0, "rows", 2, "budget"), (10, "rows", 0.5, "window"), (10, "rows", float("nan"), "window"), (10, "x", 1, "'x'")],
)
def test_impossible_packers_are_refused(budget: int, layout: Layout, window: float, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        Packer(budget, layout, window=window)


@st.composite
def groups(draw: st.DrawFn) -> list[list[Row]]:
    """Executions that share prefixes, some with branches, some longer than the budget."""
    found = []
    for number in range(draw(st.integers(1, 8))):
        rows = []
        for _ in range(draw(st.integers(0, 4))):
            n = draw(st.integers(2, 14))
            ids = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
            target = [False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))]
            rows.append(Row(f"e{number}", 0, ids, target, -np.arange(n) / 8, draw(st.floats(0.1, 1)), 1.0))
        found.append(rows)
    return found


def loss_terms(packs: list[Packed]) -> list[tuple[int, str, list[int], float, float]]:
    """What the loss is a sum over: each target with its whole past, weight and log-probability."""
    terms = []
    for packed in packs:
        a = packed.arrays()
        for i, source in enumerate(a.source.tolist()):
            past = [j for j in range(source + 1) if source < a.end[j]]
            ids = [*a.ids[past].tolist(), int(a.target[i])]
            execution = packed.executions[a.execution[i]]
            terms.append((int(a.trajectory[i]), execution, ids, float(a.weight[i]), float(a.logprob[i])))
    return sorted(terms)


@few
@given(groups(), st.integers(1, 40), st.sampled_from(["forests", "rows"]), st.sampled_from([1, 1.5, 2, 4]))
def test_streaming_is_packing_the_batch(groups: list[list[Row]], budget: int, layout: Layout, window: float) -> None:
    packer = Packer(budget, layout, window=window)
    streamed: list[Packed] = []
    for rows in groups:
        streamed += packer.add(rows)
        assert packer.pending < window * budget
    streamed += packer.flush()
    numbered = [r.numbered(i) for i, r in enumerate(r for rows in groups for r in rows)]
    whole = (pack_forests if layout == "forests" else pack_rows)(numbered, budget)
    assert loss_terms(streamed) == loss_terms(whole)
    for packed in streamed:
        assert packed.tokens <= budget or (packed.over_budget and len(packed.rows) == 1)

    again = Packer(budget, layout, window=window)
    assert [p for rows in groups for p in again.add(rows)] + again.flush() == streamed
