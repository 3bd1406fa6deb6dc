"""The tree, told in words: prompts in the open, sampled tokens in brackets."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from gyre_traj import Call, Header, Log, Span, Tree, pack_ids, pack_logprobs, select
from gyre_traj.errors import BrokenCall, LogError, TrajError, UnknownCall


def test_turns_make_one_trajectory(story) -> None:
    story.call("a", "sys task", "think edit")
    story.call("b", "result", "done", parent="a")
    tree = story.tree()
    assert story.paths(tree) == ["sys task [think edit] result [done]"]
    assert (tree.tokens_total, tree.tokens_unique, tree.trainable) == (6, 6, 3)


def test_a_child_without_parent_is_found_by_its_ids(story) -> None:
    story.call("a", "sys task", "think edit")
    story.call("b", "sys task think edit result", "done")
    assert story.paths(story.tree()) == ["sys task [think edit] result [done]"]


def test_two_completions_of_one_prompt_are_siblings(story) -> None:
    """Never chained, and never merged though they begin alike."""
    story.call("a", "sys task", "think edit")
    story.call("b", "sys task", "think stop")
    tree = story.tree()
    assert story.paths(tree) == ["sys task [think edit]", "sys task [think stop]"]
    assert (tree.tokens_total, tree.tokens_unique, tree.trainable) == (8, 6, 4)


def test_three_siblings_and_a_continued_second_are_three_trajectories(story) -> None:
    for name, word in (("a", "x"), ("b", "y"), ("c", "z")):
        story.call(name, "sys task", f"think {word}")
    story.call("d", "result", "done", parent="b")
    assert story.paths(story.tree()) == [
        "sys task [think x]",
        "sys task [think y] result [done]",
        "sys task [think z]",
    ]


@pytest.mark.parametrize("linked", [True, False])
def test_interleaved_agents_are_two_trajectories(story, linked: bool) -> None:
    story.call("a1", "sys taskA", "stepA")
    story.call("b1", "sys taskB", "stepB", role="sub-agent")
    whole_a, whole_b = ("resultA", "resultB") if linked else ("sys taskA stepA resultA", "sys taskB stepB resultB")
    story.call("a2", whole_a, "doneA", parent="a1" if linked else None)
    story.call("b2", whole_b, "doneB", parent="b1" if linked else None, role="sub-agent")
    tree = story.tree()
    assert story.paths(tree) == ["sys taskA [stepA] resultA [doneA]", "sys taskB [stepB] resultB [doneB]"]
    assert [leaf.role for leaf in tree.leaves] == ["main", "sub-agent"]


def test_drift_forks_at_the_exact_token_and_keeps_what_was_before(story) -> None:
    """One rewritten position costs neither the output nor the turns before it."""
    story.call("a", "sys task", "one two three four")
    story.call("b", "sys task one two THREE four result", "done")
    tree = story.tree()
    assert story.paths(tree) == [
        "sys task [one two] [three four]",
        "sys task [one two] THREE four result [done]",
    ]
    assert tree.trainable == 5
    assert [node.call.call for node in tree.leaves if node.call] == ["a", "b"]
    assert tree.end("a").offset == 2


def test_a_short_follow_up_does_not_wipe_a_long_history(story) -> None:
    long = " ".join(f"t{i}" for i in range(2000))
    story.call("a", "sys task", long)
    story.call("b", "next", "more", parent="a")
    story.call("c", "sys task t0 t1 other", "short")
    tree = story.tree()
    assert tree.trainable == 2002
    assert [len(path[-1].ids) + path[-1].start for path in tree.paths()] == [2004, 6]


def test_prompts_that_differ_share_up_to_the_difference(story) -> None:
    story.call("a", "sys rules task one", "x")
    story.call("b", "sys rules task two", "y")
    story.call("c", "sys rules", "z")
    tree = story.tree()
    assert [" ".join(story.text(n.ids) for n in path) for path in tree.paths()] == [
        "sys rules task one x",
        "sys rules task two y",
        "sys rules z",
    ]
    assert tree.tokens_unique == 8


def test_an_unmatched_prompt_is_a_root(story) -> None:
    story.call("a", "sys task", "x")
    story.call("b", "summary task", "y")
    tree = story.tree()
    assert [story.text(root.ids) for root in tree.roots] == ["sys task", "summary task"]


def test_an_empty_generation_is_nobody_parent(story) -> None:
    story.call("a", "sys task", "")
    story.call("b", "again", "x", parent="a")
    story.call("c", "sys task", "y")
    story.call("d", "sys other", "")
    tree = story.tree()
    assert story.paths(tree) == ["sys task again [x]", "sys task [y]"]
    assert len(tree.calls) == 4
    assert tree.tokens_unique == 5  # what only empty generations saw is on no path


def test_a_continued_truncated_turn_extends_it(story) -> None:
    """finish_reason=length: the harness replays the turn and the policy goes on."""
    story.call("a", "sys task", "one two")
    story.call("b", "", "three", parent="a")
    assert story.paths(story.tree()) == ["sys task [one two] [three]"]


def test_the_newest_of_equal_outputs_is_continued_unless_a_parent_is_named(story) -> None:
    story.call("a", "sys task", "same")
    story.call("b", "sys task", "same")
    story.call("c", "sys task same result", "x")
    story.call("d", "result", "y", parent="a")
    a, b, c, d = story.calls
    for order in ((a, b, c, d), (b, a, d, c)):
        tree = Tree("e")
        for call in order:
            tree.add(call)
        above = {name: [n.call.call for n in tree.end(name).path() if n.call] for name in "cd"}
        assert above == {"c": ["b", "c"], "d": ["a", "d"]}


def test_the_longest_match_wins_over_the_newest(story) -> None:
    story.call("a", "sys task", "think one")
    story.call("b", "sys task", "think two")
    story.call("c", "sys task think one result", "x")
    assert [n.call.call for n in story.tree().end("c").path() if n.call] == ["a", "c"]


def test_a_late_call_takes_the_place_it_would_have_had(story) -> None:
    """b repeats a's output but is read first: when a comes, b moves below it."""
    a = story.call("a", "sys task", "think edit")
    b = story.call("b", "sys task think edit result", "done")
    tree = Tree("e")
    for call in (b, a):
        tree.add(call)
    assert story.paths(tree) == ["sys task [think edit] result [done]"]


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_a_time_that_is_no_number_does_not_decide_the_order(story, order: tuple[int, ...]) -> None:
    for name, word, at in (("a", "x", 1.0), ("b", "y", float("nan")), ("c", "z", 0.5)):
        story.calls.append(msgspec.structs.replace(story.call(name, "sys", word), started=at))
        del story.calls[-2]
    tree = Tree("e")
    for i in order:
        tree.add(story.calls[i])
    assert [leaf.call.call for leaf in tree.leaves] == ["b", "c", "a"]


