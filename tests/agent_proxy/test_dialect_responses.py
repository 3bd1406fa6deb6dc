"""OpenAI Responses through the proxy: what Codex sent, and the openai client over scripted engines."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import Field, TypeAdapter

from gyre_agent_proxy.conversation import Reply, Sampling, ToolCall
from gyre_agent_proxy.dialects import responses
from gyre_agent_proxy.dialects.base import Defaults, Opening
from gyre_agent_proxy.errors import BadRequest
from gyre_agent_proxy.history import History
from gyre_agent_proxy.roles import Roles
from gyre_agent_proxy.template import CHATML
from gyre_traj.log import read_log

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures" / "codex"
EVENT = TypeAdapter(Annotated[get_args(ResponseStreamEvent)[0], Field(discriminator="type")])

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


def client(proxy):
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0, timeout=30)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read(asked=ASK, media="note", **body):
    return responses.read_request(json.dumps({"input": asked, **body}).encode(), Defaults(max_tokens=77, media=media))


def said(*items, **body):
    return read([*ASK, *items], **body).conversation.messages[1:]


def known(value):
    """An object without what is newer than the client library: namespaces among the tools."""
    if isinstance(value.get("response"), dict):
        return value | {"response": known(value["response"])}
    if "tools" in value:
        return value | {"tools": [t for t in value["tools"] if t["type"] != "namespace"]}
    return value


async def events_of(http, proxy, path="/v1/responses", **body):
    """The events of one stream, each valid by the client library's types, in an order that adds up."""
    body = {"model": "m", "input": ASK, "stream": True} | body
    async with http.post(f"{proxy.url}{path}", json=body, headers={"Authorization": "Bearer k"}) as response:
        assert response.status == 200, await response.text()
        raw = await response.text()
    events = []
    for block in raw.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        if events[-1]["type"] != "keepalive":
            EVENT.validate_python(known(events[-1]))
    check(events)
    return events


