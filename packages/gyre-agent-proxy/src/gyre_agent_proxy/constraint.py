"""What a request demands of its answer's form, as a constraint under which the engine samples.

    tool_choice "required", or a tool     the answer is calls: of any tool, or of that one
    tool_choice "none"                    tools stay in the prompt; what is written as a call stays text (no constraint)
    a JSON schema                         the answer is JSON that fits it, or calls where tools may be called
Reasoning may come before it. What cannot be enforced (calls in a format that only the model's renderer knows, a tool
that is not offered) is ignored, counted and named in the record; the answer is then what the model makes of it.

An engine cannot take up such an answer in its middle, so a call that has to move begins again; log-probabilities are
those of the constrained distribution.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

_NEW_LINES = {"type": "regex", "pattern": "\\n*"}


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What one request demands; `ignored` names the fields of it that are not followed."""

    calls: str = "auto"  # auto | none | required
    tool: str | None = None  # with "required": this one, by the name the model knows
    parallel: bool = True  # more than one call an answer
    schema: dict[str, Any] | None = None
    ignored: tuple[str, ...] = ()


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling`: what is added to the engine's sampling parameters."""

    sampling: dict[str, str] = {}
    ignored: tuple[str, ...] = ()


def constrain(demand: Demand, tools: set[str], *, plain: bool, opened: bool, thinks: bool) -> Constraint:
    """The constraint for an answer.

    tools: names of those offered. plain: calls are written as `gyre_agent_proxy.unfolding` reads them. opened: the
    prompt has begun the reasoning. thinks: the model may begin one.
    """
    ignored = list(demand.ignored)
    forms: list[dict[str, Any]] = []
    named = tools if demand.tool is None else tools & {demand.tool}
    callable_ = bool(tools) and demand.calls != "none"
    if demand.calls == "required":
        if plain and named:
            forms = [_calls(named, demand.parallel)]
        else:
            ignored.append("tool_choice")
    if demand.schema is not None and not forms:
        if plain or (thinks and not callable_):  # other formats wrap even text in markup of their own
            forms = [{"type": "json_schema", "json_schema": demand.schema}]
            forms += [_calls(tools, demand.parallel)] if callable_ else []
        else:
            ignored.append("response format")
    elif not demand.parallel and callable_ and not forms:
        ignored.append("parallel calls")
    if not forms:
        return Constraint(ignored=tuple(ignored))
    if demand.schema is not None and len(forms) == 1 and not (opened or thinks) and forms[0]["type"] == "json_schema":
        return Constraint(sampling={"json_schema": json.dumps(demand.schema)}, ignored=tuple(ignored))
    form = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
    if opened or thinks:
        begin = "" if opened else "<think>"
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": "</think>"}
        after = {"type": "sequence", "elements": [thought, _NEW_LINES, form]}
        form = after if opened else {"type": "or", "elements": [form, after]}
    tag = json.dumps({"type": "structural_tag", "format": form})
    return Constraint(sampling={"structural_tag": tag}, ignored=tuple(ignored))


def _calls(names: set[str], parallel: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "separator": "\n",
        "tags": [
            {
                "type": "tag",
                "begin": f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                "end": "}\n</tool_call>",
            }
            for name in sorted(names)
        ],
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
