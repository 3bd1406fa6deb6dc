"""What a Responses call answers: the response object, its output items, and the same as server-sent events.

    created, in_progress ─▶ for each item: added ─▶ its parts and deltas ─▶ done ─▶ completed | incomplete | failed

Items come in the order reasoning, message, calls. Ids are made of the call's id, so an item has one identity in all
events, in the final object and on every connection the answer is written to. `sequence_number` counts the events of
one connection.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from gyre_agent_proxy.conversation import Reply, Request
from gyre_agent_proxy.dialects.base import Opening, event
from gyre_agent_proxy.dialects.responses_tools import Offer
from gyre_agent_proxy.errors import BadRequest, ProxyError
from gyre_agent_proxy.unfolding import Said

_ARGUMENTS = {  # of a call: the field that holds them, and how its events are named
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


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


def _items(reply: Reply, echo: Echo) -> list[dict[str, Any]]:
    """The output."""
    found: list[dict[str, Any]] = []
    if reply.reasoning:
        found.append(_reasoning(reply.call, reply.reasoning, echo))
    if reply.text or not (reply.calls or found):
        found.append(_message(reply.call, [_text_part(reply.text)], "completed"))
    for i, call in enumerate(reply.calls):
        found.append(echo.offer.item(call, f"{reply.call}{i or ''}", "completed"))
    if reply.finish == "length":
        found[-1]["status"] = "incomplete"
    return found


def _reasoning(call: str, text: str, echo: Echo) -> dict[str, Any]:
    """Reasoning, both as its own summary and as content: harnesses show the one or the other."""
    return {
        "type": "reasoning",
        "id": f"rs_{call}",
        "summary": [_summary_part(text)],
        "content": [_reasoning_part(text)],
        "encrypted_content": base64.b64encode(call.encode()).decode() if echo.encrypted else None,
        "status": "completed",
    }


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


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
        self._done = 0  # items that have ended
        self._open = ""  # reasoning | message: the item that goes on
        self._thought: list[str] = []  # the reasoning sent so far

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

    def reasoning(self, text: str) -> bytes:
        """More reasoning."""
        call, found = self._opening.call, b""
        summary, content = self._at(f"rs_{call}", summary_index=0), self._at(f"rs_{call}", content_index=0)
        if self._open != "reasoning":
            empty: dict[str, Any] = {"status": "in_progress", "summary": [], "content": [], "encrypted_content": None}
            found = self._added(_reasoning(call, "", self._echo) | empty)
            found += self._event("response.reasoning_summary_part.added", **summary, part=_summary_part(""))
            found += self._event("response.content_part.added", **content, part=_reasoning_part(""))
        self._thought.append(text)
        found += self._event("response.reasoning_summary_text.delta", **summary, delta=text)
        return found + self._event("response.reasoning_text.delta", **content, delta=text)

    def delta(self, text: str) -> bytes:
        """More text; the reasoning has ended."""
        call, found = self._opening.call, b""
        if self._open == "reasoning":
            found = self._ended(_reasoning(call, "".join(self._thought), self._echo))
        if self._open != "message":
            found += self._begun(_message(call, [], "in_progress"))
        at = self._at(f"msg_{call}", content_index=0)
        return found + self._event("response.output_text.delta", **at, delta=text, logprobs=[])

    def finish(self, reply: Reply, rest: Said) -> bytes:
        """The end: `rest` is what was not sent yet."""
        found = self.reasoning(rest.reasoning) if rest.reasoning else b""
        if rest.text:
            found += self.delta(rest.text)
        items = _items(reply, self._echo)
        for item in items[self._done :]:
            if item["type"] != self._open:
                found += self._begun(item)
            found += self._ended(item)
        final = _finished(reply, self._echo, self._opening.model, items)
        return found + self._event(f"response.{final['status']}", response=final)

    def failure(self, error: ProxyError) -> bytes:
        """The end of a stream that cannot be finished."""
        said = {"code": _code(error), "message": str(error)}
        return self._event("response.failed", response=self._response("failed", error=said))

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        opening = self._opening
        return response_object(opening.call, opening.created, opening.model, self._echo, status, [], **more)

    def _begun(self, item: dict[str, Any]) -> bytes:
        """The beginning of an item other than reasoning; of a call, with all its arguments."""
        key = item["id"]
        match item["type"]:
            case "message":
                found = self._added(item | {"status": "in_progress", "content": []})
                at = self._at(key, content_index=0)
                return found + self._event("response.content_part.added", **at, part=_text_part(""))
            case "function_call" | "custom_tool_call" as kind:
                field, name = _ARGUMENTS[kind]
                found = self._added(item | {"status": "in_progress", field: ""})
                return found + self._event(f"response.{name}.delta", **self._at(key), delta=item[field])
        return self._added(item | {"status": "in_progress"})

    def _ended(self, item: dict[str, Any]) -> bytes:
        """The end of the item that goes on."""
        key, found = item["id"], b""
        match item["type"]:
            case "message":
                (part,), at = item["content"], self._at(key, content_index=0)
                found += self._event("response.output_text.done", **at, text=part["text"], logprobs=[])
                found += self._event("response.content_part.done", **at, part=part)
            case "reasoning":
                (part,), at = item["summary"], self._at(key, summary_index=0)
                found += self._event("response.reasoning_summary_text.done", **at, text=part["text"])
                found += self._event("response.reasoning_summary_part.done", **at, part=part)
                (part,), at = item["content"], self._at(key, content_index=0)
                found += self._event("response.reasoning_text.done", **at, text=part["text"])
                found += self._event("response.content_part.done", **at, part=part)
            case "function_call" | "custom_tool_call" as kind:
                field, name = _ARGUMENTS[kind]
                more = {"name": item["name"]} if kind == "function_call" else {}
                found += self._event(f"response.{name}.done", **self._at(key), **{field: item[field]}, **more)
        found += self._event("response.output_item.done", output_index=self._done, item=item)
        self._open, self._done = "", self._done + 1
        return found

    def _added(self, item: dict[str, Any]) -> bytes:
        self._open = item["type"]
        return self._event("response.output_item.added", output_index=self._done, item=item)

    def _at(self, key: str, **index: int) -> dict[str, Any]:
        """Where in the output: item `key`, the one that goes on, and in it the summary or content of that index."""
        return {"item_id": key, "output_index": self._done, **index}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _code(error: ProxyError) -> str:
    """The code under which a stream fails; clients decide by it whether to ask again."""
    return "invalid_prompt" if isinstance(error, BadRequest) else "server_error"