def check(events):
    """One identity an item, deltas that make up what is done, numbers that rise by one."""
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    events = [e for e in events if e["type"] != "keepalive"]
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{final['status']}"
    for e in events[:2]:
        assert (e["response"]["id"], e["response"]["status"], e["response"]["output"]) == (
            final["id"],
            "in_progress",
            [],
        )
    done, open_item, deltas = [], None, {}
    for e in events[2:-1]:
        kind = e["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            assert (e["output_index"], e["item"]["status"]) == (len(done), "in_progress")
            open_item, deltas = e["item"], {}
        elif kind == "output_item.done":
            assert (e["output_index"], e["item"]["id"], e["item"]["type"]) == (
                len(done),
                open_item["id"],
                open_item["type"],
            )
            done.append(e["item"])
            open_item = None
        else:
            assert (e["item_id"], e["output_index"]) == (open_item["id"], len(done))
            what, _, end = kind.rpartition(".")
            if end == "delta":
                deltas[what] = deltas.get(what, "") + e["delta"]
            elif end == "done" and what in deltas:
                assert deltas[what] == next(e[f] for f in ("text", "arguments", "input") if f in e)
    if final["status"] != "failed":
        assert open_item is None
        assert done == final["output"]


async def ask(api, http, proxy, *, stream, **body):
    """The response object, whole or from the end of a stream: with the same brain they are equal."""
    if stream:
        return (await events_of(http, proxy, **body))[-1]["response"]
    async with http.post(
        f"{proxy.url}/v1/responses", json={"model": "m", "input": ASK, **body}, headers={"Authorization": "Bearer k"}
    ) as response:
        assert response.status == 200, await response.text()
        return json.loads(await response.text())


def shape(item):
    """An output item without what differs from call to call."""
    return {k: v for k, v in item.items() if k not in ("id", "call_id", "encrypted_content")}


# --- Codex ---------------------------------------------------------------------------------------------------------

# (of each call the call it continues, roles)
M, A = "main", "sub-agent"
EXPECTED = {
    # one tool call, then the answer
    "basic": ([None, 0], [M, M]),
    # the same, with reasoning that comes back without its status
    "think": ([None, 0], [M, M]),
    # the second answer hits the token limit: Codex gives up
    "trunc": ([None, 0], [M, M]),
    # the first stream was cut: the second request is the first again, and joins its call
    "cut": ([None, 0], [M, M]),
    # `codex exec resume`: another user turn on the finished conversation
    "resume": ([None, 0, 1], [M, M, M]),
    # main spawns an agent and waits; the agent's calls, with fewer tools, are a root of their own; main goes on
    "sub": ([None, 0, None, 2, 1], [M, M, A, A, M]),
}


@pytest.mark.parametrize("name", EXPECTED)
async def test_what_codex_sent(bench, http, replay, name):
    done = await replay(bench, http, json.loads((CAPTURES / f"{name}.json").read_text()))
    assert (done.parents, done.roles) == EXPECTED[name]
    assert (done.counts["forks"], done.counts["foreign_turns"], done.counts["unknown_roles"]) == (0, 0, 0)
    assert done.counts["left_out"] == len(done.log.calls), "web_search, in every call"
    assert all(c.request["tools_left_out"] == [SEARCH] for c in done.log.calls)


def test_every_capture_is_counted():
    assert {p.stem for p in CAPTURES.glob("*.json")} == set(EXPECTED)


async def test_codex_compacts_and_goes_on_from_the_summary(bench, http):
    """As Codex does it by itself: the history and a question without tools, then a new history around the answer."""
    await bench.engine()
    bench.brain.says("I look.\n" + call("bash", command="ls"), "done", "SUMMARY: all done", "going on")
    system = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": t}]} for t in "ab"]
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "task"}]}
    metadata = {"x-codex-turn-metadata": '{"request_kind": "turn", "thread_source": "user"}'}
    compact = {"x-codex-turn-metadata": '{"request_kind": "compaction", "thread_source": "user"}'}

    async def send(headers, tools, *items):
        body = {"model": "m", "input": [*system, *items], "tools": tools, "stream": True}
        headers = headers | {"Authorization": "Bearer k"}
        async with http.post(f"{proxy.url}/v1/responses", json=body, headers=headers) as response:
            return json.loads((await response.text()).strip().splitlines()[-1][6:])["response"]["output"]

    async with bench.proxy() as proxy:
        first = await send(metadata, [BASH, SEARCH], user)
        history = [user, *first, {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "a b"}]
        history += await send(metadata, [BASH, SEARCH], *history)
        ask = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Summarise."}]}
        (summary,) = await send(compact, [], *history, ask)
        said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "So far: "}]}
        said["content"][0]["text"] += summary["content"][0]["text"]
        await send(metadata, [BASH, SEARCH], user, said)
        counts = dict(proxy.service.metrics.counts)
    (path,) = bench.calls.glob("*.gtraj")
    calls = read_log(path).calls
    assert [c.parent for c in calls] == [None, calls[0].call, None, None]
    assert [c.role for c in calls] == [M, M, "main-summary", M]
    assert (counts["foreign_turns"], counts["spliced_turns"], counts["forks"]) == (0, 2, 0)


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("turn", "tools", "items"),
    [
        ("Hello <b>world</b>\nüñ", [], [("message", "Hello <b>world</b>\nüñ")]),
        ("", [], [("message", "")]),
        ("<think>\nhm\n</think>\n\nyes", [], [("reasoning", "hm"), ("message", "yes")]),
        (
            "<think>\nhm\n</think>\n\nI look.\n" + call("bash", command="ls") + call("bash", command="pwd"),
            [BASH],
            [
                ("reasoning", "hm"),
                ("message", "I look."),
                ("function_call", {"name": "bash", "arguments": '{"command": "ls"}'}),
                ("function_call", {"name": "bash", "arguments": '{"command": "pwd"}'}),
            ],
        ),
        (
            call("agents__spawn", command="ls"),
            [BASH, AGENTS],
            [("function_call", {"name": "spawn", "namespace": "agents", "arguments": '{"command": "ls"}'})],
        ),
        (
            call("apply_patch", input="*** Begin\n+x"),
            [PATCH],
            [("custom_tool_call", {"name": "apply_patch", "input": "*** Begin\n+x"})],
        ),
        # what is not the one argument goes out as it is
        (
            call("apply_patch", patch="x"),
            [PATCH],
            [("custom_tool_call", {"name": "apply_patch", "input": '{"patch": "x"}'})],
        ),
        (
            '<tool_call>{"name": "apply_patch", "arguments": "*** Begin"}</tool_call>',
            [PATCH],
            [("custom_tool_call", {"name": "apply_patch", "input": "*** Begin"})],
        ),
        (
            call("local_shell", command=["ls"], timeout_ms=5),
            [SHELL],
            [("local_shell_call", {"action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5}})],
        ),
        (
            call("local_shell", command="ls"),
            [SHELL],
            [("function_call", {"name": "local_shell", "arguments": '{"command": "ls"}'})],
        ),
        # a tool that is not there: the harness says so
        (call("none", a=1), [BASH], [("function_call", {"name": "none", "arguments": '{"a": 1}'})]),
    ],
)
async def test_answers(bench, http, turn, tools, items, stream):
    await bench.engine()
    bench.brain.says(turn)
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, http, proxy, stream=stream, tools=tools)
    expected = []
    for kind, what in items:
        item = {"type": kind, "status": "completed"}
        if kind == "message":
            part = {"type": "output_text", "text": what, "annotations": [], "logprobs": []}
            expected.append(item | {"role": "assistant", "content": [part]})
        elif kind == "reasoning":
            summary, content = ([{"type": f"{t}_text", "text": what}] for t in ("summary", "reasoning"))
            expected.append(item | {"summary": summary, "content": content})
        else:
            expected.append(item | what)
    assert [shape(i) for i in got["output"]] == expected
    assert len({i["id"] for i in got["output"]}) == len(expected)
    assert (got["status"], got["incomplete_details"], got["error"]) == ("completed", None, None)
    usage = got["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    reasoning = usage["output_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < usage["output_tokens"] if items[0][0] == "reasoning" else reasoning == 0
    assert Response.model_validate(known(got), strict=True).id.startswith("resp_")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turn", ["one two three four five six", "<think>\none two three four five six"])
async def test_an_answer_that_was_cut_is_incomplete(bench, http, turn, stream):
    await bench.engine()
    bench.brain.says(turn)
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, http, proxy, stream=stream, max_output_tokens=8)
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [i["status"] for i in got["output"]] == ["incomplete"]
    assert (got["usage"]["output_tokens"], got["max_output_tokens"]) == (8, 8)
    Response.model_validate(got, strict=True)


async def test_the_client_library_reads_streams(bench):
    await bench.engine()
    turn = "<think>\nhm\n</think>\n\nI look.\n" + call("bash", command="ls") + call("apply_patch", input="+x")
    bench.brain.says(turn, "the text comes piece by piece", turn)
    async with bench.proxy() as proxy, client(proxy) as api:
        kinds, created = [], await api.responses.create(model="m", input="hi", tools=[BASH, PATCH], stream=True)
        async for e in created:
            kinds.append(e.type)
            if e.type == "response.completed":
                final = e.response
        assert {
            "response.created",
            "response.in_progress",
            "response.reasoning_summary_text.delta",
            "response.reasoning_text.delta",
            "response.output_text.delta",
            "response.function_call_arguments.done",
            "response.custom_tool_call_input.done",
            "response.completed",
        } <= set(kinds)
        assert final.output_text == "I look."
        assert [type(i).__name__ for i in final.output[2:]] == ["ResponseFunctionToolCall", "ResponseCustomToolCall"]
        async with api.responses.stream(model="m", input="hi again") as helper:
            deltas = [e.delta async for e in helper if e.type == "response.output_text.delta"]
            assert "".join(deltas) == (await helper.get_final_response()).output_text
            assert len(deltas) > 1, "it was streamed"
        whole = await api.responses.create(model="m", input="hi", tools=[BASH, PATCH])
        assert [shape(i.model_dump()) for i in whole.output] == [shape(i.model_dump()) for i in final.output]


async def test_the_response_repeats_what_was_asked(bench, http):
    await bench.engine()
    asked = {
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "reasoning": {"effort": "high", "summary": "auto"},
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": {"type": "function", "name": "bash"},
        "top_p": 0.9,
        "user": "u",
        "max_tool_calls": 3,
    }
    silent = {"store": True, "include": ["reasoning.encrypted_content"], "truncation": "auto", "client_metadata": {}}
    tools = [BASH, PATCH, SEARCH, SHELL]
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, http, proxy, stream=False, tools=tools, **asked, **silent)
    assert {k: got[k] for k in asked} == asked
    assert got["tools"] == tools
    assert (got["store"], got["truncation"], got["background"]) == (False, "disabled", False)
    assert (got["previous_response_id"], got["service_tier"]) == (None, "default")
    Response.model_validate(got, strict=True)
    (path,) = bench.calls.glob("*.gtraj")
    (recorded,) = read_log(path).calls
    assert {k: recorded.request[k] for k in silent} == silent
    assert recorded.request["tools_left_out"] == [SEARCH]
    assert not {"tools", "input", "instructions"} & set(recorded.request), "the prompt has them"


