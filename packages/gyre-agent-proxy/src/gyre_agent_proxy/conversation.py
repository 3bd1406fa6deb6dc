"""A conversation without a dialect: what every dialect's request is normalised to, and what an answer is made of.

Two messages that say the same thing in different serialisations have equal `identity`: None, "" and [] are the same
content, tool arguments are compared as typed JSON, white space of a sampled turn and the ids of its calls do not count,
and reasoning is compared only where it was sent (see history).
"""

from __future__ import annotations

import decimal
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gyre_agent_proxy.constraint import Demand


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool by the assistant; `arguments` is the raw text the model wrote."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `call_id` names the call a tool message answers; `reasoning` is None where none was sent."""

    role: str  # system | user | assistant | tool
    text: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample; None means the engine's neutral value."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    constraint: dict[str, str] = {}  # see `gyre_agent_proxy.constraint`


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Messages (leading system messages included) and the tools on offer, as JSON tool definitions."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    asks: str | None = None  # what the user wrote last, where the last user message says more than that


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call as a harness asked for it."""

    conversation: Conversation
    sampling: Sampling
    dialect: str
    model: str
    stream: bool = False
    include_usage: bool = False
    digest: str = ""  # of the body without what does not change the answer: equal digests are one request repeated
    omitted: int = 0  # parts that the model cannot read, replaced by a note
    left_out: int = 0  # tools and items that cannot be served: not in the prompt, kept in `other`
    other: dict[str, Any] = {}  # fields of the body that nothing here reads, kept in the record
    demand: Demand = Demand()
    echo: Any = None  # what the dialect's answer needs again of the request; not recorded

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools of which an answer may hold calls."""
        return () if self.demand.calls == "none" else self.conversation.tools


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a call, the same however often and in whatever dialect it is delivered."""

    call: str
    text: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"  # stop | length | tool_calls
    stop: str | None = None  # the stop string that ended it
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion; 0 where the model's format does not tell
    created: int = 0  # unix seconds


def identities(messages: Iterable[Message]) -> Iterator[bytes]:
    """The identity of each message of a conversation; a tool's result says which of its calls it answers."""
    places: dict[str, str] = {}
    count = 0
    for message in messages:
        for call in message.calls:
            places[call.id], count = str(count), count + 1
        yield identity(message, places.get(message.call_id or "", ""))


def identity(message: Message, answers: str = "") -> bytes:
    """Digest of what `message` says, reasoning aside. answers: the place of the call that it is the result of.

    Ids of calls do not count: a harness may give calls ids of its own.
    """
    parts: list[str] = [message.role, answers or f"id {message.call_id or ''}"]
    # Some harnesses trim a sampled turn, or end its lines in another way.
    parts.append(plain(message.text) if message.role == "assistant" else message.text)
    for call in message.calls:
        parts += [call.name, same_json(call.arguments)]
    return digest(*parts)


def plain(text: str) -> str:
    """`text` without white space and NUL: what is left of it however it was trimmed, wrapped or passed on."""
    return "".join(text.replace("\0", "").split())


def in_call_order(messages: list[Message]) -> list[Message]:
    """The messages, with the results after a turn in the order of its calls; changes the list."""
    at = 0
    while at < len(messages):
        calls, at = messages[at].calls, at + 1
        if len(calls) < 2:
            continue
        end = next((i for i in range(at, len(messages)) if messages[i].role != "tool"), len(messages))
        order = {call.id: i for i, call in enumerate(calls)}
        messages[at:end] = sorted(messages[at:end], key=lambda m: order.get(m.call_id or "", len(order)))
        at = end
    return messages


def digest(*parts: str | bytes) -> bytes:
    """16-byte digest of a sequence of strings; their boundaries count."""
    pieces: list[bytes] = []
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        pieces += (len(raw).to_bytes(8, "big"), raw)
    return hashlib.blake2b(b"".join(pieces), digest_size=16).digest()


class _Duplicate(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Duplicate
    return found


def same_json(text: str) -> str:
    """Return a form in which equal typed JSON is equal text; malformed JSON (duplicate keys included) stays raw.

    `true` is not 1; 1.0 and 1 are the same number; the order of keys and white space do not count.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_float=decimal.Decimal, parse_int=decimal.Decimal)
        return "json:" + _canonical(value)
    except (ValueError, RecursionError, decimal.InvalidOperation):
        return "raw:" + text


def _canonical(value: Any) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{json.dumps(k)}:{_canonical(v)}" for k, v in sorted(value.items())) + "}"
        case list():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case decimal.Decimal():
            return _number(value)
        case _:
            return json.dumps(value)  # strings, true, false, null, NaN


def _number(value: decimal.Decimal) -> str:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        return str(value)
    text = "".join(map(str, digits)).lstrip("0")
    kept = text.rstrip("0")
    if not kept:
        return "0"
    return f"{'-' if sign else ''}{kept}e{exponent + len(text) - len(kept)}"