@pytest.mark.parametrize("output", ["z", ""])
def test_a_late_call_settles_which_of_two_equal_outputs_was_repeated(story, output: str) -> None:
    """d could repeat a or b. c shows that a was gone on with: d shares that, whether c is read before it or after."""
    story.call("a", "sys task", "same")
    story.call("b", "sys task", "same")
    story.call("c", "result", output, parent="a")
    story.call("d", "sys task same result more", "w")
    a, b, c, d = story.calls
    for order in ((a, b, c, d), (a, b, d, c), (b, a, d, c)):
        tree = Tree("e")
        for call in order:
            tree.add(call)
        assert [n.call.call for n in tree.end("d").path() if n.call] == ["a", "d"]


def test_undelivered_calls_are_marked_and_stay(story) -> None:
    a, b = story.call("a", "sys task", "x"), story.call("b", "sys task", "y")
    tree = Tree("e")
    tree.add(a, delivered=False)
    tree.add(b)
    assert tree.delivered == {"a": False, "b": True}
    assert len(tree.leaves) == 2


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_what_did_not_end_whole_is_no_target(story, finish: str) -> None:
    a = msgspec.structs.replace(story.call("a", "sys task", "x y"), finish=finish)
    tree = Tree("e")
    tree.add(a)
    assert (tree.trainable, select(tree, 1, seed=0).targets) == (0, 0)
    assert finish in tree.untrainable["a"]
    assert story.paths(tree) == ["sys task [x y]"]


@pytest.mark.parametrize("parent", ["a", None])
def test_what_was_not_delivered_is_a_target_only_when_something_continues_it(story, parent: str | None) -> None:
    a = story.call("a", "sys task", "x y")
    b = story.call("b", "result" if parent else "sys task x y result", "z", parent=parent)
    partly = story.call("c", "sys task x other", "w")  # departs inside a's output
    tree = Tree("e")
    tree.add(a, delivered=False)
    assert (tree.trainable, list(tree.untrainable)) == (0, ["a"])
    tree.add(partly)
    assert (tree.trainable, list(tree.untrainable)) == (1, ["a"])
    tree.add(b)
    assert (tree.trainable, list(tree.untrainable)) == (4, [])
    assert [node.logprobs.tolist() for node in tree.end("a").path() if node.call] == [[-0.5], [-0.5]]


def test_a_delivery_that_is_known_later_makes_a_target(story) -> None:
    a = story.call("a", "sys task", "x")
    tree = Tree("e")
    tree.add(a, delivered=False)
    assert tree.trainable == 0
    tree.add(a, delivered=True)
    assert (tree.trainable, tree.untrainable) == (1, {})