@pytest.mark.parametrize(
    "odd", [{"metadata": {"a": 1}}, {"reasoning": "high"}, {"text": {"format": None}}, {"tool_choice": 5}, {"user": []}]
)
async def test_what_changes_nothing_is_never_an_error(bench, http, odd):
    await bench.engine()
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, http, proxy, stream=True, unknown={"x": 1}, **odd)
    Response.model_validate(got, strict=True)


async def test_encrypted_reasoning_is_there_for_those_who_ask(bench, http):
    await bench.engine()
    bench.brain.says(*["<think>\nhm\n</think>\n\nyes"] * 2)
    async with bench.proxy() as proxy, client(proxy) as api:
        for include, kind in ((["reasoning.encrypted_content"], str), ([], type(None))):
            got = await ask(api, http, proxy, stream=True, include=include)
            assert isinstance(got["output"][0]["encrypted_content"], kind)


# --- while a stream waits, and when it fails -----------------------------------------------------------------------


async def test_a_stream_that_waits_sends_events_that_count(bench, http):
    """Codex's idle timeout does not see comments."""
    engine = await bench.engine()
    bench.brain.says("one two three")
    engine.hold = 2
    async with bench.proxy(keepalive=0.05) as proxy:
        streaming = asyncio.create_task(events_of(http, proxy))
        await engine.held.wait()
        async with client(proxy) as api:
            joined = await api.responses.create(model="m", input=ASK, stream=True)
            kinds = []
            async for e in joined:
                kinds.append(e.type)
                if kinds.count("keepalive") == 3:
                    engine.release()
        events = await streaming
    assert [e["type"] for e in events].count("keepalive") >= 1
    assert kinds[-1] == "response.completed", "the client library passes them by"


