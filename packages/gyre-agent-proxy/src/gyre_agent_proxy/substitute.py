"""Recorded requests as a harness would have sent them to this proxy: with the answers it got here in their history.

exchange ─ recorded answer: what it says, its call ids ─▶ its key ─┐
         └ answer of this proxy ──────────────────────────────────┴▶ known
a later request: each assistant turn whose key is known becomes this proxy's answer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from gyre_agent_proxy.conversation import plain

Entries = list[dict[str, Any]]
Key = tuple[str, tuple[str, ...]]  # (text, ids of the calls)


class Form(NamedTuple):
    """How a dialect writes turns."""

    field: str  # of a request: holds the conversation's entries
    turns: Callable[[Entries], Iterator[tuple[int, int]]]  # where assistant turns begin and end
    key: Callable[[Entries], Key]  # of a turn's entries
    answer: Callable[[Any], Entries]  # a whole answer's entries
    streamed: Callable[[Entries], Entries]  # those of an answer's events


class Substitutes:
    """The answers of one replay."""

    def __init__(self) -> None:
        self._known: dict[Key, list[tuple[int, Entries]]] = {}  # (turns before it, the entries)

    def note(self, path: str, body: Any, recorded: Any, raw: bytes) -> None:
        """`recorded` was once the answer to `body`; here it was `raw`. What is no answer is passed over."""
        form = FORMS.get(path.partition("?")[0])
        try:
            if form is None:
                return
            theirs = form.answer(recorded.get("message", recorded) if isinstance(recorded, dict) else recorded)
            ours = form.streamed(_events(raw)) if _is_stream(raw) else form.answer(msgspec.json.decode(raw))
            key, depth = form.key(theirs), sum(1 for _ in form.turns(body[form.field]))
        except (KeyError, IndexError, TypeError, AttributeError, msgspec.DecodeError):
            return
        if any(key):
            self._known.setdefault(key, []).append((depth, ours))

    def apply(self, path: str, body: Any) -> Any:
        """`body` with the turns that are known as they were answered here."""
        form = FORMS.get(path.partition("?")[0])
        entries = body.get(form.field) if form is not None and isinstance(body, dict) else None
        if form is None or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            return body
        found: Entries = []
        at = 0
        for depth, (start, end) in enumerate(form.turns(entries)):
            known = self._known.get(form.key(entries[start:end]))
            found += entries[at:start]
            found += entries[start:end] if known is None else self._best(known, depth)
            at = end
        return {**body, form.field: found + entries[at:]}

    @staticmethod
    def _best(known: list[tuple[int, Entries]], depth: int) -> Entries:
        """Of answers that say the same, the last one given at that place of a conversation, or else anywhere."""
        return next((e for d, e in reversed(known) if d == depth), known[-1][1])


def _is_stream(raw: bytes) -> bool:
    return raw.startswith((b"data:", b"event:", b":"))


def _events(raw: bytes) -> Entries:
    lines = (line.removeprefix(b"data:").strip() for line in raw.splitlines() if line.startswith(b"data:"))
    return [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]


def _text(content: Any, *kinds: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(p.get("text", "")) for p in content or [] if isinstance(p, dict) and p.get("type") in kinds)


def _runs(entries: Entries, role: str) -> Iterator[tuple[int, int]]:
    """Runs of messages of one role."""
    at = 0
    while at < len(entries):
        start, at = at, at + 1
        if entries[start].get("role") == role:
            while at < len(entries) and entries[at].get("role") == role:
                at += 1
            yield start, at


# --- Chat Completions: a turn is a message -------------------------------------------------------------------------


def _chat_turns(entries: Entries) -> Iterator[tuple[int, int]]:
    return ((i, i + 1) for i, entry in enumerate(entries) if entry.get("role") == "assistant")


def _chat_key(entries: Entries) -> Key:
    (message,) = entries
    calls = tuple(str(c["id"]) for c in message.get("tool_calls") or ())
    return plain(_text(message.get("content"), "text")), calls


def _chat_streamed(events: Entries) -> Entries:
    found: dict[str, Any] = {"role": "assistant", "content": None}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                found[name] = (found.get(name) or "") + delta[name]
        for call in delta.get("tool_calls") or ():  # they come whole
            found.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
    return [found]


# --- Messages: a turn is a run of messages made of blocks ----------------------------------------------------------


def _blocks(entries: Entries) -> Entries:
    return [
        block
        for content in (entry.get("content") or [] for entry in entries)
        for block in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def _messages_key(entries: Entries) -> Key:
    blocks = _blocks(entries)
    return plain(_text(blocks, "text")), tuple(str(b["id"]) for b in blocks if b["type"] == "tool_use")


def _messages_streamed(events: Entries) -> Entries:
    blocks: Entries = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block = blocks[event["index"]]
            for name, piece in event["delta"].items():
                if name != "type":
                    block[name] = block.get(name, "") + piece
    for block in blocks:
        if "partial_json" in block:
            block["input"] = msgspec.json.decode(block.pop("partial_json"))
    return [{"role": "assistant", "content": blocks}]


# --- Responses: a turn is reasoning, then a message, then calls ----------------------------------------------------


def _rank(item: dict[str, Any]) -> int | None:
    """The place of an item in a turn; None if it is no assistant's."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return 0
    if kind == "message":
        return 1 if item.get("role") == "assistant" else None
    return 2 if str(kind).endswith("_call") else None


def _responses_turns(entries: Entries) -> Iterator[tuple[int, int]]:
    start: int | None = None
    last = -1
    for i, rank in enumerate([*map(_rank, entries), None]):
        if start is not None and (rank is None or rank < last or rank == last == 1):
            yield start, i
            start = None
        if rank is not None and start is None:
            start = i
        last = -1 if rank is None else rank


def _responses_key(entries: Entries) -> Key:
    text = "".join(_text(e.get("content"), "output_text") for e in entries if _rank(e) == 1)
    return plain(text), tuple(str(e["call_id"]) for e in entries if "call_id" in e)


def _output(response: Any) -> Entries:
    found: Entries = response["output"]
    return found


FORMS = {
    "/v1/chat/completions": Form(
        "messages", _chat_turns, _chat_key, lambda a: [a["choices"][0]["message"]], _chat_streamed
    ),
    "/v1/messages": Form(
        "messages",
        lambda entries: _runs(entries, "assistant"),
        _messages_key,
        lambda a: [{"role": "assistant", "content": a["content"]}],
        _messages_streamed,
    ),
    "/v1/responses": Form(
        "input", _responses_turns, _responses_key, _output, lambda events: _output(events[-1]["response"])
    ),
}
FORMS["/responses"] = FORMS["/v1/responses"]
