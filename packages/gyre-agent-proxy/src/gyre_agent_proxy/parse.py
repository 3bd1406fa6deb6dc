"""What a whole turn says: reasoning, text and tool calls; the grammar is `unfolding`'s."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gyre_agent_proxy.unfolding import Unfolding
from gyre_agent_proxy.vocabulary import Vocabulary


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """calls: (name, arguments as JSON text) in order."""

    text: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    native_ids: tuple[str, ...] = ()  # where the model's own format carries call ids


def parse(text: str, *, tools: bool, stops: Sequence[str] = (), thinking: bool = False) -> Parsed:
    """Parse a decoded turn, its stop token removed; the rest is as `Unfolding` has it."""
    turn = Unfolding(tools=tools, stops=stops, thinking=thinking)
    most, last = turn.feed(text), turn.end()
    return Parsed(
        text=most.text + last.text,
        reasoning=most.reasoning + last.reasoning if turn.thought else None,
        calls=tuple(turn.calls),
    )


def reasoning_tokens(ids: Sequence[int], reasoning: str | None, vocabulary: Vocabulary) -> int:
    """Tokens of `ids` up to the end of the reasoning; 0 where the vocabulary has no token that ends it."""
    end = vocabulary.id("</think>")
    if reasoning is None or end is None:
        return 0
    return next((i + 1 for i, token in enumerate(ids) if token == end), len(ids))
