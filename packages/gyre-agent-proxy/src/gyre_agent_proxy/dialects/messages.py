"""Anthropic Messages: `POST /v1/messages`, streaming and not, and `POST /v1/messages/count_tokens`.

In: what stands between two assistant turns becomes the tool results (in the order of their calls), then one user
message; a later system message stays in its place there, as text in <system-reminder>. Consecutive assistant messages
are one turn, as this API says. A tool's error is shown to the model as <error>…</error>. Tools without an
`input_schema` (web search and the like) cannot be called here: they are not offered, but counted and kept in the
record. A conversation that ends with an assistant turn is answered by another turn, not by the rest of that one.

Out: thinking, text, tool_use, in this order. `input` is the object the model wrote as arguments; arguments that are no
JSON object arrive as {"raw_arguments": "<what the model wrote>"}.
"""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from gyre_agent_proxy.conversation import Conversation, Reply, Request, Sampling, digest
from gyre_agent_proxy.dialects import demands
from gyre_agent_proxy.dialects.base import Body, Defaults, Opening, decode_object, event, whole
from gyre_agent_proxy.dialects.turns import Turns, blocks_of
from gyre_agent_proxy.errors import BadRequest, NoEngine, ProxyError, TooBusy, TooLong
from gyre_agent_proxy.unfolding import Said

name = "messages"

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Objects = list[dict[str, Any]]
_BILLING = "x-anthropic-billing-header:"  # Claude Code's first system block; it changes from request to request
_NEUTRAL = ("metadata", "cache_control", "service_tier", "diagnostics")  # change nothing about the answer
_SIGNATURE = "Z3lyZQ=="  # clients echo it; it is not looked at
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def read_request(raw: bytes, defaults: Defaults) -> Request:
    """Normalise a request body. Raises `BadRequest` naming the field."""
    body = Body(decode_object(raw))
    top_p = body.get("top_p", _Share, defaults.top_p)
    sampling = Sampling(
        max_tokens=body.get("max_tokens", _Tokens, defaults.max_tokens),
        temperature=body.get("temperature", Annotated[float, msgspec.Meta(ge=0, le=100)], defaults.temperature),
        top_p=top_p or 1e-6,  # engines want more than 0
        top_k=body.get("top_k", Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]) or None,
        stop=tuple(s for s in body.get("stop_sequences", list[str], []) if s),
    )
    turns = Turns(defaults.media)
    system, billing = _system(body.get("system", str | _Objects, []))
    turns.system(system, "system")
    messages = body.get("messages", _Objects)
    if not messages:
        raise BadRequest("messages: expected at least one message", "messages")
    for i, item in enumerate(messages):
        turns.message(item, f"messages[{i}]")
    tools, unserved = _tools(body.get("tools", _Objects, []))
    conversation = Conversation(messages=turns.end(), tools=tools, asks=turns.asks)
    stream, model = body.get("stream", bool, False), body.get("model", str, "")
    other = body.rest
    asked = {k: v for k, v in other.items() if k not in _NEUTRAL}
    if unserved:
        other["tools_left_out"] = unserved
    if billing:
        other["billing_header"] = billing
    same = [model, conversation.messages, tools, unserved, sampling, asked]
    return Request(
        conversation=conversation,
        sampling=sampling,
        dialect=name,
        model=model,
        stream=stream,
        digest=digest(name, msgspec.json.encode(same, order="deterministic")).hex(),
        omitted=turns.omitted,
        left_out=len(unserved),
        other=other,
        demand=demands.of_messages(other),
    )


def _system(system: str | _Objects) -> tuple[list[Any], str]:
    """The system prompt's blocks without the billing header, and that header."""
    blocks = blocks_of(system, "system")
    first = blocks[0].get("text") if blocks and isinstance(blocks[0], dict) else None
    if not isinstance(first, str) or not first.startswith(_BILLING):
        return blocks, ""
    header, _, rest = first.partition("\n")
    return [*([{"type": "text", "text": rest}] if rest else []), *blocks[1:]], header


def _tools(raw: _Objects) -> tuple[tuple[dict[str, Any], ...], _Objects]:
    """Tools in OpenAI's form, and those that cannot be called here. Raises `BadRequest`."""
    offered, unserved = [], []
    for i, tool in enumerate(raw):
        schema = tool.get("input_schema")
        if schema is None and tool.get("type") not in (None, "custom"):
            unserved.append(tool)
            continue
        named, about = tool.get("name"), tool.get("description")
        if not isinstance(named, str) or not isinstance(schema, dict | None) or not isinstance(about, str | None):
            raise BadRequest(
                f"tools[{i}]: expected {{name, description, input_schema}}, or a tool with a type, got {tool!r:.80}",
                "tools",
            )
        function: dict[str, Any] = {"name": named}
        if about is not None:
            function["description"] = about
        function["parameters"] = schema if schema is not None else {"type": "object", "properties": {}}
        offered.append({"type": "function", "function": function})
    return tuple(offered), unserved


