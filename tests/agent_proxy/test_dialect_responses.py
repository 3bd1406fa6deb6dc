"""OpenAI Responses through the proxy, with the openai client, over scripted engines."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai.types.responses import Response

from gyre_traj.log import read_log

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


def client(proxy):
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0, timeout=30)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shape(item):
    """An output item without what differs from call to call."""
    return {k: v for k, v in item.items() if k not in ("id", "call_id", "encrypted_content")}


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
async def test_answers(bench, http, talk, turn, tools, items, stream):
    await bench.engine()
    bench.brain.says(turn)
    async with bench.proxy() as proxy:
        got = await talk(http, proxy).ask(stream=stream, tools=tools)
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
    assert Response.model_validate(talk.known(got), strict=True).id.startswith("resp_")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turn", ["one two three four five six", "<think>\none two three four five six"])
async def test_an_answer_that_was_cut_is_incomplete(bench, http, talk, turn, stream):
    await bench.engine()
    bench.brain.says(turn)
    async with bench.proxy() as proxy:
        got = await talk(http, proxy).ask(stream=stream, max_output_tokens=8)
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [i["status"] for i in got["output"]] == ["incomplete"]
    assert (got["usage"]["output_tokens"], got["max_output_tokens"]) == (8, 8)
    Response.model_validate(got, strict=True)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_the_path_may_do_without_its_version(bench, prefix):
    await bench.engine()
    async with (
        bench.proxy() as proxy,
        openai.AsyncOpenAI(base_url=proxy.url + prefix, api_key="k", max_retries=0) as api,
    ):
        assert (await api.responses.create(model="m", input="hi")).output_text == "answer 0"
        with pytest.raises(openai.BadRequestError):
            await api.responses.create(model="m", input=[])
        assert proxy.service.metrics.counts["calls_refused"] == 1


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


async def test_the_response_repeats_what_was_asked(bench, http, talk):
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
    async with bench.proxy() as proxy:
        got = await talk(http, proxy).ask(stream=False, tools=tools, **asked, **silent)
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
async def test_what_changes_nothing_is_never_an_error(bench, http, talk, odd):
    await bench.engine()
    async with bench.proxy() as proxy:
        got = await talk(http, proxy).ask(stream=True, unknown={"x": 1}, **odd)
    Response.model_validate(got, strict=True)


async def test_encrypted_reasoning_is_there_for_those_who_ask(bench, http, talk):
    await bench.engine()
    bench.brain.says(*["<think>\nhm\n</think>\n\nyes"] * 2)
    async with bench.proxy() as proxy:
        for include, kind in ((["reasoning.encrypted_content"], str), ([], type(None))):
            got = await talk(http, proxy).ask(stream=True, include=include)
            assert isinstance(got["output"][0]["encrypted_content"], kind)


# --- while a stream waits, and when it fails -----------------------------------------------------------------------


async def test_a_stream_that_waits_sends_events_that_count(bench, http, talk):
    """Codex's idle timeout does not see comments."""
    engine = await bench.engine()
    bench.brain.says("one two three")
    engine.hold = 2
    async with asyncio.timeout(30), bench.proxy(keepalive=0.05) as proxy:
        streaming = asyncio.create_task(talk(http, proxy).events())
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


async def test_both_connections_of_one_call_get_the_same_items(bench, http, talk):
    engine = await bench.engine()
    bench.brain.says("<think>\nhm\n</think>\n\nI look.\n" + call("bash", command="ls"))
    engine.hold = 2
    async with asyncio.timeout(30), bench.proxy() as proxy:
        one = asyncio.create_task(talk(http, proxy).ask(stream=True, tools=[BASH]))
        await engine.held.wait()
        two = asyncio.create_task(talk(http, proxy).ask(stream=False, tools=[BASH]))
        while not proxy.service.metrics.counts["duplicates"]:
            await asyncio.sleep(0.01)
        engine.release()
        assert (await one) == (await two)


async def test_a_stream_that_cannot_be_finished_says_why(bench, http, talk):
    engine = await bench.engine()
    engine.hold = 2
    async with asyncio.timeout(30), bench.proxy(attempts=1) as proxy:
        streaming = asyncio.create_task(talk(http, proxy).events())
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
async def test_a_conversation_in_any_serialisation_is_one_path(bench, http, talk, form):
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
    async with bench.proxy() as proxy:
        items = list(ASK)
        for turn in range(5):
            output = (await talk(http, proxy).ask(stream=bool(turn % 2), input=items, tools=tools))["output"]
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


async def test_reasoning_that_was_changed_is_not_continued(bench, http, talk):
    await bench.engine()
    bench.brain.says("<think>\nhm\n</think>\n\nyes", "x")
    async with bench.proxy() as proxy:
        reasoning, text = (await talk(http, proxy).ask(stream=False))["output"]
        reasoning["summary"][0]["text"] = reasoning["content"][0]["text"] = "other"
        await talk(http, proxy).ask(stream=False, input=[*ASK, reasoning, text, *ASK])
        assert proxy.service.metrics.counts["roots"] == 2
