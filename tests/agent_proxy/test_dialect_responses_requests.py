"""OpenAI Responses: what a request's items and tools become, and what is refused."""

from __future__ import annotations

import json

import pytest

from gyre_agent_proxy.conversation import Sampling, ToolCall
from gyre_agent_proxy.dialects import responses
from gyre_agent_proxy.dialects.base import Defaults
from gyre_agent_proxy.errors import BadRequest

ASK = [{"role": "user", "content": "hi"}]
BASH = {
    "type": "function",
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [BASH | {"name": "spawn"}]}
SEARCH = {"type": "web_search"}
SHELL = {"type": "local_shell"}
ASK = [{"role": "user", "content": "hi"}]


def read(asked=ASK, media="note", **body):
    return responses.read_request(json.dumps({"input": asked, **body}).encode(), Defaults(max_tokens=77, media=media))


def said(*items, **body):
    return read([*ASK, *items], **body).conversation.messages[1:]


REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
USE = {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'}
OUT = {"type": "function_call_output", "call_id": "c1", "output": "a b"}


def outline(*items, **body):
    """What the items become, in short."""
    found = []
    for m in said(*items, **body):
        calls = [f"{c.id}:{c.name}({c.arguments})" for c in m.calls]
        found.append((m.role, *([m.call_id] if m.call_id else []), m.reasoning or "", m.text, *calls))
    return found


def test_consecutive_items_are_one_assistant_turn():
    two = USE | {"call_id": "c2"}
    first = ("assistant", "hm", "I look.", 'c1:bash({"command": "ls"})', 'c2:bash({"command": "ls"})')
    assert outline(REASONING, TEXT, USE, two, OUT) == [first, ("tool", "c1", "", "a b")]
    assert outline(REASONING, TEXT, REASONING, USE) == [
        ("assistant", "hm", "I look."),
        ("assistant", "hm", "", 'c1:bash({"command": "ls"})'),
    ]
    assert outline(USE, TEXT) == [("assistant", "", "", 'c1:bash({"command": "ls"})'), ("assistant", "", "I look.")]
    assert outline(REASONING, REASONING) == [("assistant", "hm\n\nhm", "")]


def test_the_system_prompt_is_what_leads_and_later_rules_stay_in_place():
    rule = {"role": "developer", "content": [{"type": "input_text", "text": "rule"}]}
    messages = read(
        [rule, {"role": "system", "content": "more"}, *ASK, rule, TEXT, rule], instructions="be"
    ).conversation
    assert [(m.role, m.text) for m in messages.messages] == [
        ("system", "be\n\nrule\n\nmore"),
        ("user", "hi"),
        ("user", "<system-reminder>\nrule\n</system-reminder>"),
        ("assistant", "I look."),
        ("user", "<system-reminder>\nrule\n</system-reminder>"),
    ]
    assert read("hi", instructions=None).conversation == read(ASK).conversation


@pytest.mark.parametrize(
    "same",
    [
        [REASONING, TEXT, USE, OUT],
        [REASONING | {"id": "rs_1", "status": "completed", "encrypted_content": "x", "content": None}, TEXT, USE, OUT],
        [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": "I look."},
            USE | {"id": "fc_1", "status": "completed", "arguments": {"command": "ls"}},
            OUT
            | {"id": "fco_1", "output": [{"type": "input_text", "text": "a "}, {"type": "input_text", "text": "b"}]},
        ],
        [REASONING, TEXT | {"id": "m", "status": "completed", "phase": "commentary"}, USE, OUT | {"output": ["a b"]}],
        [REASONING, TEXT, {"type": "web_search_call", "id": "ws_1", "action": {}}, USE, OUT],
    ],
)
def test_equal_turns_in_other_words_are_equal(same):
    def canonical(messages):
        return [
            (m.role, m.text, m.reasoning, m.call_id, [(c.id, json.loads(c.arguments)) for c in m.calls])
            for m in messages
        ]

    assert canonical(said(*same)) == canonical(said(REASONING, TEXT, USE, OUT))


def test_calls_of_every_kind_have_the_name_the_model_knows():
    items = [
        USE | {"call_id": "c0", "name": "spawn", "namespace": "agents"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "+x"},
        {
            "type": "local_shell_call",
            "call_id": None,
            "id": "c2",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}, "user": None},
        },
        OUT | {"call_id": "c0"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "local_shell_call_output", "id": "c2", "output": "a"},
    ]
    expected = [
        (
            "assistant",
            "",
            "",
            'c0:agents__spawn({"command": "ls"})',
            'c1:apply_patch({"input":"+x"})',
            'c2:local_shell({"command":["ls"]})',
        ),
        ("tool", "c0", "", "a b"),
        ("tool", "c1", "", "ok"),
        ("tool", "c2", "", "a"),
    ]
    assert outline(*items, tools=[AGENTS, PATCH, SHELL]) == expected
    assert outline(*items) == expected, "also where they are not offered any more"


def offered(*tools):
    return [t["function"]["name"] for t in read(tools=list(tools)).conversation.tools]


def test_a_custom_tool_is_a_function_of_one_text():
    form = {"type": "custom", "name": "p"}
    for odd in (PATCH, form, form | {"format": {"type": "text"}}, form | {"format": "lark"}):
        (tool,) = read(tools=[odd]).conversation.tools
        assert tool["function"]["parameters"]["required"] == ["input"]
        assert ("start: LINE+" in tool["function"]["description"]) == (odd is PATCH)


