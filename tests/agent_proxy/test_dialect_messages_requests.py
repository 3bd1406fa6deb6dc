"""Anthropic Messages requests: what says the same is the same, and what is wrong is named."""

from __future__ import annotations

import json

import pytest

from gyre_agent_proxy.conversation import Message, Sampling
from gyre_agent_proxy.dialects import messages
from gyre_agent_proxy.dialects.base import Defaults
from gyre_agent_proxy.errors import BadRequest

BASH = {
    "name": "bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
USER = {"role": "user", "content": "hi"}


def read(media="note", **body):
    raw = json.dumps({"messages": [USER], **body}).encode()
    return messages.read_request(raw, Defaults(max_tokens=77, media=media))


def turns(*raw, **body):
    return read(messages=list(raw), **body).conversation.messages


def use(call="c1", name="bash", **given):
    return {"type": "tool_use", "id": call, "name": name, "input": given}


def result(call="c1", *content, **more):
    return {"type": "tool_result", "tool_use_id": call, "content": list(content), **more}


def text(value, **more):
    return {"type": "text", "text": value, **more}


def said(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([USER], [user(text("hi", cache_control={"type": "ephemeral"}, citations=None))]),
        ([USER, said()], [USER, {"role": "assistant", "content": None}]),
        ([USER, said(text("x"))], [USER, {"role": "assistant", "content": "x"}]),
        ([user(text("a"), text("b"))], [user(text("a")), {"role": "user", "content": "b"}]),
        ([USER, said(text("x"), use(a=1))], [USER, said(text("x")), said(use(a=1))]),
        ([USER, said(use(a=1), use("c2"))], [USER, said(use(a=1)), said(use("c2"))]),
        (
            [USER, said(use("c1"), use("c2")), user(result("c1", text("1")), result("c2", text("2")), text("x"))],
            [USER, said(use("c1"), use("c2")), user(result("c2", text("2"))), user(text("x"), result("c1", "1"))],
        ),
        ([USER, said(use()), user(result("c1"))], [USER, said(use()), user(result() | {"content": ""})]),
        (
            [USER, {"role": "system", "content": "rule"}],
            [user(text("hi")), {"role": "system", "content": [text("rule")]}],
        ),
    ],
)
def test_contents_that_say_the_same_are_the_same(one, other):
    assert turns(*one) == turns(*other)
    assert read(messages=one).digest == read(messages=other).digest


def test_the_system_prompt():
    header = text("x-anthropic-billing-header: cc_version=1;")
    for system in ("a\nb", [text("a"), text("b")], [header, text("a"), text("b", cache_control={})]):
        assert turns(USER, system=system)[0] == Message(role="system", text="a\nb")
    assert read(system=[header]).other["billing_header"] == header["text"]
    assert [m.role for m in turns(USER, system=[header])] == ["user"]
    assert turns(USER, system="x-anthropic-billing-header: v;\nrest")[0].text == "rest"
    assert turns({"role": "system", "content": "b"}, USER, system="a")[0].text == "a\nb"


def test_a_later_system_message_stays_in_place():
    system = {"role": "system", "content": "rule"}
    got = turns(USER, system, said(use()), user(result("c1", text("out"))), system, said(text("x")), USER)
    reminder = "<system-reminder>\nrule\n</system-reminder>"
    assert [(m.role, m.text) for m in got] == [
        ("user", f"hi\n{reminder}"),
        ("assistant", ""),
        ("tool", "out"),
        ("user", reminder),
        ("assistant", "x"),
        ("user", "hi"),
    ]


def test_tools_in_the_form_templates_expect():
    request = read(tools=[BASH | {"cache_control": {}, "type": "custom", "defer_loading": True}, {"name": "f"}])
    assert request.conversation.tools == (
        {
            "type": "function",
            "function": {
                "name": "bash",
                "description": "Runs a command.",
                "parameters": BASH["input_schema"],
            },
        },
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
    )