def count(tokens: int) -> dict[str, Any]:
    """`POST /v1/messages/count_tokens`."""
    return {"input_tokens": tokens}


def _usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,  # without what was read from the cache
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": completion,
        "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
        "service_tier": "standard",
    }


def _used(reply: Reply) -> dict[str, Any]:
    return _usage(reply.prompt_tokens, min(reply.cached_tokens, reply.prompt_tokens), reply.completion_tokens)


def _stopped(reply: Reply) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons.get(reply.finish) or ("end_turn" if reply.stop is None else "stop_sequence")
    return {"stop_reason": reason, "stop_sequence": reply.stop if reason == "stop_sequence" else None}


def _input(arguments: str) -> dict[str, Any]:
    """The object that `arguments` are, whatever they are."""
    try:
        value = json.loads(whole(arguments.encode()))
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"raw_arguments": arguments}


def _message(call: str, model: str, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{call}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def answer(reply: Reply, request: Request, model: str) -> dict[str, Any]:
    """The whole answer; an empty one has one empty text block."""
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": _SIGNATURE})
    if reply.text or not (content or reply.calls):
        content.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return {**_message(reply.call, model, content, _used(reply)), **_stopped(reply)}


class Stream:
    """A `gyre_agent_proxy.dialects.base.Encoder`."""

    def __init__(self, opening: Opening, request: Request) -> None:
        self._opening = opening
        self._blocks = 0  # begun
        self._open = ""  # text | thinking: what the last of them is, while it goes on
        self._said = False  # there is a text block
        self._quiet = 0  # keepalives since something was said

    @property
    def keepalive(self) -> bytes:
        """A ping; in a long pause with an empty delta, of a thinking block where nothing was said yet.

        Client libraries keep pings to themselves: Claude Code gives up on a stream that shows it nothing for 300 s.
        """
        self._quiet += 1
        if self._quiet < 2:
            return _PING
        found = _PING if self._open else _PING + self._think()
        return found + self._delta({"type": f"{self._open}_delta", self._open: ""})

    def begin(self) -> bytes:
        """`message_start`: how much of the prompt was cached is not known yet."""
        opening = self._opening
        message = _message(opening.call, opening.model, [], _usage(opening.prompt_tokens, 0, 0))
        return _event("message_start", message=message) + _PING

    def reasoning(self, text: str) -> bytes:
        """More reasoning, in the thinking block."""
        self._quiet = 0
        found = b"" if self._open == "thinking" else self._end() + self._think()
        return found + self._delta({"type": "thinking_delta", "thinking": text})

    def delta(self, text: str) -> bytes:
        """More text; the thinking block has ended."""
        self._quiet = 0
        found = b""
        if self._open != "text":
            found = self._end() + self._start({"type": "text", "text": ""})
            self._open, self._said = "text", True
        return found + self._delta({"type": "text_delta", "text": text})

    def finish(self, reply: Reply, rest: Said) -> bytes:
        """The end: `rest` is what was not sent yet."""
        found = self.reasoning(rest.reasoning) if rest.reasoning else b""
        if rest.text or not (self._said or reply.reasoning or reply.calls):
            found += self.delta(rest.text)
        found += self._end()
        for call in reply.calls:
            found += self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            found += self._delta({"type": "input_json_delta", "partial_json": json.dumps(_input(call.arguments))})
            found += self._stop()
        return found + _event("message_delta", delta=_stopped(reply), usage=_used(reply)) + _event("message_stop")

    def failure(self, error: ProxyError) -> bytes:
        """The end of a stream that cannot be finished."""
        return event(error_body(error), "error")

    def _think(self) -> bytes:
        self._open = "thinking"
        return self._start({"type": "thinking", "thinking": "", "signature": ""})

    def _end(self) -> bytes:
        """The end of the text or thinking that goes on."""
        was, self._open = self._open, ""
        signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if was == "thinking" else b""
        return signed + self._stop() if was else b""

    def _start(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


_PING = _event("ping")
stream = Stream


def status(error: ProxyError) -> int:
    """HTTP status of an error: 529 where another attempt will do, 500 for what failed here."""
    if isinstance(error, TooBusy | NoEngine):
        return 529
    return min(error.status, 500)


def error_body(error: ProxyError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    code, text = status(error), str(error)
    if isinstance(error, TooLong) and error.limit:  # clients look for these words, and then compact
        text = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    kind = _KINDS.get(code) or ("invalid_request_error" if code < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": f"req_{uuid.uuid4().hex[:24]}"}


def models(name: str, created: int, context: int) -> dict[str, Any]:
    """`GET /v1/models`."""
    return {"data": [model(name, created, context)], "has_more": False, "first_id": name, "last_id": name}


def model(name: str, created: int, context: int) -> dict[str, Any]:
    """`GET /v1/models/{id}`; created: unix seconds, context: tokens, 0 where it is not known."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context or None,
        "max_tokens": context or None,
    }
