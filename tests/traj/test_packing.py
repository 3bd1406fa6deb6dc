"""Packing: every target once, under the budget, in the documented layout."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from gyre_traj import Packed, Row, Segment, TargetRun, pack_forests, pack_ids, pack_rows, unique_tokens, unpack_ids
from gyre_traj.errors import BadIds, BadRow


def row(ids: str, number: int = 0, execution: str = "e", weight: float = 0.5, advantage: float = 1.0) -> Row:
    """A row from letters; capitals are targets, whose log-probability is minus their place."""
    target = np.array([c.isupper() for c in ids])
    return Row(
        execution,
        number,
        np.array([ord(c.lower()) for c in ids], dtype=np.uint32),
        target,
        np.where(target, -np.arange(len(ids)), 0).astype(np.float32),
        weight,
        advantage,
    )


def letters(values: np.ndarray) -> str:
    return "".join(map(chr, values))


def test_the_layout_of_the_module_docstring() -> None:
    (packed,) = pack_forests([row("abcDE", 0), row("abXY", 1)], 7)
    arrays = packed.arrays()
    assert letters(arrays.ids) == "abcdexy"
    assert arrays.position.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert arrays.end.tolist() == [7, 7, 5, 5, 5, 7, 7]
    assert letters(arrays.target) == "dexy"
    assert letters(arrays.ids[arrays.source]) == "cdbx"
    assert arrays.source.tolist() == [2, 3, 1, 5]
    assert arrays.logprob.tolist() == [-3, -4, -2, -3]
    assert arrays.trajectory.tolist() == [0, 0, 1, 1]
    assert packed.executions == ("e",)


def test_rows_are_trees_without_branches() -> None:
    (packed,) = pack_rows([row("aBC", 0, "e", 0.5, 1.0), row("aBxY", 1, "f", 0.25, -1.0)], 7)
    arrays = packed.arrays()
    assert letters(arrays.ids) == "abcabxy"
    assert arrays.position.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert arrays.end.tolist() == [3, 3, 3, 7, 7, 7, 7]
    assert arrays.source.tolist() == [0, 1, 3, 5]
    assert arrays.weight.tolist() == [0.5, 0.5, 0.25, 0.25]
    assert arrays.advantage.tolist() == [1, 1, -1, -1]
    assert [packed.executions[i] for i in arrays.execution] == ["e", "e", "f", "f"]


def test_two_samples_of_the_same_ids_are_two_targets_of_one_token() -> None:
    (packed,) = pack_forests([row("abC", 0), row("abC", 1)], 10)
    arrays = packed.arrays()
    assert letters(arrays.ids) == "abc"
    assert arrays.source.tolist() == [1, 1]
    assert arrays.trajectory.tolist() == [0, 1]


def test_executions_share_a_prefix_and_keep_their_own_targets() -> None:
    (packed,) = pack_forests([row("abCd", 0, "e", 0.5, 1.0), row("abCX", 1, "f", 0.25, -1.0)], 10)
    arrays = packed.arrays()
    assert letters(arrays.ids) == "abcx"
    assert letters(arrays.target) == "ccx"
    assert [packed.executions[i] for i in arrays.execution] == ["e", "f", "f"]
    assert arrays.advantage.tolist() == [1, -1, -1]
    assert arrays.weight.tolist() == [0.5, 0.25, 0.25]


def test_executions_under_one_prompt_cost_it_once() -> None:
    (packed,) = pack_forests([row("abcdE", 0, "e"), row("xY", 1, "g"), row("abcdF", 2, "f")], 12)
    assert packed.tokens == 4 + 1 + 1 + 2


def test_tails_without_targets_are_dropped() -> None:
    (packed,) = pack_rows([row("aBcde", 0), row("abc", 1)], 10)
    assert letters(packed.arrays().ids) == "ab"


def test_a_row_longer_than_the_budget_is_alone_and_says_so() -> None:
    packs = pack_rows([row("abcdefG", 0), row("aB", 1), row("aC", 2)], 4)
    assert [(p.tokens, p.over_budget) for p in packs] == [(4, False), (7, True)]


def test_a_tree_larger_than_the_budget_is_cut_between_rows() -> None:
    rows = [row("prefixA", 0), row("prefixB", 1), row("prefixC", 2)]
    packs = pack_forests(rows, 8)
    assert [letters(p.arrays().ids) for p in packs] == ["prefixab", "prefixc"]
    assert sorted(t for p in packs for t in p.arrays().trajectory.tolist()) == [0, 1, 2]


def test_packs_are_as_few_as_first_fit_and_as_equal_as_they_come() -> None:
    rows = [row("a" * (n - 1) + "B", i) for i, n in enumerate([50, 40, 30, 30, 20, 10])]
    packs = pack_rows(rows, 120)
    assert [p.tokens for p in packs] == [90, 90]


def test_first_fit_decides_when_balancing_would_need_more() -> None:
    rows = [row("a" * (n - 1) + "B", i) for i, n in enumerate([6, 5, 4, 3, 2])]
    assert sorted(p.tokens for p in pack_rows(rows, 10)) == [10, 10]


def test_a_row_over_the_budget_does_not_loosen_it_for_the_others() -> None:
    rows = [row("a" * (n - 1) + "B", i) for i, n in enumerate([1000, 6, 5, 4, 3, 2])]
    packs = pack_rows(rows, 10)
    assert [(p.tokens, p.over_budget) for p in packs] == [(10, False), (10, False), (1000, True)]
    assert {p.budget for p in packs} == {10}


def test_a_tree_is_cut_where_least_is_repeated() -> None:
    """Filling the first micro-step would part the long branch and repeat ten tokens; parting "prefix" repeats six."""
    packs = pack_forests([row("prefixaB", 0), row("prefixlongC", 1), row("prefixlongD", 2)], 13)
    assert sorted(letters(p.arrays().ids) for p in packs) == ["prefixab", "prefixlongcd"]


def test_short_prefixes_are_repeated_for_a_better_fit() -> None:
    """Under one common token: pieces that keep it whole would hold neighbours alone, and 4 micro-steps."""
    sizes = {"a": 60, "b": 60, "c": 39, "d": 60, "e": 39, "f": 39}
    packs = pack_forests(
        [row("s" + name * (n - 1) + name.upper(), i) for i, (name, n) in enumerate(sizes.items())], 101
    )
    assert [p.tokens for p in packs] == [100, 100, 100]


def test_what_shares_a_micro_step_shares_its_prefix_wherever_it_was_cut() -> None:
    rows = [row("s" + "a" * 60 + "A", 0), row("s" + "b" * 20 + "B", 1), row("s" + "c" * 20 + "C", 2)]
    (packed,) = pack_forests(rows, 200)
    assert packed.tokens == 1 + 61 + 21 + 21


def test_packing_is_deterministic_and_travels() -> None:
    rows = [row("aBcD" * (1 + i % 5), i, f"e{i % 3}") for i in range(40)]
    packs = pack_forests(rows, 50)
    assert packs == pack_forests(list(rows), 50)
    assert [msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=Packed) for p in packs] == packs


def test_temperatures_and_versions_travel_with_their_targets() -> None:
    a = row("aBxCDE", 0)
    heat = np.array([1, 0.5, 1, 0.7, 0.7, 0.7], np.float32)
    hot = Row("e", 0, a.ids, a.target, a.logprobs, 0.5, 1.0, heat, [9, 3, 9, 3, 4, -1])
    (packed,) = pack_forests([hot, row("aBF", 1)], 10)
    arrays = packed.arrays()
    assert letters(arrays.target) == "bfbcde"
    assert arrays.temperature.tolist() == np.array([1, 1, 0.5, 0.7, 0.7, 0.7], np.float32).tolist()
    assert arrays.version.tolist() == [-1, -1, 3, 3, 4, -1]
    with pytest.raises(BadRow, match="temperatures too and above 0"):
        pack_rows([Row("e", 0, a.ids, a.target, a.logprobs, 0.5, 1.0, np.zeros(6))], 10)


def test_a_row_gives_back_its_arrays() -> None:
    ids, target = [5, 6, 7, 8, 9], [False, True, True, False, True]
    made = Row("e", 3, ids, target, [9, -1, -2, 9, -3], 0.5, -1.0, [1, 2, 2, 1, 3], [-1, 4, 5, -1, -1], "sub-agent")
    assert made.ids.tolist() == ids
    assert made.target.tolist() == made.trainable.tolist() == target
    assert made.logprobs.tolist() == [0, -1, -2, 0, -3]
    assert made.temperature.tolist() == [1, 2, 2, 1, 3]
    assert made.version.tolist() == [-1, 4, 5, -1, -1]
    assert (len(made), made.targets, made.role, made.numbered(7).trajectory) == (5, 3, "sub-agent", 7)
    assert [len(segment) for segment in made.segments] == [1, 1, 1, 1, 1]
    dtypes = [a.dtype for a in (made.ids, made.target, made.logprobs, made.version, made.temperature)]
    assert dtypes == [np.uint32, np.bool_, np.float32, np.int32, np.float32]
    assert len(Row("e", 0, [], [], [], 0.5, 1.0)) == 0


def test_nothing_to_pack() -> None:
    assert pack_rows([], 10) == []
    assert pack_rows([row("abc", 0)], 10) == []


@pytest.mark.parametrize(
    ("rows", "budget", "message"),
    [
        ([row("Ab", 0)], 10, "first token"),
        ([row("aB", 0), row("aC", 0)], 10, "unique"),
        ([row("aB", 0, weight=float("nan"))], 10, "finite"),
        ([row("aB", 0, weight=1e39)], 10, "float32"),
        ([Row("e", 0, [1, 2], [False, True], [0, -1], 1.0, 1.0, temperature=[1, 1e-50])], 10, "temperature 0.0"),
        ([row("aB", 0)], 0, "at least 1"),
    ],
)
def test_bad_rows_are_refused(rows: list[Row], budget: int, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        pack_rows(rows, budget)


def test_segments_without_tokens_change_nothing() -> None:
    def context(*ids: int) -> Segment:
        return Segment(np.array(ids, np.uint32), np.zeros(0, np.float32))

    def target(token: int) -> Segment:
        return Segment(np.array([token], np.uint32), np.array([-1], np.float32), target=True)

    first = Row.from_segments("e", 0, (context(1, 2), context(), target(3)), weight=1.0, advantage=1.0)
    second = Row.from_segments("e", 1, (context(1), context(), context(2), target(4)), weight=1.0, advantage=1.0)
    assert [packed.tokens for packed in pack_forests([first, second], 10)] == [4]
    with pytest.raises(BadRow, match="first token"):
        pack_rows([Row.from_segments("e", 0, (context(), target(3)), weight=1.0, advantage=1.0)], 10)


@pytest.mark.parametrize(
    "ids", [[-1], [1 << 32], [1 << 64], [1.0], [True], ["7"], [[1, 2]], np.array([-100]), np.array([1 << 32]), 5]
)
def test_ids_are_neither_wrapped_nor_rounded(ids: Any) -> None:
    with pytest.raises(BadIds, match="whole numbers in"):
        pack_ids(ids)
    with pytest.raises(BadIds, match="whole numbers in"):
        Row("e", 0, ids, [False], [0], 1.0, 1.0)


@pytest.mark.parametrize("ids", [[], [0, (1 << 32) - 1], (3,), np.array([3, 1], np.uint16), np.arange(9)[::2]])
def test_ids_of_any_whole_kind_are_packed(ids: Any) -> None:
    assert unpack_ids(pack_ids(ids)).tolist() == [int(i) for i in ids]


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadRow, match="2 ids, 1 target flags, 2 log-probabilities, 2 temperatures"):
        Row("e", 0, [1, 2], [True], [0, 0], 1.0, 1.0)


def test_a_segment_without_log_probabilities_is_no_target() -> None:
    context = Segment(np.array([1], np.uint32), np.zeros(0, np.float32))
    bare = Segment(np.array([2], np.uint32), np.zeros(0, np.float32), target=True)
    with pytest.raises(BadRow, match="1 targets with 0 log-probabilities"):
        pack_rows([Row.from_segments("e", 0, (context, bare), weight=1.0, advantage=1.0)], 10)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 0),
        (["abc"], 3),
        (["abc", "abd", "ae"], 5),
        (["ab", "abc", "ab"], 3),
        (["ba", "ab", "b", "a", ""], 4),
    ],
)
def test_unique_tokens_are_the_nodes_of_the_trie(words: list[str], expected: int) -> None:
    assert unique_tokens([row(word) for word in words]) == expected


# --- on the wire --------------------------------------------------------------------------------------------------


def test_a_packed_micro_step_says_what_attention_costs() -> None:
    (packed,) = pack_forests([row("abcDE", 0), row("abXY", 1)], 7)
    assert packed.attended == int((packed.arrays().position + 1).sum()) == 1 + 2 + 3 + 4 + 5 + 3 + 4


def test_only_ids_and_log_probabilities_take_room() -> None:
    """A row of 100,000 tokens and 200 turns."""
    target = np.arange(100_000) % 500 >= 250
    (packed,) = pack_rows([Row("e", 0, np.arange(100_000), target, np.zeros(100_000), 0.5, 1.0)], 100_000)
    assert len(msgspec.msgpack.encode(packed)) < 4 * packed.tokens + 4 * packed.targets + 200 * 25


def changed(**values: object) -> dict[str, object]:
    """The wire form of rows [abcDE] [abXY], changed."""
    run = {"run": [3, 5, 1.0, -1], **{k: v for k, v in values.items() if k == "run"}}["run"]
    first = [0, 0, 0.5, 1.0, 0, 5, [run]]
    second = [0, 1, 0.5, 1.0, 2, 4, [[2, 4, 1.0, 7]]]
    names = ("execution", "trajectory", "weight", "advantage", "shared", "length")
    for name, value in values.items():
        if name in names:
            second[names.index(name)] = value
    whole = {"ids": b"\0" * 28, "logprobs": b"\0" * 16, "rows": [first, second], "executions": ["e"], "budget": 7}
    return whole | {name: value for name, value in values.items() if name in whole}


def test_the_wire_form() -> None:
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(changed()), type=Packed)
    assert packed.arrays().source.tolist() == [2, 3, 1, 5]
    assert packed.arrays().version.tolist() == [-1, -1, 7, 7]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ids": b"\0" * 27}, "4 bytes each"),
        ({"ids": b"\0" * 24}, "7 tokens and 4 targets, but 6 ids"),
        ({"logprobs": b"\0" * 20}, "but 7 ids and 5 log-probabilities"),
        ({"logprobs": b"\0\0\xc0\x7f" * 4}, "finite"),
        ({"shared": 6, "length": 8}, "shares 6 with the one before, of 5"),
        ({"shared": 5}, "of 4 tokens shares 5"),
        ({"shared": -1}, "shares -1"),
        ({"execution": 1}, "execution 1, of 1"),
        ({"execution": -1}, "execution -1"),
        ({"trajectory": 1 << 32}, "trajectory number"),
        ({"weight": float("nan")}, "must be finite"),
        ({"advantage": float("inf")}, "must be finite"),
        ({"advantage": -1e39}, "must be finite in float32"),
        ({"run": [3, 5, 1e-50, -1]}, "temperature 1e-50"),
        ({"run": [3, 5, 1e39, -1]}, "temperature 1e"),
        ({"run": [0, 2, 1.0, -1]}, r"targets \[0, 2\), expected a run at or after 1"),
        ({"run": [3, 6, 1.0, -1]}, r"of 5 tokens has targets \[3, 6\)"),
        ({"run": [3, 3, 1.0, -1]}, "expected a run"),
        ({"run": [3, 5, 0.0, -1]}, "temperature 0.0"),
        ({"run": [3, 5, 1.0, -2]}, "version -2"),
    ],
)
def test_what_would_index_out_of_range_is_refused_on_arrival(values: dict[str, object], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        msgspec.msgpack.decode(msgspec.msgpack.encode(changed(**values)), type=Packed)


def test_runs_of_targets_do_not_overlap() -> None:
    (packed,) = pack_rows([row("aBCD", 0)], 4)
    (only,) = packed.rows
    runs = (TargetRun(1, 3), TargetRun(2, 3))
    with pytest.raises(BadRow, match="at or after 3"):
        msgspec.structs.replace(packed, rows=(msgspec.structs.replace(only, targets=runs),))