def test_a_namespace_is_explained_once():
    tools = read(tools=[AGENTS | {"tools": [BASH, BASH | {"name": "b"}]}]).conversation.tools
    assert [t["function"]["description"] for t in tools] == ["agents: Helpers.\n\nRun a command.", "Run a command."]


def test_no_two_tools_have_one_name():
    plain = BASH | {"name": "agents__spawn"}
    assert offered(AGENTS, plain, BASH) == ["agents__spawn_2", "agents__spawn", "bash"]
    assert offered(BASH, BASH) == ["bash"], "the same tool twice is one"
    assert offered(BASH, PATCH | {"name": "bash"}) == ["bash", "bash_2"]
    other = {"type": "namespace", "name": "a", "tools": [BASH | {"name": "b__c"}]}
    assert offered(other, {"type": "namespace", "name": "a__b", "tools": [BASH | {"name": "c"}]}) == [
        "a__b__c",
        "a__b__c_2",
    ]
    request = read(tools=[AGENTS, plain])
    for name, namespace in (("agents__spawn_2", {"namespace": "agents"}), ("agents__spawn", {})):
        item = request.echo.offer.item(ToolCall(id="c", name=name, arguments="{}"), "k", "completed")
        assert {k: v for k, v in item.items() if k == "namespace"} == namespace
        assert item["name"] == ("spawn" if namespace else "agents__spawn")


def test_hosted_tools_and_items_are_left_out_counted_and_kept():
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    odd = {"type": "ghost_snapshot", "ghost_commit": {}}
    request = read([*ASK, searched, odd], tools=[BASH, SEARCH, {"type": "mcp", "server_label": "x"}])
    assert [m.role for m in request.conversation.messages] == ["user"]
    assert len(request.conversation.tools) == 1
    assert request.left_out == 4
    assert request.other["items_left_out"] == [searched, odd]
    assert [t["type"] for t in request.other["tools_left_out"]] == ["web_search", "mcp"]


def test_what_was_compacted_is_read_or_its_loss_is_told():
    plain = {"type": "compaction", "summary": [{"type": "summary_text", "text": "so far"}]}
    sealed = {"type": "compaction_summary", "encrypted_content": "x"}
    assert outline(plain, sealed) == [
        ("user", "", "so far"),
        ("user", "", "[earlier conversation omitted: it is encrypted]"),
    ]
    assert read([*ASK, plain, sealed]).left_out == 1


def test_images_and_files_become_counted_notes():
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    request = read(
        [{"role": "user", "content": [image, {"type": "input_file", "file_id": "f"}]}, USE, OUT | {"output": [image]}]
    )
    assert request.omitted == 3
    with pytest.raises(BadRequest, match="reads text only"):
        read([{"role": "user", "content": [image]}], media="refuse")


def test_digests_ignore_the_stream_mode_only():
    assert read().digest == read(stream=True, stream_options={"include_obfuscation": False}).digest
    assert read().digest != read(temperature=0.5).digest
    assert read().sampling.max_tokens == 77
    assert read(max_output_tokens=5, temperature=0, top_p=0.5).sampling == Sampling(
        max_tokens=5, temperature=0, top_p=0.5
    )


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"input": None}, "input: expected"),
        ({"input": []}, "input: expected"),
        ({"input": ""}, "input: expected"),
        ({"input": 5}, "input"),
        ({"input": [5]}, r"input\[0\]"),
        ({"input": [{"role": "system", "content": "x"}]}, "not the system's"),
        ({"input": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"input": [{"role": "user", "content": 5}]}, r"input\[0\].content"),
        ({"input": [{"type": 5}]}, r"input\[0\].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "nothing is stored"),
        ({"input": [{"id": "msg_1"}]}, "nothing is stored"),
        ({"input": [{"type": "compaction_trigger"}]}, "compaction by the server"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": ""}]}, "name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "output"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 5}]}, "input"),
        ({"input": [{"type": "local_shell_call", "call_id": "c", "action": "ls"}]}, "action"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "summary"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored"),
        ({"conversation": {"id": "conv_1"}}, "conversation: nothing is stored"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: nothing is stored"),
        ({"background": True}, "background"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"tools": "bash"}, "tools"),
        ({"tools": [{}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, r"tools\[0\].name"),
        ({"tools": [BASH | {"parameters": []}]}, r"tools\[0\].parameters"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [5]}]}, r"tools\[0\].tools"),
        ({"tools": [AGENTS | {"tools": [{"type": "custom"}]}]}, r"tools\[0\].tools\[0\].name"),
    ],
)
def test_wrong_requests_name_what_is_wrong(body, complaint):
    with pytest.raises(BadRequest, match=complaint):
        responses.read_request(json.dumps({"input": ASK} | body).encode(), Defaults())


@pytest.mark.parametrize(
    "field", ["previous_response_id", "conversation", "prompt", "background", "instructions", "tools"]
)
def test_null_is_absent(field):
    assert read(**{field: None}).conversation == read().conversation


def test_a_result_may_be_an_object():
    *_, result = said(USE, OUT | {"output": {"content": "x", "success": True}})
    assert result.text == '{"content":"x","success":true}'