async def test_both_connections_of_one_call_get_the_same_items(bench, http):
    engine = await bench.engine()
    bench.brain.says("<think>\nhm\n</think>\n\nI look.\n" + call("bash", command="ls"))
    engine.hold = 2
    async with bench.proxy() as proxy, client(proxy) as api:
        one = asyncio.create_task(ask(api, http, proxy, stream=True, tools=[BASH]))
        await engine.held.wait()
        two = asyncio.create_task(ask(api, http, proxy, stream=False, tools=[BASH]))
        while not proxy.service.metrics.counts["duplicates"]:
            await asyncio.sleep(0.01)
        engine.release()
        assert (await one) == (await two)


async def test_a_stream_that_cannot_be_finished_says_why(bench, http):
    engine = await bench.engine()
    engine.hold = 2
    async with bench.proxy(attempts=1) as proxy:
        streaming = asyncio.create_task(events_of(http, proxy))
        await engine.held.wait()
        await engine.die()
        *_, last = await streaming
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "failed this call" in last["response"]["error"]["message"]
    Response.model_validate(last["response"], strict=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_errors(bench, http, stream):
    engine = await bench.engine()
    engine.hold = 1
    async with bench.proxy(queue=1, context=120) as proxy, client(proxy) as api:

        async def create(**body):
            return await api.responses.create(**{"model": "m", "input": "hi", "stream": stream} | body)

        with pytest.raises(openai.BadRequestError, match="nothing is stored") as wrong:
            await create(previous_response_id="resp_1")
        assert (wrong.value.param, wrong.value.type) == ("previous_response_id", "invalid_request_error")
        running = asyncio.create_task(create())
        await engine.held.wait()
        with pytest.raises(openai.RateLimitError) as busy:
            await create(input="other")
        assert busy.value.response.headers["Retry-After"] == "1"
        engine.release()
        answer = await running
        if stream:
            async for _ in answer:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_has_its_own_code(bench, stream):
    """Codex, while it compacts, leaves out the oldest items until this code comes no more."""
    engine = await bench.engine()
    async with bench.proxy(context=40) as proxy, client(proxy) as api:
        with pytest.raises(openai.BadRequestError) as wrong:
            await api.responses.create(model="m", input="x" * 500, stream=stream)
        assert wrong.value.code == "context_length_exceeded"
        assert proxy.service.metrics.counts["calls_refused"] == 1
    assert not engine.requests


# --- requests ------------------------------------------------------------------------------------------------------

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
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]}, "output"),
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
        ({"top_p": 0}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"tools": "bash"}, "tools"),
        ({"tools": [{}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, r"tools\[0\].name"),
        ({"tools": [BASH | {"parameters": []}]}, r"tools\[0\].parameters"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [5]}]}, r"tools\[0\].tools"),
        ({"tools": [AGENTS | {"tools": [{"type": "custom"}]}]}, r"tools\[0\].tools\[0\].name"),
        ({"tools": [PATCH | {"format": "lark"}]}, r"tools\[0\].format"),
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


