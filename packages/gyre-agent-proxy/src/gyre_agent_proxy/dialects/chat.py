"""OpenAI Chat Completions: `POST /v1/chat/completions`, streaming and not.

Tools other than functions are not offered, but counted and kept in the record. Thinking that comes back among the parts
of an assistant's content is reasoning. The predecessors of tools, `functions` and `function_call`, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from gyre_agent_proxy.conversation import Conversation, Message, Reply, Request, Sampling, ToolCall
from gyre_agent_proxy.dialects import demands
from gyre_agent_proxy.dialects.base import Body, Defaults, Opening, decode_object, digest_of, event
from gyre_agent_proxy.dialects.parts import Parts
from gyre_agent_proxy.errors import BadRequest, ProxyError
from gyre_agent_proxy.unfolding import Said

name = "chat"

# Ranges are checked here: an engine that fails on a request would be taken for lost.
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


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
        top_p=body.get("top_p", _Share, defaults.top_p) or 1e-6,  # engines want more than 0
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
    tools, unserved = _tools(body.get("tools", list[dict[str, Any]], []))
    if body.get("functions", list[Any]) or body.get("function_call", str | dict[str, Any], "none") != "none":
        raise BadRequest("functions, function_call: superseded in this API; send tools and tool_choice", "functions")
    parts = Parts(defaults.media)
    return Request(
        conversation=Conversation(messages=tuple(_messages(messages, parts)), tools=tools),
        sampling=sampling,
        dialect=name,
        model=body.get("model", str, ""),
        stream=body.get("stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        digest=digest_of(data, "stream", "stream_options"),
        omitted=parts.omitted,
        left_out=len(unserved),
        other=body.rest | ({"tools_left_out": unserved} if unserved else {}),
        demand=demands.of_chat(data),
    )


def _tools(raw: list[dict[str, Any]]) -> tuple[tuple[dict[str, Any], ...], list[dict[str, Any]]]:
    """The functions, and the tools of other types, which cannot be called here."""
    offered, unserved = [], []
    for tool in raw:
        if isinstance(tool.get("function"), dict) or tool.get("type") in (None, "function"):
            offered.append({k: v for k, v in tool.items() if k != "cache_control"})
        else:
            unserved.append(tool)
    return tuple(offered), unserved


def _messages(raw: list[dict[str, Any]], parts: Parts) -> Iterator[Message]:
    leading = True
    for i, item in enumerate(raw):
        where = f"messages[{i}]"
        role, content = item.get("role"), item.get("content")
        thoughts: list[Any] = []
        if role == "assistant" and isinstance(content, list):
            thoughts = [p for p in content if isinstance(p, dict) and p.get("type") in _THOUGHTS]
            content = [p for p in content if p not in thoughts] if thoughts else content
        text = parts.text(content, f"{where}.content")
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
                if item.get("function_call"):
                    raise BadRequest(f"{where}.function_call: superseded in this API; send tool_calls", "messages")
                yield Message(
                    role="assistant",
                    text=text,
                    reasoning=_reasoning(item, thoughts),
                    calls=_calls(item.get("tool_calls"), where),
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


def _reasoning(item: dict[str, Any], thoughts: list[dict[str, Any]]) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        if isinstance(value := item.get(name), str):
            return value
    found = [t for part in thoughts if isinstance(t := part.get("thinking", part.get("text")), str)]
    return "\n".join(found) or None


def _calls(raw: Any, where: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    found = []
    try:
        for call in raw:
            function, key = call["function"], call["id"]
            if not isinstance(key, str | int):
                raise TypeError
            arguments = function.get("arguments") or ""
            if not isinstance(arguments, str):
                arguments = msgspec.json.encode(arguments).decode()
            found.append(ToolCall(id=str(key), name=str(function["name"]), arguments=arguments))
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
        "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens, "audio_tokens": 0},
    }


def _tool_calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in reply.calls
    ]


def answer(reply: Reply, request: Request, model: str) -> dict[str, Any]:
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


class Stream:
    """A `gyre_agent_proxy.dialects.base.Encoder`."""

    keepalive = b": keepalive\n\n"

    def __init__(self, opening: Opening, request: Request) -> None:
        self._head = {
            "id": f"chatcmpl-{opening.call}",
            "object": "chat.completion.chunk",
            "created": opening.created,
            "model": opening.model,
        }
        self._usage = request.include_usage
        self._begun = False

    def begin(self) -> bytes:
        """Nothing: the role comes with the first delta."""
        return b""

    def reasoning(self, text: str) -> bytes:
        """More reasoning."""
        return self._chunk({"reasoning_content": text})

    def delta(self, text: str) -> bytes:
        """More text."""
        return self._chunk({"content": text})

    def finish(self, reply: Reply, rest: Said) -> bytes:
        """The end: `rest` is what was not sent yet."""
        found = self.reasoning(rest.reasoning) if rest.reasoning else b""
        if rest.text or not self._begun:
            found += self.delta(rest.text)
        for i, call in enumerate(_tool_calls(reply)):
            found += self._chunk({"tool_calls": [{"index": i, **call}]})
        found += self._chunk({}, reply.finish)
        if self._usage:
            found += event({**self._head, "choices": [], "usage": _usage(reply)})
        return found + b"data: [DONE]\n\n"

    def failure(self, error: ProxyError) -> bytes:
        """The end of a stream that cannot be finished."""
        return event(error_body(error)) + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = {**self._head, "choices": [choice]}
        return event({**chunk, "usage": None} if self._usage else chunk)


stream = Stream


def status(error: ProxyError) -> int:
    """HTTP status of an error."""
    return error.status


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
    return {"object": "list", "data": [model(name, created)]}


def model(name: str, created: int) -> dict[str, Any]:
    """`GET /v1/models/{id}`; created: unix seconds."""
    return {"id": name, "object": "model", "created": created, "owned_by": "gyre"}
