"""Selection: at most J_max root-to-leaf paths of an execution, drawn by role priority.

Each sampled token is a target in at most one of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gyre_traj.errors import BadChoice
from gyre_traj.node import Node
from gyre_traj.paths import Path, Segment
from gyre_traj.records import Span
from gyre_traj.roles import DEFAULT_PRIORITY, RolePriority
from gyre_traj.tree import Tree


class Trajectory(Path):
    """A root-to-leaf path: views of the calls' records, a segment a node.

    Targets are trainable, and not targets of a trajectory selected earlier. Log-probabilities, versions and
    temperatures are those of the calls that sampled the tokens.
    """

    __slots__ = ("call", "execution", "role")

    def __init__(self, execution: str, call: str, role: str, segments: tuple[Segment, ...]) -> None:
        self.execution = execution
        self.call = call  # the call whose output ends it
        self.role = role
        self.segments = segments

    def __repr__(self) -> str:
        return f"Trajectory({self.execution!r}, {self.call!r}, {len(self)} tokens, {self.targets} targets)"


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The trajectories of one execution, in the order drawn, and the trainable tokens nobody drew, by role."""

    execution: str
    trajectories: tuple[Trajectory, ...]
    left_out: dict[str, int]

    @property
    def targets(self) -> int:
        """|T_e|: targets over all trajectories."""
        return sum(t.targets for t in self.trajectories)


def select(tree: Tree, j_max: int | None, seed: int, priority: RolePriority = DEFAULT_PRIORITY) -> Selection:
    """Draw trajectories from `tree`.

    From the highest role class that still has unmasked trainable tokens, draw a leaf with probability proportional to
    the unmasked trainable tokens on its path, take the path, mask it; until nothing is left or `j_max` are taken
    (None: no cap). Leaves of an excluded role are never drawn. The same (tree, seed) gives the same selection on every
    machine. Raises `BadChoice` for j_max < 1.
    """
    if j_max is not None and j_max < 1:
        raise BadChoice(f"j_max must be at least 1, or None for no cap; got {j_max!r}")
    view = tree.view()
    where = {id(node): i for i, node in enumerate(view.nodes)}
    segments: dict[int, Segment] = {}  # of nodes on a path drawn, masked
    unmasked = np.zeros(len(view.leaves), dtype=np.int64)  # trainable tokens on the leaf's path
    for node, (first, last) in zip(view.nodes, view.spans, strict=True):
        unmasked[first:last] += node.trainable
    rank = np.array([priority.rank(leaf.role) for leaf in view.leaves], dtype=np.int64)
    drawable = np.array([leaf.role not in priority.exclude for leaf in view.leaves], dtype=np.bool_)

    trajectories: list[Trajectory] = []
    while (open_ := drawable & (unmasked > 0)).any() and (j_max is None or len(trajectories) < j_max):
        weight = np.where(open_ & (rank == rank[open_].min()), unmasked, 0)
        leaf = view.leaves[_draw(weight, f"{seed}/{tree.execution}/{len(trajectories)}")]
        path: list[Segment] = []
        for node in leaf.path():
            place = where[id(node)]
            if place in segments:
                path.append(segments[place])
                continue
            segments[place] = Segment(node.ids, node.logprobs, False, node.temperature, _versions(node))
            path.append(replace(segments[place], target=True) if node.trainable else segments[place])
            first, last = view.spans[place]
            unmasked[first:last] -= node.trainable
        assert leaf.call is not None  # noqa: S101 - a leaf is an output
        trajectories.append(Trajectory(tree.execution, leaf.call.call, leaf.role, tuple(path)))

    left_out: dict[str, int] = {}
    for place, node in enumerate(view.nodes):
        if node.trainable and place not in segments:
            left_out[node.role] = left_out.get(node.role, 0) + node.trainable
    return Selection(tree.execution, tuple(trajectories), left_out)


def _draw(weight: NDArray[np.int64], what: str) -> int:
    """Index drawn with probability weight / sum, from a hash: the same on every machine and release."""
    cumulative = weight.cumsum()
    number = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=16).digest(), "little")
    return int(cumulative.searchsorted(number % int(cumulative[-1]), side="right"))


def _versions(node: Node) -> tuple[Span, ...]:
    """Version spans of a node, relative to its start and disjoint; where a call's overlap, the later one holds."""
    spans: list[Span] = []
    for span in node.call.versions if node.call else ():
        start, end = max(0, span.start - node.offset), min(len(node.ids), span.end - node.offset)
        if start < end:
            before = [Span(s.version, s.start, min(s.end, start)) for s in spans if s.start < start]
            after = [Span(s.version, max(s.start, end), s.end) for s in spans if s.end > end]
            spans = [*before, Span(span.version, start, end), *after]
    return tuple(span for span in spans if 0 <= span.version < 1 << 31)