# --- history -------------------------------------------------------------------------------------------------------


def as_sent(item):
    return item


def as_little_as_needed(item):
    """What a harness must keep of an item, and nothing else."""
    match item["type"]:
        case "message":
            return {"role": "assistant", "content": item["content"][0]["text"]}
        case "reasoning":
            return {"type": "reasoning", "summary": item["summary"]}
        case "function_call":
            arguments = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
            return {k: item[k] for k in ("type", "call_id", "name", "namespace") if k in item} | {
                "arguments": arguments
            }
    return {k: v for k, v in item.items() if k not in ("id", "status")}


def without_content(item):
    return {k: v for k, v in item.items() if k not in ("status", "content" if item["type"] == "reasoning" else "")}


def with_more(item):
    more = {"id": None, "status": None, "created_by": "x"}
    if item["type"] == "message":
        more["content"] = [p | {"annotations": [{"type": "url_citation"}], "logprobs": None} for p in item["content"]]
    return item | more


@pytest.mark.parametrize("form", [as_sent, as_little_as_needed, without_content, with_more])
async def test_a_conversation_in_any_serialisation_is_one_path(bench, http, form):
    await bench.engine()
    turns = [
        "<think>\nhm\n</think>\n\nI look.\n" + call("bash", command="ls", n=1.0) + call("agents__spawn", command="pwd"),
        "<think>\nwell\n</think>\n\n" + call("apply_patch", input="*** Begin\n+ünï\n"),
        call("local_shell", command=["ls", "-l"]),
        "  done\n",
        "more",
    ]
    bench.brain.says(*turns)
    tools = [BASH, AGENTS, PATCH, SHELL, SEARCH]
    async with bench.proxy() as proxy, client(proxy) as api:
        items = list(ASK)
        for turn in range(5):
            output = (await ask(api, http, proxy, stream=bool(turn % 2), input=items, tools=tools))["output"]
            items += [form(i) for i in output]
            for item in output:
                if "call_id" in item:
                    kind = item["type"] + "_output"
                    items.append({"type": kind, "call_id": item["call_id"], "output": f"out {turn}"})
            if turn >= 3:
                items.append({"role": "user", "content": "go on"})
        counts = proxy.service.metrics.counts
        assert (counts["roots"], counts["forks"], counts["foreign_turns"], counts["spliced_turns"]) == (1, 0, 0, 0)
    (path,) = bench.calls.glob("*.gtraj")
    calls = read_log(path).calls
    assert [c.parent for c in calls] == [None, *(c.call for c in calls[:-1])]


