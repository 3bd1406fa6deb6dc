"""What a sampled turn says: reasoning, text and tool calls, from its decoded text.

The generic grammar is the one most open models share: `<think>…</think>` first, and calls as JSON objects with `name`
and `arguments` inside `<tool_call>…</tool_call>`. A call that does not parse stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from gyre_agent_proxy.vocabulary import Vocabulary

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MARKUP = ("<tool_call>", "<think>", "</think>")


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """calls: (name, arguments as JSON text) in order."""

    text: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    native_ids: tuple[str, ...] = ()  # where the model's own format carries call ids


def parse(text: str, *, tools: bool, thinking: bool = False) -> Parsed:
    """Parse a decoded turn (stop token and stop string already removed).

    tools: whether tools were offered; without, a call is text. thinking: the prompt opened the reasoning.
    """
    reasoning: str | None = None
    head, opened, rest = text.partition("<think>")
    if thinking or (opened and not head.strip()):
        inner, _, after = (text if thinking else rest).partition("</think>")
        reasoning, text = inner.strip("\n"), after.lstrip("\n")
    if not tools or "<tool_call>" not in text:
        return Parsed(text=text, reasoning=reasoning)
    calls: list[tuple[str, str]] = []

    def take(match: re.Match[str]) -> str:
        try:
            value = json.loads(match[1])
            name, arguments = value["name"], value.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return match[0]
        if not isinstance(name, str):
            return match[0]
        written = arguments if isinstance(arguments, str) else as_json(arguments)
        if not _is_text(name + written):
            return match[0]
        calls.append((name, written))
        return ""

    left = _CALL.sub(take, text)
    return Parsed(text=left.strip() if calls else left, reasoning=reasoning, calls=tuple(calls))


def as_json(value: object) -> str:
    """`value` as JSON text; half of a surrogate pair, which is no text, stays the escape that the model wrote."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(value)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def reasoning_tokens(ids: Sequence[int], reasoning: str | None, vocabulary: Vocabulary) -> int:
    """Tokens of `ids` up to the end of the reasoning; 0 where the vocabulary has no token that ends it."""
    end = vocabulary.id("</think>")
    if reasoning is None or end is None:
        return 0
    return next((i + 1 for i, token in enumerate(ids) if token == end), len(ids))


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Return `text` up to the earliest stop string, and that string (None where there is none)."""
    found = [(at, s) for s in stops if (at := text.find(s)) >= 0]
    if not found:
        return text, None
    at, stop = min(found)
    return text[:at], stop


def settled(text: str, stops: tuple[str, ...], *, tools: bool, thinking: bool = False) -> str:
    """The part of an unfinished turn's `text` that is sure to begin the finished turn's parsed text.

    Held back: everything from reasoning or a tool call on, a beginning of a stop string, incomplete characters.
    """
    text, stop = cut_at_stop(text, stops)
    if thinking or text.lstrip().startswith("<think>") or "<think>".startswith(text.lstrip()[:7]):
        return ""
    text = text.rstrip("\ufffd")
    if tools:
        if text != text.lstrip():
            return ""  # trimmed if a call follows
        text = text.partition("<tool_call>")[0]
    if stop is None:
        for mark in (*stops, *(_MARKUP[:1] if tools else ())):
            for n in range(min(len(mark), len(text)), 0, -1):
                if text.endswith(mark[:n]):
                    text = text[:-n]
                    break
    return text.rstrip() if tools else text
