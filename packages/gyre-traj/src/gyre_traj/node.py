"""Nodes of a trajectory tree, and how they are hung, split and parted; `gyre_traj.tree` says where."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gyre_traj.records import Call

NO_LOGPROBS = np.zeros(0, dtype=np.float32)
_GREEDY = 1e-6  # at temperatures below it SGLang takes the likeliest token and divides by 1


class Node:
    """A run of tokens [start, start + n) of the paths through it: context, or (part of) one call's output.

    A node keeps its path alive; it has `children` only while its tree is there.
    """

    __slots__ = ("call", "children", "ids", "logprobs", "offset", "parent", "start")

    def __init__(
        self,
        parent: Node | None,
        start: int,
        ids: NDArray[np.uint32],
        call: Call | None = None,
        offset: int = 0,
    ) -> None:
        self.parent = parent
        self.start = start  # depth of the first token
        self.ids = ids  # [n]
        self.call = call  # whose output this is; None: context
        self.logprobs = NO_LOGPROBS  # [n], or [0] where not trainable; as the tree was last looked at
        self.offset = offset  # of the first token in the call's output; 0 for context
        self.children: dict[int, list[Node]] = {}  # by first id

    @property
    def role(self) -> str:
        """Role of the call that sampled it; empty for context."""
        return self.call.role if self.call else ""

    @property
    def trainable(self) -> int:
        """Tokens that may be loss targets: all or none."""
        return len(self.logprobs)

    @property
    def temperature(self) -> float:
        """What the logits were divided by when it was sampled; 1 at (almost) 0, where engines leave them alone."""
        value = self.call.sampling.get("temperature", 1.0) if self.call else 1.0
        return float(value) if isinstance(value, int | float) and _GREEDY <= value < float("inf") else 1.0

    def versions(self) -> NDArray[np.int32]:
        """Weights that sampled each token [n]; -1 where not sampled or not known."""
        version = np.full(len(self.ids), -1, dtype=np.int32)
        for span in self.call.versions if self.call else ():
            known = span.version if 0 <= span.version < 1 << 31 else -1
            version[max(0, span.start - self.offset) : max(0, span.end - self.offset)] = known
        return version

    def path(self) -> tuple[Node, ...]:
        """Nodes from a root to this one."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return tuple(reversed(nodes))


def hang(node: Node) -> Node:
    """Make a node its parent's child."""
    assert node.parent is not None  # noqa: S101 - only the root has none, and it is never hung
    node.parent.children.setdefault(int(node.ids[0]), []).append(node)
    return node


def part(root: Node) -> None:
    """Take children from their parents: a node keeps its path, and asking it for children is an error."""
    nodes = [root]
    for node in nodes:  # grows
        nodes.extend(child for group in node.children.values() for child in group)
        del node.children


def split(node: Node, at: int) -> Node:
    """Cut `node` before its token `at`; it stays the lower part. Return the new upper part."""
    upper = Node(node.parent, node.start, node.ids[:at], node.call, node.offset)
    assert node.parent is not None  # noqa: S101 - the root has no token to cut at
    group = node.parent.children[int(node.ids[0])]
    group[group.index(node)] = upper
    node.parent, node.start = upper, node.start + at
    node.offset += at if node.call else 0
    node.ids = node.ids[at:]
    upper.children[int(node.ids[0])] = [node]
    return upper