async def test_reasoning_that_was_changed_is_not_continued(bench, http):
    await bench.engine()
    bench.brain.says("<think>\nhm\n</think>\n\nyes", "x")
    async with bench.proxy() as proxy, client(proxy) as api:
        reasoning, text = (await ask(api, http, proxy, stream=False))["output"]
        reasoning["summary"][0]["text"] = reasoning["content"][0]["text"] = "other"
        await ask(api, http, proxy, stream=False, input=[*ASK, reasoning, text, *ASK])
        assert proxy.service.metrics.counts["roots"] == 2


# --- roles ---------------------------------------------------------------------------------------------------------

TURN = "x-codex-turn-metadata"


@pytest.mark.parametrize(
    ("headers", "tools", "role"),
    [
        ({TURN: '{"request_kind": "turn", "thread_source": "user"}'}, [BASH], "main"),
        ({TURN: '{"request_kind": "compaction", "thread_source": "user"}'}, [], "main-summary"),
        ({TURN: '{"request_kind": "compaction", "thread_source": "subagent"}'}, [], "sub-agent-summary"),
        ({TURN: '{"request_kind": "compaction"}', "x-openai-subagent": "collab_spawn"}, [], "sub-agent-summary"),
        ({TURN: '{"request_kind": "turn", "thread_source": "subagent"}'}, [BASH], "sub-agent"),
        ({TURN: "{}", "x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t"}, [BASH], "sub-agent"),
        ({TURN: "{}", "x-openai-subagent": "review"}, [BASH], "sub-agent"),
        ({TURN: "{}", "x-openai-subagent": "compact"}, [], "main-summary"),
        ({TURN: "{}", "x-openai-subagent": "memory_consolidation"}, [], "side"),
        ({TURN: "cut off", "x-codex-parent-thread-id": "t"}, [], "sub-agent-summary"),
        ({TURN: "cut off"}, [], "main-summary"),
        ({TURN: "cut off"}, [BASH], "main"),
        ({"originator": "codex_exec", "session-id": "s"}, [BASH], "main"),
    ],
)
def test_codex_s_roles(headers, tools, role):
    assert Roles.load().role(headers, read(tools=[*tools, SEARCH] if tools else []).conversation) == (role, True)


# --- odd requests --------------------------------------------------------------------------------------------------

MANY = 10_000 if os.environ.get("GYRE_TEST_MANY") else 2_000
ODD = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1.5, 1e308, 10**30, "", "x", "\x00", "\ud800", "<|im_start|>", "\U0010fffd"]
    ),
    st.sampled_from(
        [[], {}, [None], [[]], [{}], {"type": "input_text"}, {"type": "text", "text": 3}, [{"type": "input_image"}]]
    ),
    st.sampled_from(
        [ASK, [REASONING], [USE, OUT], "assistant", "developer", "function_call", "custom_tool_call_output"]
    ),
    st.sampled_from(
        ["namespace", "local_shell_call", "local_shell", "item_reference", "compaction", "message", "auto"]
    ),
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)
FULL = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "rule"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        REASONING | {"id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": "x"},
        TEXT,
        USE | {"namespace": "agents"},
        OUT | {"output": [{"type": "input_text", "text": "t"}, {"type": "input_image", "image_url": "data:"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "+x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "compaction", "encrypted_content": "x"},
        {"role": "developer", "content": "late"},
    ],
    "tools": [BASH, PATCH, AGENTS, SEARCH, SHELL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_output_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
    "stream": False,
    "store": False,
}


@st.composite
def odd_bodies(draw):
    """A request in which some places are replaced, removed, doubled or renamed."""

    def change(value):
        if isinstance(value, dict) and value and draw(st.integers(0, 9)):
            key = draw(st.sampled_from(sorted(value)))
            match draw(st.integers(0, 7)):
                case 0:
                    return {k: v for k, v in value.items() if k != key}
                case 1:
                    new = draw(
                        st.sampled_from(["odd", "type", "role", "content", "call_id", "output", "summary", "input"])
                    )
                    return value | {new: draw(ODD)}
            return value | {key: change(value[key])}
        if isinstance(value, list) and value and draw(st.integers(0, 9)):
            at = draw(st.integers(0, len(value) - 1))
            match draw(st.integers(0, 7)):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return [*value, value[at]]
            return [*value[:at], change(value[at]), *value[at + 1 :]]
        return draw(ODD)

    body = FULL
    for _ in range(draw(st.integers(1, 4))):
        body = change(body)
    raw = json.dumps(body).encode()
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 19)) == 0 else raw


