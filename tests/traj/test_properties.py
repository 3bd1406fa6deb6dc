"""Properties of the tree, the selection and the packing over random executions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gyre_traj import (
    Call,
    Counting,
    Log,
    Packed,
    Packer,
    Row,
    Tree,
    pack_forests,
    pack_ids,
    pack_logprobs,
    pack_rows,
    select,
    unpack_ids,
    unpack_logprobs,
    weigh,
)

ROLES = ("main", "main-summary", "sub-agent", "title")
few = settings(max_examples=200, deadline=None)
ids = st.lists(st.integers(1, 3), max_size=4)  # few ids: prompts and outputs often agree by chance


@dataclass(frozen=True)
class Told:
    """A call with its whole prompt spelled out."""

    record: Call
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@st.composite
def executions(draw: st.DrawFn) -> list[Told]:
    """Calls that continue, rewrite, repeat or ignore what came before, with and without naming their parent."""
    told: list[Told] = []
    for number in range(draw(st.integers(1, 9))):
        above = draw(st.none() | st.sampled_from(told)) if told else None
        whole = above.prompt + above.output if above else ()
        named = above is not None and draw(st.booleans())
        kept = len(whole) if named else draw(st.integers(0, len(whole)))
        new = tuple(draw(ids))
        prompt = whole[:kept] + new or (1,)
        output = tuple(draw(ids))
        logprobs = () if draw(st.integers(0, 5)) == 0 else [-0.1 * (number + 1)] * len(output)
        record = Call(
            call=f"c{draw(st.integers(0, 99))}-{number}",
            execution="e",
            role=draw(st.sampled_from(ROLES)),
            parent=above.record.call if named and above else None,
            prefix=kept if named else 0,
            prompt=pack_ids(prompt[kept:] if named else prompt),
            output=pack_ids(output),
            logprobs=pack_logprobs(logprobs),
            started=float(draw(st.integers(0, 3))),
        )
        told.append(Told(record, prompt, output))
    return told


def grow(calls: list[Call]) -> Tree:
    tree = Tree("e")
    for call in calls:
        tree.add(call)
    return tree


def shape(tree: Tree) -> Any:
    """Everything about a tree, in its own order."""
    view = tree.view()
    number = {id(node): i for i, node in enumerate(view.nodes)}
    nodes = [
        (number.get(id(n.parent)), n.start, n.ids.tolist(), n.call.call if n.call else "", n.offset, n.trainable)
        for n in view.nodes
    ]
    ends = {call: [node.ids.tolist() for node in tree.end(call).path()] for call in tree.calls}
    return nodes, [number[id(leaf)] for leaf in view.leaves], view.spans, ends


def causal(draw: st.DrawFn, told: list[Told]) -> list[Call]:
    """Any order in which parents come before their children."""
    left, order = [t.record for t in told], []
    while left:
        done = {call.call for call in order}
        ready = [call for call in left if call.parent is None or call.parent in done]
        order.append(draw(st.sampled_from(ready)))
        left.remove(order[-1])
    return order


@few
@given(st.data())
def test_any_causal_order_of_arrival_gives_the_same_tree(data: st.DataObject) -> None:
    told = data.draw(executions())
    delivered = {t.record.call: data.draw(st.booleans()) for t in told}
    one = Tree("e")
    for t in told:
        one.add(t.record, delivered[t.record.call])
    other = Tree("e")
    for call in causal(data.draw, told):
        other.add(call, delivered[call.call])
        if data.draw(st.booleans()):
            other.view()  # looking in between must not matter
    assert shape(one) == shape(other)
    assert one.untrainable == other.untrainable


@few
@given(executions())
def test_every_path_spells_its_call_and_every_sampled_token_is_in_one_node(told: list[Told]) -> None:
    tree = grow([t.record for t in told])
    for t in told:
        path = tree.end(t.record.call).path()
        assert tuple(np.concatenate([n.ids for n in path]).tolist()) == t.prompt + t.output
    held: dict[tuple[str, int], float] = {}
    for node in tree.view().nodes:
        assert len(node.ids)
        if node.call is not None:
            for i, token in enumerate(node.ids):
                key = (node.call.call, node.offset + i)
                assert key not in held
                assert token == unpack_ids(node.call.output)[node.offset + i]
                held[key] = node.logprobs[i] if node.trainable else 1.0
    assert len(held) == sum(len(t.output) for t in told)
    for t in told:
        for i, logprob in enumerate(unpack_logprobs(t.record.logprobs)):
            assert held[t.record.call, i] == logprob
    assert tree.tokens_unique <= tree.tokens_total


@few
@given(executions())
def test_a_log_resolves_every_call_to_its_whole_ids(told: list[Told]) -> None:
    log = Log(calls=[t.record for t in told])
    for t in told:
        assert tuple(log.full_prompt(t.record.call)) == t.prompt
        assert tuple(log.full_ids(t.record.call)) == t.prompt + t.output


@few
@given(executions())
def test_context_is_shared_and_leaves_end_what_was_sampled(told: list[Told]) -> None:
    tree = grow([t.record for t in told])
    view = tree.view()
    children: dict[int, list[Any]] = {}
    for node in view.nodes:
        children.setdefault(id(node.parent), []).append(node)
    for group in children.values():
        context = [node for node in group if node.call is None]
        assert len({int(node.ids[0]) for node in context}) == len(context)
    assert all(leaf.call is not None and id(leaf) not in children for leaf in view.leaves)
    for node, (first, last) in zip(view.nodes, view.spans, strict=True):
        below = [i for i, leaf in enumerate(view.leaves) if node in leaf.path()]
        assert below == list(range(first, last))
        assert below


@few
@given(executions(), st.none() | st.integers(1, 4), st.integers(0, 5), st.sampled_from(Counting))
def test_selection_masks_and_weights(told: list[Told], j_max: int | None, seed: int, counting: Counting) -> None:
    tree = grow([t.record for t in told])
    selection = select(tree, j_max, seed)
    assert j_max is None or len(selection.trajectories) <= j_max
    assert selection.targets + sum(selection.left_out.values()) == tree.trainable
    if j_max is None:
        assert not selection.left_out
    logprobs = [t.logprobs[t.target] for t in selection.trajectories]
    assert all(len(values) for values in logprobs)  # every trajectory drawn adds something
    assert all(not (t.target & ~t.trainable).any() for t in selection.trajectories)
    rows = weigh(selection, advantage=1.0, counting=counting).rows
    if rows:
        assert abs(sum(float(row.weight) * int(row.target.sum()) for row in rows) - 1.0) < 1e-9


@few
@given(
    st.lists(executions(), min_size=1, max_size=3),
    st.none() | st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from(["forests", "rows"]),
    st.booleans(),
    st.sampled_from(Counting),
)
def test_each_target_once_and_each_execution_weighs_one_however_the_batch_is_cut(
    batch: list[list[Told]],
    j_max: int | None,
    budget: int,
    layout: Literal["forests", "rows"],
    streaming: bool,
    counting: Counting,
) -> None:
    number = 0
    packer = Packer(budget, layout)
    packs: list[Packed] = []
    rows: list[Row] = []
    left: Counter[tuple[str, float]] = Counter()  # of each sampled token, told by its log-probability
    expected: dict[str, float] = {}
    for e, told in enumerate(batch):
        tree = Tree(f"e{e}")
        for t in told:
            size = len(t.record.logprobs) // 4
            logprobs = -(np.arange(number, number + size) + 1.0) / 1024  # exact in float32
            number += size
            tree.add(replace(t.record, execution=tree.execution, logprobs=pack_logprobs(logprobs)))
            left.update({(tree.execution, float(value)): 1 for value in logprobs})
        mine = weigh(select(tree, j_max, 0), advantage=1.0, counting=counting).rows
        expected |= {tree.execution: 1.0} if mine else {}
        rows += [row.numbered(len(rows) + i) for i, row in enumerate(mine)]
        packs += packer.add(mine)
    packs += packer.flush()
    if not streaming:
        packs = (pack_forests if layout == "forests" else pack_rows)(rows, budget)

    weight: dict[str, float] = {}
    for packed in packs:
        a = packed.arrays()
        for execution, logprob, w in zip(a.execution, a.logprob, a.weight, strict=True):
            name = packed.executions[execution]
            left[name, float(logprob)] -= 1
            weight[name] = weight.get(name, 0.0) + float(w)
    if counting is Counting.EXECUTION:
        assert min(left.values(), default=0) >= 0
        assert j_max is not None or sum(left.values()) == 0
    assert {name: round(total, 5) for name, total in weight.items()} == expected


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    found: list[Row] = []
    for number in range(draw(st.integers(0, 10))):
        n = draw(st.integers(1, 9))
        target = np.array([False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))])
        found.append(
            Row(
                draw(st.sampled_from("ef")),
                number,
                np.array(draw(st.lists(st.integers(1, 2), min_size=n, max_size=n)), dtype=np.uint32),
                target,
                np.where(target, -np.arange(n) / 8, 0).astype(np.float32),
                1 / (number + 1),
                float(number),
                draw(st.none() | st.just(np.arange(1, n + 1, dtype=np.float32))),
            )
        )
    return found


@few
@given(rows(), st.integers(1, 24), st.booleans())
def test_packing_keeps_every_target_once_with_its_whole_past(rows: list[Row], budget: int, forests: bool) -> None:
    packs = (pack_forests if forests else pack_rows)(rows, budget)
    seen: list[tuple[Any, ...]] = []
    for packed in packs:
        a = packed.arrays()
        assert packed.tokens <= budget or len(set(a.trajectory.tolist())) == 1
        for i in range(packed.targets):
            source = int(a.source[i])
            past = [j for j in range(source + 1) if source < a.end[j]]
            assert [int(a.position[j]) for j in past] == list(range(len(past)))
            seen.append(
                (
                    int(a.trajectory[i]),
                    packed.executions[a.execution[i]],
                    a.ids[past].tolist(),
                    int(a.target[i]),
                    float(a.weight[i]),
                    float(a.advantage[i]),
                    float(a.logprob[i]),
                    float(a.temperature[i]),
                )
            )
    expected = [
        (
            row.trajectory,
            row.execution,
            row.ids[:place].tolist(),
            int(row.ids[place]),
            float(np.float32(row.weight)),
            row.advantage,
            float(row.logprobs[place]),
            1.0 if row.temperature is None else float(row.temperature[place]),
        )
        for row in rows
        for place in np.flatnonzero(row.target)
    ]
    assert sorted(seen, key=lambda t: (t[0], len(t[2]))) == expected


@few
@given(rows(), st.integers(9, 40))
def test_forests_never_lay_out_more_than_rows(rows: list[Row], budget: int) -> None:
    assert sum(p.tokens for p in pack_forests(rows, budget)) <= sum(p.tokens for p in pack_rows(rows, budget))
