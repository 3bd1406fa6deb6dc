"""A story is an execution told in words: every word is a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gyre_traj import Call, Packed, Row, Span, Tree, pack_ids, pack_logprobs, pack_rows

if TYPE_CHECKING:
    import torch


@dataclass
class Story:
    """Writes calls from words; `call` takes the words after the parent's, or the whole prompt of a call without one."""

    execution: str = "e"
    words: dict[str, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def ids(self, text: str) -> list[int]:
        return [self.words.setdefault(word, len(self.words) + 1) for word in text.split()]

    def text(self, ids: Sequence[int]) -> str:
        names = {number: word for word, number in self.words.items()}
        return " ".join(names[int(i)] for i in ids)

    def call(
        self,
        name: str,
        prompt: str,
        output: str,
        *,
        parent: str | None = None,
        role: str = "main",
        logprobs: Sequence[float] | None = None,
        version: int = 0,
    ) -> Call:
        prefix = 0
        if parent is not None:
            (above,) = [c for c in self.calls if c.call == parent]
            prefix = above.prefix + (len(above.prompt) + len(above.output)) // 4
        size = len(output.split())
        record = Call(
            call=name,
            execution=self.execution,
            role=role,
            parent=parent,
            prefix=prefix,
            prompt=pack_ids(self.ids(prompt)),
            output=pack_ids(self.ids(output)),
            logprobs=pack_logprobs([-0.5] * size if logprobs is None else logprobs),
            versions=(Span(version, 0, size),),
            started=float(len(self.calls)),
        )
        self.calls.append(record)
        return record

    def tree(self) -> Tree:
        tree = Tree(self.execution)
        for call in self.calls:
            tree.add(call)
        return tree

    def paths(self, tree: Tree) -> list[str]:
        """Each trajectory as words; sampled runs in brackets, context in the open."""
        return [
            " ".join(f"[{self.text(n.ids)}]" if n.call else self.text(n.ids) for n in path) for path in tree.paths()
        ]


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def new_story() -> Callable[[str], Story]:
    return Story


@dataclass
class MicroStep:
    """All rows of a table of behaviour log-probabilities in one micro-step; every number in a row is a target."""

    packed: Packed

    def pick(self, table: Sequence[Sequence[float]]) -> torch.Tensor:
        """A number a target, float64 [m], from a table with a row a row."""
        import torch

        row, column = np.divmod(self.packed.arrays().target, 1000)
        return torch.tensor([table[r][c] for r, c in zip(row, column, strict=True)], dtype=torch.float64)

    def table(self, values: torch.Tensor) -> list[list[float]]:
        """[m] -> a list a row."""
        rows: dict[int, dict[int, float]] = {}
        for place, value in zip(self.packed.arrays().target.tolist(), values.tolist(), strict=True):
            rows.setdefault(place // 1000, {})[place % 1000] = value
        return [[row[c] for c in sorted(row)] for _, row in sorted(rows.items())]


@pytest.fixture
def micro_step() -> Callable[..., MicroStep]:
    def build(
        behaviour: Sequence[Sequence[float]], advantages: Sequence[float], weights: Sequence[float] | float = 1.0
    ) -> MicroStep:
        rows = []
        for i, logprobs in enumerate(behaviour):
            ids = np.array([999_999, *(1000 * i + np.arange(len(logprobs)))], dtype=np.uint32)
            weight = weights if isinstance(weights, float) else weights[i]
            values = np.array([0.0, *logprobs], dtype=np.float32)
            rows.append(Row(f"e{i}", i, ids, ids != 999_999, values, weight, advantages[i]))
        (packed,) = pack_rows(rows, 10_000)
        return MicroStep(packed)

    return build
