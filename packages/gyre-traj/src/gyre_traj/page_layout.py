"""Where each node of a tree is drawn: a row for each way to a leaf.

0 ─ [context] ─ [output of a] ─ [context] ─┬─ [output of c] ─ …      the way on with the most tokens keeps the row
1                                          └─ [output of b]          the others get rows of their own below
"""

from __future__ import annotations

import msgspec

from gyre_traj.node import Node
from gyre_traj.tree import Tree


class Bar(msgspec.Struct, frozen=True, array_like=True):
    """A node: tokens [start, start + size) of its row."""

    parent: int  # index of a bar before this one; -1: none
    row: int
    start: int
    size: int
    call: int  # that sampled it; of context: the oldest call that needs it
    sampled: bool
    offset: int  # of its first token in the call's output
    first: int  # its trajectories are leaves[first:last] of the report; none where a call generated nothing
    last: int


def lay_out(tree: Tree, index: dict[str, int]) -> tuple[list[Bar], dict[str, int]]:
    """Return a bar for each node, also for those below which nothing was sampled, and the last bar of each call.

    Parents come before children, older children first. `index`: numbers of the calls.
    """
    children, barren = _children(tree, index)
    nodes: list[Node] = []
    parents: list[int] = []
    stack = [(node, -1) for node in reversed(children.get(0, []))]
    while stack:
        node, parent = stack.pop()
        nodes.append(node)
        parents.append(parent)
        stack.extend((child, len(nodes) - 1) for child in reversed(children.get(id(node), [])))

    owners = [index[node.call.call] if node.call else barren.get(id(node), -1) for node in nodes]
    weights = [len(node.ids) for node in nodes]
    for i in reversed(range(len(nodes))):  # children before parents; the oldest child last
        if (parent := parents[i]) >= 0:
            weights[parent] += weights[i]
            if nodes[parent].call is None:
                owners[parent] = owners[i]
    rows = _rows(parents, weights)
    spans = {id(node): span for node, span in zip(tree.view().nodes, tree.view().spans, strict=True)}
    bars = []
    for i, node in enumerate(nodes):
        first, last = spans.get(id(node), (0, 0))
        sampled = node.call is not None
        bars.append(Bar(parents[i], rows[i], node.start, len(node.ids), owners[i], sampled, node.offset, first, last))
    where = {id(node): i for i, node in enumerate(nodes)}
    return bars, {call: where[id(tree.end(call))] for call in tree.calls}


def _children(tree: Tree, index: dict[str, int]) -> tuple[dict[int, list[Node]], dict[int, int]]:
    """Return children by id() of their node, the root's under 0; and the oldest empty call that ends at a node."""
    children: dict[int, list[Node]] = {}
    barren: dict[int, int] = {}
    seen = {id(node) for node in tree.view().nodes}

    def place(node: Node) -> None:
        inside = node.parent is not None and node.parent.parent is not None
        children.setdefault(id(node.parent) if inside else 0, []).append(node)

    for node in tree.view().nodes:
        place(node)
    for call in sorted(tree.calls.values(), key=lambda call: (call.started, call.call)):
        if call.output:
            continue
        node = tree.end(call.call)
        barren.setdefault(id(node), index[call.call])
        above = []
        while id(node) not in seen and node.parent is not None:
            seen.add(id(node))
            above.append(node)
            node = node.parent
        for node in reversed(above):
            place(node)
    return children, barren


def _rows(parents: list[int], weights: list[int]) -> list[int]:
    """Give the heaviest child its parent's row, each other one the next free row below all that came before."""
    below: list[list[int]] = [[] for _ in parents]
    rows = [0] * len(parents)
    roots: list[int] = []
    for i, parent in enumerate(parents):
        (below[parent] if parent >= 0 else roots).append(i)
    row, stack = 0, roots[::-1]
    while stack:
        i = stack.pop()
        rows[i] = row
        row += not below[i]
        heaviest = max(below[i], key=lambda child: weights[child], default=-1)  # the oldest of equals
        stack.extend(child for child in reversed(below[i]) if child != heaviest)
        stack.extend([heaviest] if below[i] else [])
    return rows
