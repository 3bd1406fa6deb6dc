"""What a person wants to know of a tree: its numbers, its shape, and why each leaf exists."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gyre_traj.node import Node
from gyre_traj.tree import Tree


class RoleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one role."""

    role: str
    calls: int
    sampled: int  # output tokens
    trainable: int


class LeafReport(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    call: str  # whose output ends it
    role: str
    turns: int  # outputs on its path
    tokens: int
    trainable: int
    versions: tuple[int, ...]
    delivered: bool
    why: str


class TreeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One execution."""

    execution: str
    calls: int
    undelivered: int
    empty: int  # calls that generated nothing
    untrainable: dict[str, str]  # call -> why
    versions: tuple[int, ...]
    tokens_total: int
    tokens_unique: int
    trainable: int
    roles: tuple[RoleReport, ...]
    leaves: tuple[LeafReport, ...]


def describe(tree: Tree) -> TreeReport:
    """Return the numbers of a tree."""
    return _describe(tree, {call: call for call in tree.calls})


def _describe(tree: Tree, names: dict[str, str]) -> TreeReport:
    siblings = _siblings(tree)
    roles: dict[str, list[int]] = {}
    for call in tree.calls.values():
        size = len(call.output) // 4
        role = roles.setdefault(call.role, [0, 0, 0])
        role[0] += 1
        role[1] += size
        role[2] += 0 if call.call in tree.untrainable else size
    return TreeReport(
        execution=tree.execution,
        calls=len(tree.calls),
        undelivered=sum(not ok for ok in tree.delivered.values()),
        empty=sum(not call.output for call in tree.calls.values()),
        untrainable={names[call]: why for call, why in tree.untrainable.items()},
        versions=tree.versions,
        tokens_total=tree.tokens_total,
        tokens_unique=tree.tokens_unique,
        trainable=tree.trainable,
        roles=tuple(RoleReport(role=r, calls=n[0], sampled=n[1], trainable=n[2]) for r, n in roles.items()),
        leaves=tuple(_leaf(tree, leaf, siblings, names) for leaf in tree.leaves),
    )


def origins(tree: Tree) -> dict[str, str]:
    """How each output came to hang where it does, by call; a call that generated nothing has none."""
    siblings, names = _siblings(tree), {call: call for call in tree.calls}
    found = {}
    for node in tree.view().nodes:
        if node.call is None or node.offset:
            continue
        way = [node]  # back to the output before it, or to a root
        while (above := way[-1].parent) is not None and above.parent is not None:
            way.append(above)
            if above.call:
                break
        before = way[-1].call if len(way) > 1 else None
        why = _why(tuple(reversed(way)), siblings, names, since=1 if before else 0)
        if why != "first":
            found[node.call.call] = why
        else:
            found[node.call.call] = f"continues {before.call}" if before else "the first of its context"
    return found


def render(tree: Tree) -> str:
    """Draw a tree as text: a line for each run of turns without a branch, then a table of its leaves."""
    names = short_names(tree)
    report = _describe(tree, names)
    lines = [
        f"execution {report.execution}",
        f"  calls     {report.calls}: {report.undelivered} undelivered, {report.empty} empty, "
        f"{len(report.untrainable)} not trainable",
        f"  tokens    {report.tokens_total:,} total, {report.tokens_unique:,} unique, {report.trainable:,} trainable",
        f"  versions  {_versions(report.versions)}",
        *(
            f"  {role.role:<18} {role.calls:>4} calls {role.sampled:>9,} sampled {role.trainable:>9,} trainable"
            for role in report.roles
        ),
        "",
        *_draw(tree, names),
        "",
        *_table(
            ("leaf", "role", "turns", "tokens", "trainable", "versions", "why"),
            [
                (
                    leaf.call + ("" if leaf.delivered else " (undelivered)"),
                    leaf.role,
                    str(leaf.turns),
                    f"{leaf.tokens:,}",
                    f"{leaf.trainable:,}",
                    _versions(leaf.versions),
                    leaf.why,
                )
                for leaf in report.leaves
            ],
        ),
        *(f"  not trainable: {call}: {why}" for call, why in report.untrainable.items()),
    ]
    return "\n".join(line.rstrip() for line in lines)


def short_names(tree: Tree) -> dict[str, str]:
    """Call ids cut to their first 8 characters, or as many more as tell them apart."""
    length = 8
    while len({call[:length] for call in tree.calls}) < len(tree.calls):
        length += 1
    return {call: call[:length] for call in tree.calls}


def _siblings(tree: Tree) -> dict[int, list[Node]]:
    """Children of each node by id(), older first; those of the root under id(None)."""
    view = tree.view()
    known = {id(node) for node in view.nodes}
    children: dict[int, list[Node]] = {}
    for node in view.nodes:
        key = id(node.parent) if id(node.parent) in known else id(None)
        children.setdefault(key, []).append(node)
    return children


def _leaf(tree: Tree, leaf: Node, siblings: dict[int, list[Node]], names: dict[str, str]) -> LeafReport:
    assert leaf.call is not None  # noqa: S101 - a leaf is an output
    path = leaf.path()
    versions = {s.version for node in path if node.call for s in node.call.versions if s.end > s.start}
    return LeafReport(
        call=names[leaf.call.call],
        role=leaf.role,
        turns=len({node.call.call for node in path if node.call}),
        tokens=leaf.start + len(leaf.ids),
        trainable=sum(node.trainable for node in path),
        versions=tuple(sorted(versions)),
        delivered=tree.delivered[leaf.call.call],
        why=_why(path, siblings, names),
    )


def _why(path: tuple[Node, ...], siblings: dict[int, list[Node]], names: dict[str, str], since: int = 0) -> str:
    """The deepest branching, from node `since` of the path on, at which the path is not the oldest way on."""
    for i in reversed(range(since, len(path))):
        node, parent = path[i], path[i - 1] if i else None
        group = siblings[id(parent)]
        if group[0] is node:
            continue
        elder = names[_first_call(group[0], siblings)]
        if parent is None:
            return "a context of its own: its prompt repeats nothing"
        if node.call is not None and not node.offset:
            return f"sampled again from the prompt of {elder}"
        if parent.call is None:
            return f"prompt departs from that of {elder} at token {node.start}"
        kept, size = parent.offset + len(parent.ids), len(parent.call.output) // 4
        if kept < size:
            which = "rest of it" if node.call is not None else "prompt departs inside it"
            return f"output of {names[parent.call.call]}, {kept} of {size} tokens in: {which}"
        return f"continues {names[parent.call.call]} otherwise than {elder}"
    return "first"


def _first_call(node: Node, siblings: dict[int, list[Node]]) -> str:
    while node.call is None:
        node = siblings[id(node)][0]
    return node.call.call


def _draw(tree: Tree, names: dict[str, str]) -> Iterator[str]:
    siblings = _siblings(tree)
    stack = [(node, "", i == 0) for i, node in enumerate(reversed(siblings.get(id(None), [])))]
    while stack:
        node, indent, last = stack.pop()
        run = [node]
        while len(below := siblings.get(id(run[-1]), [])) == 1:
            run.append(below[0])
        yield f"{indent}{'└─' if last else '├─'} {_line(run, names)}"
        inner = indent + ("   " if last else "│  ")
        stack.extend((child, inner, i == 0) for i, child in enumerate(reversed(below)))


def _line(run: list[Node], names: dict[str, str]) -> str:
    calls = list(dict.fromkeys(names[node.call.call] for node in run if node.call))
    roles = list(dict.fromkeys(node.role for node in run if node.call))
    which = ", ".join(calls) if len(calls) <= 3 else f"{calls[0]} … {calls[-1]}"
    tokens, trainable = sum(len(node.ids) for node in run), sum(node.trainable for node in run)
    turns = f"{len(calls)} turn{'s' if len(calls) != 1 else ''}" if calls else "context"
    parts = (
        turns,
        which,
        "/".join(roles),
        f"{tokens:,} token{'s' if tokens != 1 else ''}",
        f"{trainable:,} trainable" if trainable else "",
    )
    return " · ".join(part for part in parts if part)


def _versions(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "unknown"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