def test_results_know_their_tool_and_odd_parts_become_notes():
    reference = {"type": "tool_reference", "tool_name": "bash"}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [text("found")]}
    document = {"type": "document", "source": {"type": "base64", "data": "AA"}}
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "read me"}}
    blocks = {"type": "document", "source": {"type": "content", "content": [text("and me")]}}
    inner = (text("a\n"), found, reference, document, plain, blocks)
    request = read(messages=[USER, said(use(name="look")), user(result("c1", *inner))])
    got = request.conversation.messages[-1]
    assert (got.name, got.call_id) == ("look", "c1")
    assert got.text == "a\nfound\n[tool 'bash']\n[file omitted: this model reads text only]\nread me\nand me"
    assert request.omitted == 1
    foreign = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    sealed = {"type": "redacted_thinking", "data": "x"}
    request = read(messages=[USER, said(sealed, foreign, text(" b")), USER])
    got = request.conversation.messages[1]
    assert got.reasoning is None
    assert got.text == "[server_tool_use omitted: this model reads text only] b"


def test_the_last_words_of_the_user_are_what_roles_are_told_by():
    asks = [
        [user(text("first"), text("CRITICAL: x"))],
        [user(text("CRITICAL: x"), text("<system-reminder>\nr\n</system-reminder>"))],
        [user(text("CRITICAL: x")), {"role": "system", "content": "rule"}],
        [user(text("CRITICAL: x")), said(use()), user(result("c1", text("denied")))],
    ]
    for raw in asks:
        assert read(messages=raw).conversation.asks == "CRITICAL: x"


def test_limits_and_defaults():
    assert read().sampling == Sampling(max_tokens=77)
    assert read(top_p=0).sampling.top_p > 0
    assert read(stop_sequences=["a", ""]).sampling.stop == ("a",)
    same = {"metadata": {"user_id": "x"}, "stream": True, "cache_control": {}, "service_tier": "auto"}
    assert read(**same).digest == read().digest
    for other in ({"temperature": 0.5}, {"model": "x"}, {"thinking": {"type": "disabled"}}, {"tools": [BASH]}):
        assert read(**other).digest != read().digest


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"messages": None}, "at least one message"),
        ({"messages": "x"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "expected user, assistant or system, got 'tool'"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [user(5)]}, "a block with a type"),
        ({"messages": [user({"type": 5})]}, "a block with a type"),
        ({"messages": [user({"type": "text"})]}, "a text part"),
        ({"messages": [user(use())]}, "its role is assistant"),
        ({"messages": [user({"type": "tool_result"})]}, "tool_use_id"),
        ({"messages": [said(result())]}, "belongs into a user message"),
        ({"messages": [said({"type": "tool_use", "name": "x", "input": {}})]}, "id: expected a string"),
        ({"messages": [said({"type": "thinking"})]}, "thinking: expected a string"),
        ({"system": 5}, "system"),
        ({"system": [5]}, "system"),
        ({"tools": [{"description": "x"}]}, r"tools\[0\]"),
        ({"tools": [BASH | {"input_schema": 5}]}, r"tools\[0\]"),
        ({"tools": ["bash"]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 10**30}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"messages": [user({"type": "image", "source": {}})]}, "reads text only"),
    ],
)
def test_wrong_requests_name_what_is_wrong(body, complaint):
    with pytest.raises(BadRequest, match=complaint):
        read("refuse", **body)


def test_half_a_character_is_no_reason_to_refuse():
    raw = b'{"messages": [{"role": "user", "content": ["cut \\ud83d", "\\\\ud83d\\ud83d\\ude00"]}]}'
    (message,) = messages.read_request(raw, Defaults()).conversation.messages
    assert message.text == "cut \ufffd\n\\ud83d\U0001f600"


def test_thinking_that_was_emptied_is_none():
    _, turn = turns(USER, said({"type": "thinking", "thinking": None, "signature": "s"}, text("a")))
    assert (turn.text, turn.reasoning) == ("a", None)
