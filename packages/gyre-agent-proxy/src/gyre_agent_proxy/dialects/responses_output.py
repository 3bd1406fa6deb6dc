"""What a Responses call answers: the response object, its output items, and the same as server-sent events.

    created, in_progress ─▶ for each item: added ─▶ its parts and deltas ─▶ done ─▶ completed | incomplete | failed

Items come in the order reasoning, message, calls. Ids are made of the call's id, so an item has one identity in all
events, in the final object and on every connection the answer is written to. `sequence_number` counts the events of
one connection.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import msgspec

from gyre_agent_proxy.conversation import Reply, Request
from gyre_agent_proxy.dialects.base import Opening, event
from gyre_agent_proxy.dialects.responses_tools import Offer
from gyre_agent_proxy.errors import BadRequest, ProxyError


class Echo(msgspec.Struct, frozen=True):
    """What an answer needs of its request."""

    offer: Offer
    fields: dict[str, Any]  # of the response object
    encrypted: bool  # reasoning items carry `encrypted_content`: some clients keep only those that do


def response_object(
    call: str, created: int, model: str, echo: Echo, status: str, output: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A `response` with every field the API has."""
    return {
        "id": f"resp_{call}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": output,
        "usage": None,
        **echo.fields,
        **more,
    }


def answer(reply: Reply, request: Request, model: str) -> dict[str, Any]:
    """The whole answer."""
    return _finished(reply, request.echo, model, _items(reply, request.echo))


def _finished(reply: Reply, echo: Echo, model: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    cut = reply.finish == "length"
    return response_object(
        reply.call,
        reply.created,
        model,
        echo,
        "incomplete" if cut else "completed",
        output,
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        usage={
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    )


def _items(reply: Reply, echo: Echo, *, begun: bool = False) -> list[dict[str, Any]]:
    """The output; `begun`: the message was begun on this connection before anything else."""
    found: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        found.append(
            {
                "type": "reasoning",
                "id": f"rs_{reply.call}",
                "summary": [{"type": "summary_text", "text": reply.reasoning}],
                "content": [{"type": "reasoning_text", "text": reply.reasoning}],
                "encrypted_content": base64.b64encode(reply.call.encode()).decode() if echo.encrypted else None,
                "status": "completed",
            }
        )
    if begun or reply.text or not (reply.calls or found):
        message = _message(reply.call, [_text_part(reply.text)], "completed")
        found.insert(0 if begun else len(found), message)
    for i, call in enumerate(reply.calls):
        found.append(echo.offer.item(call, f"{reply.call}{i or ''}", "completed"))
    if reply.finish == "length":
        found[-1]["status"] = "incomplete"
    return found


def _message(call: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{call}", "status": status, "role": "assistant", "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class Stream:
    """A `gyre_agent_proxy.dialects.base.Encoder`."""

    def __init__(self, opening: Opening, request: Request) -> None:
        self._opening = opening
        self._echo: Echo = request.echo
        self._next = 0  # sequence number
        self._text = False  # the message's first delta was sent

    @property
    def keepalive(self) -> bytes:
        """The API's own heartbeat. A comment would not do: clients whose idle timeout counts events do not see it."""
        return self._event("keepalive")

    def begin(self) -> bytes:
        """The response, still empty."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, text: str) -> bytes:
        """More text."""
        found = b""
        if not self._text:
            self._text = True
            found = self._open(0, _message(self._opening.call, [], "in_progress"))
            found += self._part(0, f"msg_{self._opening.call}", "added", _text_part(""))
        return found + self._said(0, f"msg_{self._opening.call}", text)

    def finish(self, reply: Reply, rest: str) -> bytes:
        """The end: `rest` is the text not sent yet."""
        items = _items(reply, self._echo, begun=self._text)
        found = b""
        for i, item in enumerate(items):
            found += b"".join(self._item(i, item, rest))
        final = _finished(reply, self._echo, self._opening.model, items)
        return found + self._event(f"response.{final['status']}", response=final)

    def failure(self, error: ProxyError) -> bytes:
        """The end of a stream that cannot be finished."""
        said = {"code": _code(error), "message": str(error)}
        return self._event("response.failed", response=self._response("failed", error=said))

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        opening = self._opening
        return response_object(opening.call, opening.created, opening.model, self._echo, status, [], **more)

    def _item(self, index: int, item: dict[str, Any], rest: str) -> Iterator[bytes]:
        key = item["id"]
        match item["type"]:
            case "message":
                (part,) = item["content"]
                if not self._text:
                    yield self._open(index, item | {"status": "in_progress", "content": []})
                    yield self._part(index, key, "added", _text_part(""))
                if rest:
                    yield self._said(index, key, rest)
                at = {"item_id": key, "output_index": index, "content_index": 0}
                yield self._event("response.output_text.done", **at, text=part["text"], logprobs=[])
                yield self._part(index, key, "done", part)
            case "reasoning":
                empty = item | {"status": "in_progress", "summary": [], "content": [], "encrypted_content": None}
                yield self._open(index, empty)
                yield from self._thought(index, item)
            case "function_call":
                yield self._open(index, item | {"status": "in_progress", "arguments": ""})
                yield from self._argument(index, item, "function_call_arguments", "arguments", name=item["name"])
            case "custom_tool_call":
                yield self._open(index, item | {"status": "in_progress", "input": ""})
                yield from self._argument(index, item, "custom_tool_call_input", "input")
            case _:
                yield self._open(index, item | {"status": "in_progress"})
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _thought(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        """Reasoning, both as its own summary and as content: harnesses show the one or the other."""
        (summary,), (content,) = item["summary"], item["content"]
        at: dict[str, Any] = {"item_id": item["id"], "output_index": index, "summary_index": 0}
        kind = "response.reasoning_summary"
        yield self._event(f"{kind}_part.added", **at, part=summary | {"text": ""})
        yield self._event(f"{kind}_text.delta", **at, delta=summary["text"])
        yield self._event(f"{kind}_text.done", **at, text=summary["text"])
        yield self._event(f"{kind}_part.done", **at, part=summary)
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        yield self._part(index, item["id"], "added", content | {"text": ""})
        yield self._event("response.reasoning_text.delta", **at, delta=content["text"])
        yield self._event("response.reasoning_text.done", **at, text=content["text"])
        yield self._part(index, item["id"], "done", content)

    def _argument(self, index: int, item: dict[str, Any], kind: str, field: str, **more: Any) -> Iterator[bytes]:
        at = {"item_id": item["id"], "output_index": index}
        yield self._event(f"response.{kind}.delta", **at, delta=item[field])
        yield self._event(f"response.{kind}.done", **at, **{field: item[field]}, **more)

    def _open(self, index: int, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=index, item=item)

    def _part(self, index: int, key: str, what: str, part: dict[str, Any]) -> bytes:
        return self._event(f"response.content_part.{what}", item_id=key, output_index=index, content_index=0, part=part)

    def _said(self, index: int, key: str, text: str) -> bytes:
        at = {"item_id": key, "output_index": index, "content_index": 0}
        return self._event("response.output_text.delta", **at, delta=text, logprobs=[])

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _code(error: ProxyError) -> str:
    """The code under which a stream fails; clients decide by it whether to ask again."""
    return "invalid_prompt" if isinstance(error, BadRequest) else "server_error"
