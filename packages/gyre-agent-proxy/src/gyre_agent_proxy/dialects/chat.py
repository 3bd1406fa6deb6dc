"""OpenAI Chat Completions: `POST /v1/chat/completions`, streaming and not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from gyre_agent_proxy.conversation import Conversation, Message, Reply, Request, Sampling, ToolCall
from gyre_agent_proxy.dialects.base import Body, Defaults, decode_object
from gyre_agent_proxy.errors import BadRequest, ProxyError

# Ranges are checked here: an engine that fails on a request would be taken for lost.
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


def read_request(raw: bytes, defaults: Defaults) -> Request:
    """Normalise a request body. Raises `BadRequest` naming the field."""
    data = decode_object(raw)
    body = Body(data)
    if (n := body.get("n", int, 1)) != 1:
        raise BadRequest(f"n: one answer a request is supported, got n={n!r}; send the request {n!r} times", "n")
    stops = body.get("stop", str | list[str], [])
    stops = (stops,) if isinstance(stops, str) else tuple(s for s in stops if s)
    limit = body.get("max_completion_tokens", _Tokens) or body.get("max_tokens", _Tokens)
    body.get("max_tokens", _Tokens)
    sampling = Sampling(
        max_tokens=limit or defaults.max_tokens,
        temperature=body.get("temperature", Annotated[float, msgspec.Meta(ge=0, le=100)], defaults.temperature),
        top_p=body.get("top_p", _Share, defaults.top_p),
        top_k=body.get("top_k", Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]) or None,
        min_p=body.get("min_p", Annotated[float, msgspec.Meta(ge=0, le=1)]),
        presence_penalty=body.get("presence_penalty", _Penalty),
        frequency_penalty=body.get("frequency_penalty", _Penalty),
        repetition_penalty=body.get("repetition_penalty", Annotated[float, msgspec.Meta(gt=0, le=2)]),
        seed=body.get("seed", Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]),
        stop=stops,
    )
    options = body.get("stream_options", dict[str, Any], {})
    messages = body.get("messages", list[dict[str, Any]])
    if not messages:
        raise BadRequest("messages: expected at least one message", "messages")
    tools = body.get("tools", list[dict[str, Any]], [])
    return Request(
        conversation=Conversation(messages=tuple(_messages(messages)), tools=tuple(tools)),
        sampling=sampling,
        dialect="chat",
        model=body.get("model", str, ""),
        stream=body.get("stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        digest=_digest(data),
        other=body.rest,
    )


def _digest(data: dict[str, Any]) -> str:
    same = {k: v for k, v in data.items() if k not in ("stream", "stream_options")}
    return hashlib.blake2b(msgspec.json.encode(same, order="deterministic"), digest_size=16).hexdigest()


def _messages(raw: list[dict[str, Any]]) -> Iterator[Message]:
    leading = True
    for i, item in enumerate(raw):
        where = f"messages[{i}]"
        role = item.get("role")
        text = _text(item.get("content"), where)
        if role in ("system", "developer"):
            if leading:
                yield Message(role="system", text=text)
            else:  # hoisting it to the front would rewrite the prefix
                yield Message(role="user", text=f"<system-reminder>\n{text}\n</system-reminder>")
            continue
        leading = False
        match role:
            case "user":
                yield Message(role="user", text=text)
            case "assistant":
                yield Message(
                    role="assistant", text=text, reasoning=_reasoning(item), calls=_calls(item.get("tool_calls"), where)
                )
            case "tool":
                call_id, name = item.get("tool_call_id"), item.get("name")
                if not isinstance(call_id, str):
                    raise BadRequest(f"{where}.tool_call_id: expected a string, got {call_id!r:.80}", "messages")
                yield Message(role="tool", text=text, call_id=call_id, name=name if isinstance(name, str) else None)
            case _:
                raise BadRequest(
                    f"{where}.role: expected system, developer, user, assistant or tool, got {role!r:.80}", "messages"
                )


def _text(content: Any, where: str) -> str:
    """None, "" and [] are the same; a list of text parts is their concatenation."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: expected a string or a list of parts, got {content!r:.80}", "messages")
    found = []
    for j, part in enumerate(content):
        if isinstance(part, str):
            found.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "file"):
            raise BadRequest(
                f"{where}.content[{j}]: this model reads text only, got a part of type {kind!r}", "messages"
            )
        if not isinstance(value, str):
            raise BadRequest(f"{where}.content[{j}]: expected a text part, got {part!r:.80}", "messages")
        found.append(value)
    return "".join(found)


def _reasoning(item: dict[str, Any]) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        if isinstance(value := item.get(name), str):
            return value
    return None


def _calls(raw: Any, where: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    found = []
    try:
        for call in raw:
            function = call["function"]
            arguments = function.get("arguments") or ""
            if not isinstance(arguments, str):
                arguments = msgspec.json.encode(arguments).decode()
            found.append(ToolCall(id=str(call["id"]), name=str(function["name"]), arguments=arguments))
    except (TypeError, KeyError, AttributeError) as e:
        raise BadRequest(
            f"{where}.tool_calls: expected [{{id, type, function: {{name, arguments}}}}], got {raw!r:.80}", "messages"
        ) from e
    return tuple(found)


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def _tool_calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in reply.calls
    ]


def completion(reply: Reply, model: str) -> dict[str, Any]:
    """The whole answer."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.text if reply.text or not reply.calls else None,
        "refusal": None,
    }
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = _tool_calls(reply)
    return {
        "id": f"chatcmpl-{reply.call}",
        "object": "chat.completion",
        "created": reply.created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}],
        "usage": _usage(reply),
    }


class ChatStream:
    """Encodes one answer as server-sent events; deltas first, then `finish`."""

    keepalive = b": keepalive\n\n"

    def __init__(self, call: str, created: int, request: Request, model: str) -> None:
        self._head = {"id": f"chatcmpl-{call}", "object": "chat.completion.chunk", "created": created, "model": model}
        self._usage = request.include_usage
        self._begun = False

    def delta(self, text: str) -> bytes:
        """More text."""
        return self._chunk({"content": text})

    def finish(self, reply: Reply, rest: str) -> bytes:
        """The end: `rest` is the text not sent yet."""
        found = b""
        if reply.reasoning is not None:
            found += self._chunk({"reasoning_content": reply.reasoning})
        if rest or not self._begun:
            found += self._chunk({"content": rest})
        for i, call in enumerate(_tool_calls(reply)):
            found += self._chunk({"tool_calls": [{"index": i, **call}]})
        found += self._chunk({}, reply.finish)
        if self._usage:
            found += _event({**self._head, "choices": [], "usage": _usage(reply)})
        return found + b"data: [DONE]\n\n"

    def failure(self, error: ProxyError) -> bytes:
        """The end of a stream that cannot be finished."""
        return _event(error_body(error)) + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = {**self._head, "choices": [choice]}
        return _event({**chunk, "usage": None} if self._usage else chunk)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_body(error: ProxyError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }


def models(name: str, created: int) -> dict[str, Any]:
    """`GET /v1/models`."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": created, "owned_by": "gyre"}]}