def test_the_same_record_again_adds_nothing(story) -> None:
    a = story.call("a", "sys task", "x")
    tree = Tree("e")
    tree.add(a, delivered=False)
    tree.add(msgspec.structs.replace(a), delivered=True)  # a retry that joined the attempt
    assert (len(tree.leaves), tree.delivered) == (1, {"a": True})
    with pytest.raises(BrokenCall, match="came twice"):
        tree.add(msgspec.structs.replace(a, role="sub-agent"))


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([], "no log-probabilities"),
        ([-0.1, float("nan")], "not finite"),
        ([-0.1, float("-inf")], "not finite"),
        ([-0.1, 0.3], "above 0"),
    ],
)
def test_missing_log_probabilities_are_not_certainty(story, logprobs: list[float], reason: str) -> None:
    story.call("a", "sys task", "x y", logprobs=logprobs)
    story.call("b", "result", "z", parent="a")
    tree = story.tree()
    assert tree.trainable == 1
    assert reason in tree.untrainable["a"]
    assert story.paths(tree) == ["sys task [x y] result [z]"]


def test_versions_follow_the_tokens_through_a_split(story) -> None:
    a = story.call("a", "sys task", "one two three four")
    b = story.call("b", "sys task one other", "done", version=4)
    tree = Tree("e")
    tree.add(msgspec.structs.replace(a, versions=(Span(2, 0, 2), Span(3, 2, 3))))
    tree.add(b)
    assert [node.versions().tolist() for node in tree.end("a").path()] == [[-1, -1], [2], [2, 3, -1]]
    assert tree.versions == (2, 3, 4)


BROKEN = {
    "another execution": ({"execution": "f"}, "belongs to execution 'f'"),
    "unknown parent": ({"parent": "zz", "prefix": 3}, "names parent 'zz'"),
    "wrong prefix": ({"parent": "a", "prefix": 9}, "prefix 9, its parent 'a' has 3"),
    "prefix of a root": ({"prefix": 1}, "has prefix 1"),
    "log-probabilities of other length": ({"logprobs": pack_logprobs([-1, -1])}, "2 log-probabilities"),
    "half a token": ({"output": b"abc"}, "4 bytes each"),
    "span outside": ({"versions": (Span(0, 0, 2),)}, "reach outside"),
    "no prompt": ({"prompt": b""}, "empty prompt"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_call_changes_nothing(story, case: str) -> None:
    story.call("a", "sys task", "x")
    tree = story.tree()
    before = story.paths(tree), dict(tree.calls), dict(tree.delivered)
    changes, message = BROKEN[case]
    good = Call(call="b", execution="e", prompt=pack_ids([1]), output=pack_ids([2]), logprobs=pack_logprobs([-1]))
    with pytest.raises(TrajError, match=message):
        tree.add(msgspec.structs.replace(good, **changes))
    assert (story.paths(tree), tree.calls, tree.delivered) == before
    tree.add(good)


def test_from_log(story) -> None:
    a, b = story.call("a", "sys task", "x"), story.call("b", "result", "y", parent="a")
    tree = Tree.from_log(Log(Header(execution="e"), [a, b], {"a": True}))
    assert tree.delivered == {"a": True, "b": False}
    with pytest.raises(LogError, match="no header"):
        Tree.from_log(Log(None, [a]))
    with pytest.raises(UnknownCall):
        tree.end("zz")


def test_nodes_are_views_of_the_records(story) -> None:
    """Only deltas are held: no id is copied when a tree is built from a log."""
    story.call("a", "sys task", "x y")
    tree = story.tree()
    (path,) = tree.paths()
    assert all(node.ids.base is not None and not node.ids.flags.owndata for node in path)
    assert np.concatenate([node.ids for node in path]).tolist() == [1, 2, 3, 4]


def test_a_node_outlives_its_tree_with_its_path_and_without_its_children(story) -> None:
    story.call("a", "sys task", "one two")
    story.call("b", "result", "done", parent="a")
    tree = story.tree()
    (leaf,), (root,) = tree.leaves, tree.roots
    assert len(root.children) == 1
    del tree
    assert story.text(np.concatenate([node.ids for node in leaf.path()])) == "sys task one two result done"
    with pytest.raises(AttributeError, match="children"):
        _ = root.children


def test_a_version_that_no_array_holds_is_not_known(story) -> None:
    story.call("a", "sys", "one two", version=1 << 31)
    tree = story.tree()
    assert tree.end("a").versions().tolist() == [-1, -1]
    assert select(tree, 1, seed=0).trajectories[0].version.tolist() == [-1, -1, -1]
