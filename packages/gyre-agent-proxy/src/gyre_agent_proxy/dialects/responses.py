"""OpenAI Responses: `POST /v1/responses`, streaming and not.

Nothing is stored: a request carries its whole history, and what refers to a stored one is refused. Of the input,
reasoning, then a message, then calls are one assistant turn; an item out of this order begins the next. A call is known
by its `call_id`; item ids, status and annotations mean nothing here. What nobody here can run (hosted tools and their
items) is left out of the prompt, counted, and kept in the record.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import msgspec

from gyre_agent_proxy.conversation import Conversation, Message, Request, Sampling, ToolCall
from gyre_agent_proxy.dialects import demands
from gyre_agent_proxy.dialects.base import Body, Defaults, decode_object, digest_of
from gyre_agent_proxy.dialects.chat import error_body, status
from gyre_agent_proxy.dialects.parts import Parts
from gyre_agent_proxy.dialects.responses_output import Echo, Stream, answer
from gyre_agent_proxy.dialects.responses_tools import Offer, call_of
from gyre_agent_proxy.errors import BadRequest

__all__ = ["answer", "error_body", "name", "read_request", "status", "stream"]

name = "responses"
stream = Stream

# What the API would look up in its store.
_STORED = ("previous_response_id", "conversation", "prompt")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_COMPACTED = ("compaction", "compaction_summary", "context_compaction")

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


def read_request(raw: bytes, defaults: Defaults) -> Request:
    """Normalise a request body. Raises `BadRequest` naming the field."""
    data = decode_object(raw)
    body = Body(data)
    for field in _STORED:
        if data.get(field) is not None:
            raise BadRequest(f"{field}: nothing is stored here, got {data[field]!r:.80}; send the whole input", field)
    if data.get("background"):
        raise BadRequest("background: only answers that are waited for are served; send background=false", "background")
    limit = body.get("max_output_tokens", _Tokens)
    sampling = Sampling(
        max_tokens=limit or defaults.max_tokens,
        temperature=body.get("temperature", Annotated[float, msgspec.Meta(ge=0, le=100)], defaults.temperature),
        top_p=body.get("top_p", Annotated[float, msgspec.Meta(ge=0, le=1)], defaults.top_p) or 1e-6,  # engines refuse 0
    )
    parts, offer = Parts(defaults.media), Offer(body.get("tools", list[dict[str, Any]], []))
    instructions = parts.text(body.get("instructions", str), "instructions")
    asked = body.get("input", str | list[Any], [])
    reader = _Reader(parts, offer, instructions)
    for i, item in enumerate([{"role": "user", "content": asked}] if isinstance(asked, str) else asked):
        reader.read(item, f"input[{i}]")
    messages = reader.messages()
    if not asked or all(m.role == "system" for m in messages):
        raise BadRequest("input: expected a text or items with at least one message that is not the system's", "input")
    left_out = {"tools": offer.left_out, "items": reader.left_out}
    include = data.get("include")
    return Request(
        conversation=Conversation(messages=messages, tools=offer.definitions),
        sampling=sampling,
        dialect=name,
        model=body.get("model", str, ""),
        stream=body.get("stream", bool, False),
        digest=digest_of(data, "stream", "stream_options"),
        omitted=parts.omitted,
        left_out=len(offer.left_out) + len(reader.left_out),
        other=body.rest | {f"{k}_left_out": v for k, v in left_out.items() if v},
        demand=demands.of_responses(data, offer),
        echo=Echo(
            offer=offer,
            fields=_echo(data) | {"temperature": sampling.temperature, "top_p": sampling.top_p, "tools": offer.echo},
            encrypted=isinstance(include, list) and "reasoning.encrypted_content" in include,
        ),
    )


def _echo(data: dict[str, Any]) -> dict[str, Any]:
    """Fields of the request that the response repeats, and what it says of things that do not exist here.

    What changes nothing is never an error, whatever it is; a value of another kind than the API's is not repeated.
    """

    def asked(field: str, kind: Any, default: Any = None) -> Any:
        try:
            return default if data.get(field) is None else msgspec.convert(data[field], kind)
        except msgspec.ValidationError:
            return default

    reasoning, text = asked("reasoning", dict[str, Any], {}), asked("text", dict[str, Any], {})
    choice = data.get("tool_choice")
    if not (choice in ("none", "required") or (isinstance(choice, dict) and isinstance(choice.get("type"), str))):
        choice = "auto"
    return {
        "background": False,
        "instructions": data.get("instructions"),
        "max_output_tokens": data.get("max_output_tokens"),
        "max_tool_calls": asked("max_tool_calls", int),
        "metadata": asked("metadata", dict[str, str], {}),
        "parallel_tool_calls": asked("parallel_tool_calls", bool, True),
        "previous_response_id": None,
        "prompt_cache_key": asked("prompt_cache_key", str),
        "reasoning": {k: v if isinstance(v := reasoning.get(k), str) else None for k in ("effort", "summary")},
        "safety_identifier": asked("safety_identifier", str),
        "service_tier": "default",
        "store": False,
        "text": text if isinstance(text.get("format"), dict) else text | {"format": {"type": "text"}},
        "tool_choice": choice,
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": asked("user", str),
    }


class _Turn:
    """An assistant turn being read: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: str | None = None
        self.calls: list[ToolCall] = []

    def message(self) -> Message:
        return Message(
            role="assistant",
            text=self.text or "",
            reasoning="\n\n".join(self.reasoning) or None,
            calls=tuple(self.calls),
        )