def test_thousands_of_odd_requests(renderers):
    """Refused as a bad request, or planned and answerable; planning changes nothing."""
    history, roles, taken = History(renderers(CHATML)), Roles.load(), [0, 0]
    opening = Opening(call="c", created=1, model="m", prompt_tokens=1)

    @settings(max_examples=MANY, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(odd_bodies())
    def try_one(raw):
        taken[0] += 1
        try:
            request = responses.read_request(raw, Defaults())
            plan = history.plan(request.conversation)
        except BadRequest:
            return
        roles.role({}, request.conversation)
        assert len(plan.prompt)
        names = [t["function"]["name"] for t in request.conversation.tools]
        assert len(set(names)) == len(names)
        calls = tuple(ToolCall(id=f"c{i}", name=n, arguments='{"input": "x"}') for i, n in enumerate([*names, "none"]))
        reply = Reply(call="c", text="ab", reasoning="hm", calls=calls, created=1)
        whole = msgspec.json.decode(msgspec.json.encode(responses.answer(reply, request, request.model)))
        assert {*Response.model_fields} - {"conversation", "prompt", "prompt_cache_retention"} <= set(whole)
        encoder = responses.stream(opening, request)
        raw = encoder.begin() + encoder.delta("a") + encoder.finish(reply, "b")
        check([json.loads(b.split(b"\n")[1][6:]) for b in raw.strip().split(b"\n\n")])
        taken[1] += 1

    try_one()
    assert history.calls == 0
    assert 0.1 < taken[1] / taken[0] < 0.9, "the changes are neither all harmless nor all fatal"


async def test_odd_requests_over_http_change_nothing_when_refused(bench, http):
    engine = await bench.engine()
    bodies: list[bytes] = []

    @settings(
        max_examples=MANY if MANY == 10_000 else 400,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(odd_bodies())
    def collect(raw):
        bodies.append(raw)

    collect()
    statuses: dict[int, int] = {}
    async with bench.proxy() as proxy, client(proxy) as api:
        await ask(api, http, proxy, stream=False)
        (path,) = bench.calls.glob("*.gtraj")

        def state():
            execution = proxy.service._executions[path.stem]
            counts = {k: v for k, v in proxy.service.metrics.counts.items() if k != "calls_refused"}
            return path.stat().st_size, counts, len(execution.attempts), execution.history.calls, len(engine.requests)

        for raw in bodies:
            before = state()
            headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
            async with http.post(f"{proxy.url}/v1/responses", data=raw, headers=headers) as response:
                text = await response.text()
                statuses[response.status] = statuses.get(response.status, 0) + 1
                if response.status != 200:
                    assert json.loads(text)["error"]["message"]
                    assert state() == before
        assert set(statuses) == {200, 400}, statuses
        assert proxy.service.metrics.counts["calls"] == statuses[200] + 1
        assert len(list(bench.calls.glob("*"))) == 1
