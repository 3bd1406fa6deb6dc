"""Chat Completions as clients of many kinds write them."""

from __future__ import annotations

import json

import pytest

from gyre_agent_proxy.dialects import chat
from gyre_agent_proxy.dialects.base import Defaults
from gyre_agent_proxy.errors import BadRequest

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def read(*messages, media="note", **fields):
    return chat.read_request(json.dumps({"messages": list(messages), **fields}).encode(), Defaults(media=media))


def user(content):
    return {"role": "user", "content": content}


def test_thinking_among_the_parts_is_reasoning():
    parts = [
        {"type": "thinking", "thinking": "one", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "text": "two"},
        {"type": "text", "text": "said"},
    ]
    (turn,) = read({"role": "assistant", "content": parts}).conversation.messages
    assert (turn.text, turn.reasoning) == ("said", "one\ntwo")
    named = {"role": "assistant", "content": parts, "reasoning_content": "named"}
    assert read(named).conversation.messages[0].reasoning == "named"


def test_parts_of_a_type_that_is_not_known_are_no_reason_to_refuse():
    request = read(user([{"type": "newer", "text": "a"}, {"type": "opaque", "data": 1}, {"text": "b"}]))
    assert request.conversation.messages[0].text == "a[opaque omitted: this model reads text only]b"
    assert request.omitted == 1
    with pytest.raises(BadRequest, match="reads text only"):
        read(user([{"type": "opaque"}]), media="refuse")


def test_tools_that_are_no_functions_are_left_out_counted_and_kept():
    custom = {"type": "custom", "custom": {"name": "patch"}}
    request = read(user("x"), tools=[BASH | {"cache_control": {"type": "ephemeral"}}, custom])
    assert request.conversation.tools == (BASH,), "a mark for the cache is not part of the prefix"
    assert request.left_out == 1
    assert request.other["tools_left_out"] == [custom]


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([user("x")], {"functions": [{"name": "f"}]}),
        ([user("x")], {"function_call": {"name": "f"}}),
        ([user("x"), {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}], {}),
    ],
)
def test_the_predecessors_of_tools_are_refused_with_the_remedy(messages, fields):
    with pytest.raises(BadRequest, match="superseded in this API; send tool"):
        read(*messages, **fields)
    read(user("x"), functions=[], function_call="none")


def test_a_share_of_nothing_is_the_smallest_one():
    assert 0 < read(user("x"), top_p=0).sampling.top_p < 1e-3


@pytest.mark.parametrize("key", [None, [], {}])
def test_a_call_without_an_id_is_refused(key):
    call = {"id": key, "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    with pytest.raises(BadRequest, match="tool_calls: expected"):
        read(user("x"), {"role": "assistant", "tool_calls": [call]})