class _Reader:
    """Reads input items into messages."""

    def __init__(self, parts: Parts, offer: Offer, instructions: str) -> None:
        self.left_out: list[dict[str, Any]] = []
        self._parts = parts
        self._offer = offer
        self._system = [instructions] if instructions else []
        self._messages: list[Message] = []
        self._turn: _Turn | None = None

    def messages(self) -> tuple[Message, ...]:
        """What was read; the leading system messages are one."""
        self._end_turn()
        system = [Message(role="system", text="\n\n".join(self._system))] if self._system else []
        return (*system, *self._messages)

    def read(self, item: Any, where: str) -> None:
        """Take the next item. Raises `BadRequest`."""
        if not isinstance(item, dict):
            raise BadRequest(f"{where}: expected an item, got {item!r:.80}", "input")
        kind = item.get("type")
        kind = kind if kind is not None else "message" if "role" in item else "item_reference"
        if not isinstance(kind, str):
            raise BadRequest(f"{where}.type: expected a string, got {kind!r:.80}", "input")
        if kind in _CALLS:
            call_id = item.get("call_id") or (item.get("id") if kind == "local_shell_call" else None)
            call = call_of(item, _known_by(call_id, where), self._offer, where)
            self._open_turn().calls.append(call)
        elif kind in _OUTPUTS:
            call_id = item.get("call_id") or (item.get("id") if kind == "local_shell_call_output" else None)
            output = item.get("output")  # an object where a harness passes on what its tool gave it
            output = msgspec.json.encode(output).decode() if isinstance(output, dict) else output
            text = self._parts.text(output, f"{where}.output")
            self._add(Message(role="tool", text=text, call_id=_known_by(call_id, where)))
        elif kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in ("item_reference", "compaction_trigger"):
            what = "an item that is stored" if kind == "item_reference" else "a compaction by the server"
            raise BadRequest(f"{where}: nothing is stored or compacted here, and {kind} asks for {what}", "input")
        else:
            self._other(kind, item, where)

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        text = self._parts.text(item.get("content"), f"{where}.content")
        match role:
            case "user":
                self._add(Message(role="user", text=text))
            case "assistant":
                turn = self._turn
                if turn is None or turn.text is not None or turn.calls:
                    turn = self._new_turn()
                turn.text = text
            case "system" | "developer":
                if self._messages or self._turn is not None:  # hoisting it to the front would rewrite the prefix
                    self._add(Message(role="user", text=f"<system-reminder>\n{text}\n</system-reminder>"))
                else:
                    self._system.append(text)
            case _:
                raise BadRequest(
                    f"{where}.role: expected system, developer, user or assistant, got {role!r:.80}", "input"
                )

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        content, summary = (item.get(field) or [] for field in ("content", "summary"))
        field = "content" if content else "summary"
        text = self._parts.text(content or summary, f"{where}.{field}")
        turn = self._turn
        if turn is None or turn.text is not None or turn.calls:
            turn = self._new_turn()
        if text:
            turn.reasoning.append(text)

    def _other(self, kind: str, item: dict[str, Any], where: str) -> None:
        """Hosted tools' items and what is not known yet: text is read, anything else is left out."""
        text = ""
        if not kind.endswith(("_call", "_output")):
            with contextlib.suppress(BadRequest):
                text = Parts("refuse").text(item.get("content") or item.get("summary"), where)
        if not text:
            self.left_out.append(item)
            text = "[earlier conversation omitted: it is encrypted]" if kind in _COMPACTED else ""
        if text:
            self._add(Message(role="user", text=text))

    def _open_turn(self) -> _Turn:
        return self._turn or self._new_turn()

    def _new_turn(self) -> _Turn:
        self._end_turn()
        self._turn = _Turn()
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
            self._turn = None

    def _add(self, message: Message) -> None:
        self._end_turn()
        self._messages.append(message)


def _known_by(call_id: Any, where: str) -> str:
    if not isinstance(call_id, str) or not call_id:
        raise BadRequest(f"{where}.call_id: expected a string, got {call_id!r:.80}", "input")
    return call_id
