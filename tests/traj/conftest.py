"""A story is an execution told in words: every word is a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from gyre_traj import Call, Span, Tree, pack_ids, pack_logprobs


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
