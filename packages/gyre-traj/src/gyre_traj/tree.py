"""The trajectory tree of one execution: its calls, shared prefixes merged.

    root ─ [context: system, task] ─ [output of a] ─ [context: tool result] ─┬─ [output of b]
                                          │                                  └─ [output of c: same prompt, a sibling]
                                          └─ (fork inside a's output) ─ [context: rewritten] ─ [output of d]

A node holds only its delta. Context is shared by token: prompts that agree share nodes up to the exact token where they
differ. Outputs are never merged: each sampled token is in exactly one node, even if two calls sampled the same ids. A
call that names its parent hangs below that parent's output; one that does not hangs below the longest path its prompt
repeats, through outputs too (the newest, if several match alike). An empty generation adds context only, so it is
nobody's parent.

An output is trainable when it has log-probabilities and the harness saw it: not when the call ended with "abort" or
"error", nor when its answer was never delivered and nothing continues it (what continues it proves that a repeated
request got the answer).

The tree is a function of the set of calls: what it would be if they had come by prompt length, since a prompt can only
repeat outputs of shorter prompts. Calls are inserted as they come; the rare call that would have changed the place of
an earlier one marks the tree, which is then rebuilt in that order when next looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gyre_traj.errors import BrokenCall, LogError, UnknownCall
from gyre_traj.log import Log
from gyre_traj.node import NO_LOGPROBS, Node, hang, part, split
from gyre_traj.paths import common_prefix
from gyre_traj.records import CERTAIN, Call, unpack_ids, unpack_logprobs

_Age = tuple[float, str]


@dataclass(frozen=True, slots=True)
class View:
    """What is derived from a tree, in its one order: depth first, older calls first."""

    nodes: tuple[Node, ...]  # those on a root-to-leaf path
    leaves: tuple[Node, ...]  # ends of outputs below which nothing was sampled
    spans: tuple[tuple[int, int], ...]  # of each node: its leaves are leaves[first:last]
    roots: tuple[Node, ...]
    untrainable: dict[str, str]  # call -> why its output is no loss target


class Tree:
    """See the module. `add` in any order in which parents come before their children gives the same tree."""

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.calls: dict[str, Call] = {}
        self.delivered: dict[str, bool] = {}
        self._flaws: dict[str, str] = {}  # call -> why its record alone makes its output no loss target
        self._prompts: dict[str, tuple[int, int]] = {}  # call -> whole prompt length, ancestors
        self._clear()

    def __del__(self) -> None:
        """Nodes know each other, so without this a dead tree would hold its records until Python looks for cycles."""
        if "_root" in self.__dict__:
            part(self._root)

    def _clear(self) -> None:
        self._root = Node(None, 0, np.zeros(0, dtype=np.uint32))
        self._ends: dict[str, Node] = {}
        self._latest: tuple[int, int, float, str] = (-1, 0, 0.0, "")
        self._ambiguous = False  # some prompt could have repeated more than one output
        self._stale = False  # must be rebuilt before it is looked at
        self._view: View | None = None

    @classmethod
    def from_log(cls, log: Log) -> Self:
        """Build the tree of a log's calls; those without a delivery record count as undelivered.

        Raises `LogError` without a header, `BrokenCall`, `UnknownCall`."""
        if log.header is None:
            raise LogError("the log has no header yet, so it names no execution; wait for its writer, or drop it")
        tree = cls(log.header.execution)
        for call in log.calls:
            tree.add(call, log.delivered.get(call.call, False))
        return tree

    def add(self, call: Call, delivered: bool = True) -> None:
        """Hang a call; the same record again adds nothing (delivered once is delivered).

        Costs O(new tokens) plus comparing ids with a path that is there. Raises `BrokenCall`, `UnknownCall`; then
        nothing was changed.
        """
        if call.call in self.calls:
            if self.calls[call.call] != call:
                raise BrokenCall(f"call {call.call!r} came twice with different records; call ids must be unique")
            self.delivered[call.call] |= delivered
            self._view = None
            return
        prompt = self._check(call)
        self.calls[call.call] = call
        self.delivered[call.call] = delivered
        self._prompts[call.call] = prompt
        if call.output and (reason := _why_untrainable(call)):
            self._flaws[call.call] = reason
        self._view = None
        if not self._stale:
            self._stale = self._insert(call)

    def end(self, call: str) -> Node:
        """Node with the last token of a call's output (of its prompt, for an empty one). Raises `UnknownCall`."""
        self.view()
        try:
            return self._ends[call]
        except KeyError:
            raise UnknownCall(f"no call {call!r} in the tree of {self.execution!r}") from None

    @property
    def untrainable(self) -> dict[str, str]:
        """Why outputs are no loss targets, by call; calls without an output are not named."""
        return self.view().untrainable

    @property
    def roots(self) -> tuple[Node, ...]:
        """First nodes of the contexts that share no first token."""
        return self.view().roots

    @property
    def leaves(self) -> tuple[Node, ...]:
        """Nodes that end a trajectory."""
        return self.view().leaves

    def paths(self) -> Iterator[tuple[Node, ...]]:
        """Yield the nodes from root to leaf, leaf by leaf."""
        for leaf in self.leaves:
            yield leaf.path()

    @property
    def tokens_total(self) -> int:
        """Sum of the lengths of all root-to-leaf paths."""
        return sum(leaf.start + len(leaf.ids) for leaf in self.leaves)

    @property
    def tokens_unique(self) -> int:
        """Tokens on at least one root-to-leaf path."""
        return sum(len(node.ids) for node in self.view().nodes)

    @property
    def trainable(self) -> int:
        """Sampled tokens that may be loss targets."""
        return sum(node.trainable for node in self.view().nodes)

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that sampled a token of this tree, ascending."""
        return tuple(sorted({s.version for c in self.calls.values() for s in c.versions if s.end > s.start}))

    def view(self) -> View:
        """Return nodes, leaves and roots, in the tree's one order; valid until the next `add`."""
        self._settle()
        if self._view is None:
            self._view = self._look()
        return self._view

    def _check(self, call: Call) -> tuple[int, int]:
        """Return the length of the whole prompt and the number of ancestors."""
        name = f"call {call.call!r}"
        if call.execution != self.execution:
            raise BrokenCall(f"{name} belongs to execution {call.execution!r}, this tree is of {self.execution!r}")
        if any(len(raw) % 4 for raw in (call.prompt, call.output, call.logprobs)):
            raise BrokenCall(f"{name}: ids and log-probabilities are 4 bytes each; a field has a part of one")
        if call.parent is None:
            prefix, generation = 0, 0
        elif call.parent not in self.calls:
            raise UnknownCall(f"{name} names parent {call.parent!r}, which is not in the tree; add parents first")
        else:
            length, generation = self._prompts[call.parent]
            prefix, generation = length + len(self.calls[call.parent].output) // 4, generation + 1
        if call.prefix != prefix:
            raise BrokenCall(f"{name} has prefix {call.prefix}, its parent {call.parent!r} has {prefix} ids in all")
        size = len(call.output) // 4
        if call.logprobs and len(call.logprobs) // 4 != size:
            raise BrokenCall(
                f"{name} has {size} output ids and {len(call.logprobs) // 4} log-probabilities; leave unknown ones out"
            )
        if any(not 0 <= span.start <= span.end <= size for span in call.versions):
            raise BrokenCall(f"{name}: version spans {call.versions!r} reach outside its {size} output ids")
        if not prefix and not call.prompt:
            raise BrokenCall(f"{name} has an empty prompt; nothing could have predicted its first token")
        return prefix + len(call.prompt) // 4, generation

    def _age(self, call: Call) -> _Age:
        return (0.0 if math.isnan(call.started) else call.started), call.call

    def _settle(self) -> None:
        """Rebuild a stale tree in the order that needs no rebuilding."""
        if self._stale:
            part(self._root)
            self._clear()
            for call in sorted(self.calls.values(), key=self._order):
                self._insert(call)
            self._stale = False

    def _order(self, call: Call) -> tuple[int, int, float, str]:
        return (*self._prompts[call.call], *self._age(call))

    def _insert(self, call: Call) -> bool:
        """Hang the call; return whether the tree may now differ from the one built by prompt length."""
        prompt = unpack_ids(call.prompt)
        node, inside, used = self._walk(self._ends[call.parent] if call.parent else self._root, prompt)
        if inside < len(node.ids):
            node = split(node, inside)
        if used < len(prompt):
            node = hang(Node(node, node.start + len(node.ids), prompt[used:]))
        late = self._order(call) < self._latest
        self._latest = max(self._latest, self._order(call))
        if not call.output:
            self._ends[call.call] = node
            return late and self._ambiguous
        output = unpack_ids(call.output)
        others = node.children.get(int(output[0]), ())
        taken = any(other.call is None or other.children for other in others)
        self._ends[call.call] = hang(Node(node, node.start + len(node.ids), output, call))
        return late and (self._ambiguous or taken)

    def _walk(self, start: Node, ids: NDArray[np.uint32]) -> tuple[Node, int, int]:
        """Follow `ids` down from the end of `start` as far as they agree: (node, ids inside it, ids used)."""
        best: tuple[Node, int, int] = (start, len(start.ids), 0)
        stack = [best]
        while stack:
            node, inside, used = step = stack.pop()
            if used > best[2] or (used == best[2] and used and self._newest(node) > self._newest(best[0])):
                best = step
            if inside < len(node.ids) or used == len(ids):
                continue
            candidates = node.children.get(int(ids[used]), ())
            self._ambiguous |= len(candidates) > 1
            for child in candidates:
                agree = common_prefix(child.ids, ids[used:])
                stack.append((child, agree, used + agree))
        return best

    def _newest(self, node: Node) -> _Age:
        """Age of the deepest call on the path to `node`."""
        at: Node | None = node
        while at is not None:
            if at.call is not None:
                return self._age(at.call)
            at = at.parent
        return (0.0, "")

    def _unseen(self) -> dict[str, str]:
        """Calls whose answer never reached the harness, as far as anybody can tell, with that as the reason."""
        continued = {call.parent for call in self.calls.values()}
        return {
            name: "never delivered, and nothing continues it"
            for name, call in self.calls.items()
            if call.output and not (self.delivered[name] or name in continued or self._ends[name].children)
        }

    def _look(self) -> View:
        untrainable = self._unseen() | self._flaws
        before = [self._root]
        for node in before:  # grows: parents before children
            before.extend(child for group in node.children.values() for child in group)
        oldest: dict[int, _Age] = {}
        sampled: set[int] = set()
        for call, node in self._ends.items():
            age = self._age(self.calls[call])
            oldest[id(node)] = min(age, oldest.get(id(node), age))
        for node in reversed(before):
            if node.call is not None:
                mine = slice(node.offset, node.offset + len(node.ids))
                flawed = node.call.call in untrainable
                node.logprobs = NO_LOGPROBS if flawed else unpack_logprobs(node.call.logprobs)[mine]
                sampled.add(id(node))
                oldest[id(node)] = min(self._age(node.call), oldest.get(id(node), self._age(node.call)))
            if node.parent is not None:
                age = oldest[id(node)]
                oldest[id(node.parent)] = min(age, oldest.get(id(node.parent), age))
                if id(node) in sampled:
                    sampled.add(id(node.parent))

        nodes: list[Node] = []
        leaves: list[Node] = []
        first: list[int] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            below = [c for group in node.children.values() for c in group if id(c) in sampled]
            if node is not self._root:
                nodes.append(node)
                first.append(len(leaves))
                if not below:
                    leaves.append(node)
            stack.extend(sorted(below, key=lambda c: oldest[id(c)], reverse=True))
        where = {id(node): i for i, node in enumerate(nodes)}
        last = [0] * len(nodes)
        for leaf_index, leaf in enumerate(leaves):
            last[where[id(leaf)]] = leaf_index + 1
        for i in reversed(range(len(nodes))):
            parent = nodes[i].parent
            if parent is not None and parent is not self._root:
                last[where[id(parent)]] = max(last[where[id(parent)]], last[i])
        roots = tuple(node for node in nodes if node.parent is self._root)
        return View(tuple(nodes), tuple(leaves), tuple(zip(first, last, strict=True)), roots, untrainable)


def _why_untrainable(call: Call) -> str:
    """Empty when nothing in the record forbids to train on its output."""
    if call.finish in ("abort", "error"):
        return f"ended with {call.finish!r}, so it is no whole answer"
    logprobs = unpack_logprobs(call.logprobs)
    if not len(logprobs):
        return "no log-probabilities"
    if not np.isfinite(logprobs).all():
        return "log-probabilities that are not finite"
    if float(logprobs.max()) > CERTAIN:
        return "log-probabilities above 0"
    return ""
