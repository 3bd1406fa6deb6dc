"""The turns of an Anthropic conversation, gathered from messages made of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gyre_agent_proxy.conversation import Message, ToolCall, in_call_order
from gyre_agent_proxy.dialects.parts import Parts
from gyre_agent_proxy.errors import BadRequest

_REMINDER = "<system-reminder>"


class Turns:
    """Takes messages in order; `end` returns them normalised: system, then turns of the two sides.

    Between two assistant turns stand tool messages, if any, and one user message, if anybody wrote anything.
    """

    def __init__(self, media: str) -> None:
        """media: as `Defaults.media`."""
        self.asks: str | None = None  # the last text block a user wrote, reminders aside
        self._parts = Parts(media)
        self._done: list[Message] = []
        self._system: list[str] = []
        # Of the turn that is being gathered:
        self._results: list[Message] = []
        self._texts: list[str] | None = None
        self._assistant: list[Any] | None = None
        self._names: dict[str, str] = {}  # of tools, by call id

    @property
    def omitted(self) -> int:
        """Blocks replaced by a note."""
        return self._parts.omitted

    def system(self, content: Any, where: str) -> None:
        """Take a system message; a later one stays in place. Raises `BadRequest`."""
        text = joined(self._part(b, where) for b in blocks_of(content, where))
        if not self._done and self._texts is None and not self._results and self._assistant is None:
            self._system += [text] if text else []
            return
        self._end_assistant()
        if text:
            told = text if text.startswith(_REMINDER) else f"{_REMINDER}\n{text}\n</system-reminder>"
            self._texts = self._texts or []
            self._texts.append(told)

    def message(self, item: dict[str, Any], where: str) -> None:
        """Take one message. Raises `BadRequest` naming `where`."""
        role, content = item.get("role"), item.get("content")
        where_content = f"{where}.content"
        match role:
            case "system":
                self.system(content, where_content)
            case "user":
                self._end_assistant()
                self._user(blocks_of(content, where_content), where_content)
            case "assistant":
                self._end_user()
                self._assistant = self._assistant or []
                self._assistant += blocks_of(content, where_content)
            case _:
                raise BadRequest(f"{where}.role: expected user, assistant or system, got {role!r:.80}", "messages")

    def end(self) -> tuple[Message, ...]:
        """All messages. Raises `BadRequest`."""
        self._end_assistant()
        self._end_user()
        if self._system:
            self._done.insert(0, Message(role="system", text=joined(self._system)))
        return tuple(in_call_order(self._done))

    def _user(self, blocks: list[Any], where: str) -> None:
        texts = self._texts or []
        for i, block in enumerate(blocks):
            at = f"{where}[{i}]"
            kind = _kind(block, at)
            if kind in ("tool_use", "thinking"):
                raise BadRequest(f"{at}: a user does not say a block of type {kind!r}; its role is assistant", where)
            if kind == "tool_result":
                self._results.append(self._result(block, at))
                continue
            text = self._part(block, at)
            if kind == "text" and text and not text.startswith(_REMINDER):
                self.asks = text
            texts.append(text)
        if texts or not self._results:
            self._texts = texts

    def _result(self, block: dict[str, Any], where: str) -> Message:
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise BadRequest(f"{where}.tool_use_id: expected a string, got {call_id!r:.80}", "messages")
        inner = f"{where}.content"
        text = joined(self._part(b, inner) for b in blocks_of(block.get("content"), inner))
        if block.get("is_error") is True:
            text = f"<error>{text}</error>"
        return Message(role="tool", text=text, call_id=call_id, name=self._names.get(call_id))

    def _part(self, block: Any, where: str) -> str:
        """The text of a block. Raises `BadRequest`."""
        match _kind(block, where):
            case "text" | "image":
                return self._parts.part(block, where)
            case "document":
                return self._document(block, where)
            case "search_result":
                return joined(self._part(b, where) for b in blocks_of(block.get("content"), where))
            case "tool_reference":
                return f"[tool {block.get('tool_name')!r}]"
            case kind:  # of a server's tools, or newer than this module
                return self._parts.note(kind[:64], where)

    def _document(self, block: dict[str, Any], where: str) -> str:
        """A document's text, where it is one."""
        match block.get("source"):
            case {"type": "text", "data": str(text)}:
                return text
            case {"type": "content", "content": content}:
                return joined(self._part(b, where) for b in blocks_of(content, where))
            case _:
                return self._parts.part(block, where)

    def _end_user(self) -> None:
        self._done += self._results
        self._results = []
        if self._texts is not None:
            self._done.append(Message(role="user", text=joined(self._texts)))
            self._texts = None

    def _end_assistant(self) -> None:
        if self._assistant is None:
            return
        blocks, self._assistant = self._assistant, None
        texts, thoughts, calls = [], [], []
        for i, block in enumerate(blocks):
            where = f"messages (assistant turn {len(self._done)}).content[{i}]"
            match _kind(block, where):
                case "thinking":
                    thoughts.append("" if block.get("thinking", "") is None else _string(block, "thinking", where))
                case "redacted_thinking":
                    pass  # sealed: nothing that a prompt could hold
                case "tool_use":
                    call = _call(block, where)
                    calls.append(call)
                    self._names[call.id] = call.name
                case "tool_result":
                    raise BadRequest(f"{where}: a tool_result belongs into a user message", "messages")
                case _:
                    texts.append(self._part(block, where))
        self._done.append(
            Message(
                role="assistant",
                text="".join(texts),
                reasoning="\n".join(t for t in thoughts if t) or None,
                calls=tuple(calls),
            )
        )


def blocks_of(content: Any, where: str) -> list[Any]:
    """The blocks of a content field; a string is one text. Raises `BadRequest`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if content is None:
        return []
    if not isinstance(content, list):
        raise BadRequest(f"{where}: expected a string or a list of blocks, got {content!r:.80}", where)
    return [{"type": "text", "text": b} if isinstance(b, str) else b for b in content]


def joined(texts: Iterable[str]) -> str:
    """Texts of several blocks as one, each on a line of its own."""
    found: list[str] = []
    for text in filter(None, texts):
        if found and not found[-1].endswith("\n"):
            found.append("\n")
        found.append(text)
    return "".join(found)


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{where}: expected a block with a type, got {block!r:.80}", where)
    return kind


def _string(block: dict[str, Any], field: str, where: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{field}: expected a string, got {value!r:.80}", "messages")
    return value


def _call(block: dict[str, Any], where: str) -> ToolCall:
    """A tool_use; its input is written as a model would have written the arguments."""
    given = block.get("input")
    arguments = json.dumps({} if given is None else given, ensure_ascii=False)
    return ToolCall(id=_string(block, "id", where), name=_string(block, "name", where), arguments=arguments)
