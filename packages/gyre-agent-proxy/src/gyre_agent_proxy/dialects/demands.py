"""What the requests of each dialect demand of an answer's form; the fields are kept in the record, too.

| Chat Completions      | Responses             | Messages                                |
| --------------------- | --------------------- | --------------------------------------- |
| `tool_choice`         | `tool_choice`         | `tool_choice`                           |
| `parallel_tool_calls` | `parallel_tool_calls` | `tool_choice.disable_parallel_tool_use` |
| `response_format`     | `text.format`         | `output_config.format`, `output_format` |

A value that is not understood is no error: the demand is ignored, counted and named in the record. So are
`logit_bias`, which would change what is sampled, and `logprobs`, which answers do not carry.
"""

from __future__ import annotations

from typing import Any

from gyre_agent_proxy.constraint import Demand
from gyre_agent_proxy.dialects.responses_tools import Offer, Tool

_NOT_SERVED = ("logprobs", "top_logprobs", "logit_bias")


def of_chat(data: dict[str, Any]) -> Demand:
    """Chat Completions."""
    calls, tool = "auto", None
    ignored = [name for name in _NOT_SERVED if data.get(name)]
    match data.get("tool_choice"):
        case None | "auto":
            pass
        case "none" | "required" as choice:
            calls = choice
        case {"type": "function", "function": {"name": str(name)}}:
            calls, tool = "required", name
        case _:
            ignored.append("tool_choice")
    return _demand(
        calls,
        tool,
        data.get("parallel_tool_calls") is not False,
        "response_format",
        data.get("response_format"),
        ignored,
    )


def of_responses(data: dict[str, Any], offer: Offer) -> Demand:
    """Responses; a tool has the name under which it was offered."""
    calls, tool = "auto", None
    ignored = [name for name in _NOT_SERVED if data.get(name)]
    match data.get("tool_choice"):
        case None | "auto":
            pass
        case "none" | "required" as choice:
            calls = choice
        case {"type": "function" | "custom" as kind, "name": str(name), **more}:
            space = more.get("namespace")
            calls, tool = "required", offer.shown(Tool(kind, name, space if isinstance(space, str) else None))
        case _:
            ignored.append("tool_choice")
    text = data.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    return _demand(calls, tool, data.get("parallel_tool_calls") is not False, "text.format", form, ignored)


def of_messages(data: dict[str, Any]) -> Demand:
    """Messages."""
    calls, tool, parallel = "auto", None, True
    ignored: list[str] = []
    match data.get("tool_choice"):
        case None:
            pass
        case {"type": "tool", "name": str(name), **more}:
            calls, tool, parallel = "required", name, more.get("disable_parallel_tool_use") is not True
        case {"type": "auto" | "any" | "none" as kind, **more}:
            calls, parallel = {"any": "required"}.get(kind, kind), more.get("disable_parallel_tool_use") is not True
        case _:
            ignored.append("tool_choice")
    config = data.get("output_config")
    form = (config.get("format") if isinstance(config, dict) else None) or data.get("output_format")
    return _demand(calls, tool, parallel, "output_config.format", form, ignored)


def _demand(calls: str, tool: str | None, parallel: bool, field: str, form: Any, ignored: list[str]) -> Demand:
    schema = _schema(form)
    if schema is None and form not in (None, {"type": "text"}):
        ignored = [*ignored, field]
    return Demand(calls=calls, tool=tool, parallel=parallel, schema=schema, ignored=tuple(ignored))


def _schema(form: Any) -> dict[str, Any] | None:
    """The JSON schema that a format asks for; None where it asks for none."""
    if not isinstance(form, dict):
        return None
    if form.get("type") == "json_object":
        return {"type": "object"}
    inner = form.get("json_schema")
    schema = (inner if isinstance(inner, dict) else form).get("schema")
    return schema if form.get("type") == "json_schema" and isinstance(schema, dict) else None
