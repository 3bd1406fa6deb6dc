"""Selection: which paths are drawn, what is a target in them, what is left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gyre_traj import DEFAULT_PRIORITY, RolePriority, Span, Tree, load_priority, pack_forests, select, unpack_ids, weigh
from gyre_traj.errors import BadChoice
from gyre_traj.roles import harnesses, resolve


@pytest.fixture
def compacted(story) -> Tree:
    """A main run, its compaction, the run after it, a sub-agent and a title nobody trains first."""
    story.call("m1", "sys task", "m m m m")
    story.call("s1", "summarise", "s s", parent="m1", role="main-summary")
    story.call("m2", "sys2 summary", "n n n")
    story.call("g1", "agent job", "g g g g g", role="sub-agent")
    story.call("gs", "summarise", "h h", parent="g1", role="sub-agent-summary")
    story.call("t", "title please", "t", role="title")
    return story.tree()


def test_roles_in_order_of_priority(compacted: Tree) -> None:
    selection = select(compacted, None, seed=0)
    assert [(t.role, t.call) for t in selection.trajectories] == [
        ("main", "m2"),
        ("main-summary", "s1"),
        ("sub-agent-summary", "gs"),
        ("title", "t"),
    ]
    assert selection.left_out == {}
    assert selection.targets == compacted.trainable == 17


def test_what_is_left_out_is_said_by_role(compacted: Tree) -> None:
    selection = select(compacted, 2, seed=0)
    assert [t.call for t in selection.trajectories] == ["m2", "s1"]
    assert selection.left_out == {"sub-agent": 5, "sub-agent-summary": 2, "title": 1}


def test_a_shared_token_is_a_target_once(story) -> None:
    story.call("a", "sys task", "one two")
    story.call("b", "left", "l", parent="a")
    story.call("c", "right", "r r", parent="a")
    selection = select(story.tree(), None, seed=1)
    first, second = selection.trajectories
    assert first.target.tolist() == first.trainable.tolist()
    assert second.trainable[:5].tolist() == [False, False, True, True, False]
    assert not second.target[:5].any()
    assert second.target[5:].all()
    assert selection.targets == 5


def test_arrays_of_a_trajectory(story) -> None:
    story.call("a", "sys task", "one two", logprobs=[-0.25, -0.5], version=3)
    story.call("b", "foreign", "x y", parent="a", logprobs=[], version=4)
    story.call("c", "go", "z", parent="b", logprobs=[0.0], version=5)
    (t,) = select(story.tree(), 1, seed=0).trajectories
    assert story.text(t.ids) == "sys task one two foreign x y go z"
    assert t.target.tolist() == [False, False, True, True, False, False, False, False, True]
    assert t.logprobs.tolist() == [0, 0, -0.25, -0.5, 0, 0, 0, 0, 0]
    assert t.version.tolist() == [-1, -1, 3, 3, -1, 4, 4, -1, 5]
    assert (t.ids.dtype, t.target.dtype, t.logprobs.dtype, t.version.dtype) == (
        np.uint32,
        np.bool_,
        np.float32,
        np.int32,
    )


def test_versions_follow_the_tokens_through_a_fork_inside_an_output(story) -> None:
    """Weights changed within the call, and a rewritten history repeats only part of what it sampled."""
    a = story.call("a", "sys task", "one two three four five")
    spans = (Span(3, 0, 2), Span(4, 2, 5), Span(5, 3, 4), Span(-1, 4, 5))  # a later span holds; -1: not known
    story.calls[0] = msgspec.structs.replace(a, versions=spans)
    story.call("b", "sys task one two three rewritten", "z", version=6)
    selection = select(story.tree(), None, seed=0)
    versions = {t.call: t.version.tolist() for t in selection.trajectories}
    assert versions == {"a": [-1, -1, 3, 3, 4, 5, -1], "b": [-1, -1, 3, 3, 4, -1, 6]}
    packed = pack_forests(weigh(selection, advantage=1.0).rows, 100)
    assert sorted(v for p in packed for v in p.arrays().version.tolist()) == [-1, 3, 3, 4, 5, 6]


def test_trajectories_are_views_of_the_records(story) -> None:
    story.call("a", "sys task", "one two")
    story.call("b", "left", "l", parent="a")
    story.call("c", "right", "r", parent="a")
    tree = story.tree()
    first, second = select(tree, None, seed=1).trajectories
    assert [segment.target for segment in first.segments] == [False, True, False, True]
    assert [segment.target for segment in second.segments] == [False, False, False, True]
    for ours, theirs in zip(first.segments[:2], second.segments[:2], strict=True):
        assert ours.ids is theirs.ids
    assert np.shares_memory(first.segments[1].ids, unpack_ids(tree.calls["a"].output))


@pytest.mark.parametrize(
    ("given", "divided_by"), [(0.5, 0.5), (1, 1.0), (0.0, 1.0), (1e-7, 1.0), (None, 1.0), ("hot", 1.0)]
)
def test_temperatures_come_from_the_calls(story, given: object, divided_by: float) -> None:
    a = story.call("a", "sys task", "one two")
    tree = Tree("e")
    tree.add(msgspec.structs.replace(a, sampling={} if given is None else {"temperature": given}))
    (t,) = select(tree, 1, seed=0).trajectories
    assert t.temperature.tolist() == [1, 1, divided_by, divided_by]
    assert weigh(select(tree, 1, seed=0), advantage=1.0).rows[0].temperature is not None


def test_a_turn_without_log_probabilities_is_never_drawn_for(story) -> None:
    story.call("a", "sys task", "one two", logprobs=[])
    selection = select(story.tree(), None, seed=0)
    assert (selection.trajectories, selection.left_out) == ((), {})


def test_leaves_are_drawn_in_proportion_to_their_unmasked_tokens(story) -> None:
    story.call("short", "sys task", "x")
    story.call("long", "sys task", "y y y")
    tree = story.tree()
    drawn = Counter(select(tree, 1, seed).trajectories[0].call for seed in range(2000))
    assert 0.72 < drawn["long"] / 2000 < 0.78


def test_masked_tokens_no_longer_count(story) -> None:
    """After the long shared trunk is taken, the branches left are equally likely."""
    story.call("a", "sys task", " ".join(["t"] * 50))
    for name in "xyz":
        story.call(name, name, name, parent="a")
    tree = story.tree()
    second = Counter(select(tree, 2, seed).trajectories[1].call for seed in range(1500))
    assert all(400 < second[name] < 600 for name in "xyz")


def test_the_same_seed_draws_the_same_everywhere(story, new_story) -> None:
    for i in range(20):
        story.call(f"c{i}", "sys task", f"w{i}")
    tree = story.tree()
    drawn = [t.call for t in select(tree, 5, seed=7).trajectories]
    assert drawn == ["c18", "c19", "c0", "c2", "c9"]
    assert drawn == [t.call for t in select(tree, 5, seed=7).trajectories]
    other = new_story("another execution")
    for i in range(20):
        other.call(f"c{i}", "sys task", f"w{i}")
    assert drawn != [t.call for t in select(other.tree(), 5, seed=7).trajectories]


def test_an_empty_tree_selects_nothing() -> None:
    assert select(Tree("e"), 3, seed=0).trajectories == ()


@pytest.mark.parametrize("j_max", [0, -1])
def test_j_max_below_one_is_refused(j_max: int) -> None:
    with pytest.raises(BadChoice, match="at least 1"):
        select(Tree("e"), j_max, seed=0)


def test_priority_is_data(compacted: Tree, tmp_path: Path) -> None:
    table = tmp_path / "roles.toml"
    table.write_text('[roles]\npriority = ["title", "sub-agent-summary"]\n')
    priority = load_priority(table)
    assert [t.role for t in select(compacted, 2, 0, priority).trajectories] == ["title", "sub-agent-summary"]
    assert priority.rank("main") == priority.rank("anything") == 2
    assert DEFAULT_PRIORITY.rank("main") == 0


def test_an_excluded_role_is_never_drawn_and_counted_as_left_out(compacted: Tree) -> None:
    priority = RolePriority(priority=("main",), exclude=("title",))
    everything, without = select(compacted, None, 0), select(compacted, None, 0, priority)
    title = sum(int(t.target.sum()) for t in everything.trajectories if t.role == "title")
    assert title > 0
    assert "title" not in [t.role for t in without.trajectories]
    assert without.left_out == {"title": title}


def test_every_built_in_table_puts_main_first() -> None:
    assert set(harnesses()) == {"claude-code", "codex", "opencode", "qwen-code", "mini-swe-agent", "openhands"}
    for name in harnesses():
        assert resolve(name).rank("main") == 0


def test_a_table_is_named_or_a_file(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text('[roles]\npriority = ["a"]\nexclude = ["b"]\n')
    assert resolve(table) == resolve(str(table)) == RolePriority(priority=("a",), exclude=("b",))
    with pytest.raises(BadChoice, match="expected one of"):
        resolve("claude")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "cannot be read"),
        ("x = 1", "no section"),
        ("[roles]\npriorities = []", "unknown field"),
        ('[roles]\npriority = "main"', "Expected `array`"),
        ('[roles]\npriority = ["a", "a"]', "may appear once"),
        ('[roles]\npriority = ["a"]\nexclude = ["a"]', "may appear once"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "roles.toml"
    table.write_text(text)
    with pytest.raises(BadChoice, match=message):
        load_priority(table)


def test_missing_table(tmp_path: Path) -> None:
    with pytest.raises(BadChoice, match="cannot be read"):
        load_priority(tmp_path / "none.toml")
    assert RolePriority(priority=()).rank("main") == 0
