"""What clients demand of an answer's form: how it is asked for, and what an engine is told."""

from __future__ import annotations

import asyncio
import json

import pytest

from gyre_agent_proxy.constraint import Demand, constrain
from gyre_agent_proxy.dialects import chat, messages, responses
from gyre_agent_proxy.dialects.base import Defaults
from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids, unpack_logprobs

SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
FORM = {"type": "json_schema", "schema": SCHEMA}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


# --- requests ------------------------------------------------------------------------------------------------------


def of_chat(**fields):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [BASH], **fields}
    return chat.read_request(json.dumps(body).encode(), Defaults())


def of_responses(**fields):
    tools = [
        {"type": "function", "name": "bash"},
        {"type": "namespace", "name": "agents", "tools": [{"type": "custom", "name": "spawn"}]},
        {"type": "web_search"},
    ]
    return responses.read_request(json.dumps({"input": "x", "tools": tools, **fields}).encode(), Defaults())


def of_messages(**fields):
    tools = [{"name": "bash", "input_schema": {}}, {"type": "web_search_20250305", "name": "web_search"}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, **fields}
    return messages.read_request(json.dumps(body).encode(), Defaults())


@pytest.mark.parametrize(
    ("read", "fields", "demand"),
    [
        (of_chat, {}, Demand()),
        (of_chat, {"tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False}, Demand()),
        (of_chat, {"tool_choice": "none"}, Demand(calls="none")),
        (of_chat, {"tool_choice": "required", "parallel_tool_calls": False}, Demand(calls="required", parallel=False)),
        (
            of_chat,
            {"tool_choice": {"type": "function", "function": {"name": "bash"}}},
            Demand(calls="required", tool="bash"),
        ),
        (
            of_chat,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            Demand(schema=SCHEMA),
        ),
        (of_chat, {"response_format": {"type": "json_object"}}, Demand(schema={"type": "object"})),
        (
            of_chat,
            {"tool_choice": {"type": "allowed_tools"}, "response_format": 3, "logprobs": True, "logit_bias": {"1": 2}},
            Demand(ignored=("logprobs", "logit_bias", "tool_choice", "response_format")),
        ),
        (of_responses, {"tool_choice": "auto", "text": {"verbosity": "low"}}, Demand()),
        (of_responses, {"tool_choice": {"type": "function", "name": "bash"}}, Demand(calls="required", tool="bash")),
        (
            of_responses,
            {"tool_choice": {"type": "custom", "name": "spawn", "namespace": "agents"}},
            Demand(calls="required", tool="agents__spawn"),
        ),
        (of_responses, {"tool_choice": {"type": "web_search"}}, Demand(ignored=("tool_choice",))),
        (of_responses, {"text": {"format": FORM | {"name": "n"}}}, Demand(schema=SCHEMA)),
        (of_responses, {"text": {"format": {"type": "grammar"}}}, Demand(ignored=("text.format",))),
        (of_messages, {"tool_choice": {"type": "auto"}, "output_config": {"effort": "high"}}, Demand()),
        (of_messages, {"tool_choice": {"type": "none"}}, Demand(calls="none")),
        (
            of_messages,
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            Demand(calls="required", parallel=False),
        ),
        (of_messages, {"tool_choice": {"type": "tool", "name": "bash"}}, Demand(calls="required", tool="bash")),
        (of_messages, {"tool_choice": {"type": "tool"}}, Demand(ignored=("tool_choice",))),
        (of_messages, {"output_config": {"format": FORM}}, Demand(schema=SCHEMA)),
        (of_messages, {"output_format": FORM}, Demand(schema=SCHEMA)),
    ],
)
def test_what_is_demanded(read, fields, demand):
    request = read(**fields)
    assert request.demand == demand
    assert all(request.other[name] == value for name, value in fields.items()), "and it is kept in the record"


# --- what the engine is told ---------------------------------------------------------------------------------------


def form_of(found):
    assert set(found.sampling) == {"structural_tag"}
    return json.loads(found.sampling["structural_tag"])["format"]


def told(demand, tools=(), *, plain=True, opened=False, thinks=False):
    return constrain(demand, set(tools), plain=plain, opened=opened, thinks=thinks)


def test_json_alone_is_a_schema_for_the_engine():
    assert told(Demand(schema=SCHEMA)).sampling == {"json_schema": json.dumps(SCHEMA)}
    assert told(Demand(schema=SCHEMA, calls="none"), ["bash"]).sampling == {"json_schema": json.dumps(SCHEMA)}


def test_json_may_be_replaced_by_calls_where_tools_are_offered():
    form = form_of(told(Demand(schema=SCHEMA), ["bash"]))
    assert form["type"] == "or"
    assert [e["type"] for e in form["elements"]] == ["json_schema", "tags_with_separator"]


def test_calls_that_are_required_are_written_as_they_are_read():
    form = form_of(told(Demand(calls="required", parallel=False), ["bash", 'q"']))
    assert [t["begin"] + "{}" + t["end"] for t in form["tags"]] == [
        '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "q\\"", "arguments": {}}\n</tool_call>',
    ]
    assert (form["at_least_one"], form["stop_after_first"]) == (True, True)
    assert len(form_of(told(Demand(calls="required", tool="bash"), ["bash", "read"]))["tags"]) == 1


def test_reasoning_may_come_first_and_must_end_where_the_prompt_began_it():
    form = form_of(told(Demand(schema=SCHEMA), thinks=True))
    json_, (thought, _, after) = form["elements"][0], form["elements"][1]["elements"]
    assert (form["type"], thought["begin"], thought["end"]) == ("or", "<think>", "</think>")
    assert json_ == after
    form = form_of(told(Demand(schema=SCHEMA), opened=True, thinks=True))
    assert [e["type"] for e in form["elements"]] == ["tag", "regex", "json_schema"]
    assert form["elements"][0]["begin"] == ""


@pytest.mark.parametrize(
    ("demand", "tools", "plain", "ignored"),
    [
        (Demand(calls="required"), [], True, ("tool_choice",)),
        (Demand(calls="required", tool="web_search"), ["bash"], True, ("tool_choice",)),
        (Demand(calls="required"), ["bash"], False, ("tool_choice",)),
        (Demand(schema=SCHEMA), ["bash"], False, ("response format",)),
        (Demand(schema=SCHEMA), [], False, ("response format",)),
        (Demand(parallel=False), ["bash"], True, ("parallel calls",)),
        (Demand(parallel=False), [], True, ()),
        (Demand(calls="none", ignored=("logprobs",)), ["bash"], False, ("logprobs",)),
    ],
)
def test_what_cannot_be_followed_is_named(demand, tools, plain, ignored):
    found = told(demand, tools, plain=plain)
    assert (found.sampling, found.ignored) == ({}, ignored)


# --- through the proxy ---------------------------------------------------------------------------------------------


async def ask(http, proxy, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    headers = {"Authorization": "Bearer k"}
    async with http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]["message"]


async def test_the_engine_samples_under_it_and_the_record_says_so(bench, http):
    engine = await bench.engine()
    bench.brain.says('{"title": "t"}')
    async with bench.proxy() as proxy:
        message = await ask(http, proxy, response_format=FORM)
    assert message["content"] == '{"title": "t"}'
    tag = engine.requests[0]["sampling_params"]["structural_tag"]
    (path,) = bench.calls.glob("*.gtraj")
    assert read_log(path).calls[0].sampling["structural_tag"] == tag


async def test_without_calls_what_is_written_as_one_stays_text_and_is_known_again(bench, http):
    await bench.engine()
    bench.brain.says(CALL, "b")
    async with bench.proxy() as proxy:
        message = await ask(http, proxy, tools=[BASH], tool_choice="none")
        assert (message["content"], message.get("tool_calls")) == (CALL, None)
        talk = [{"role": "user", "content": "x"}, message, {"role": "user", "content": "y"}]
        await ask(http, proxy, tools=[BASH], messages=talk)
        counts = proxy.service.metrics.counts
        assert (counts["roots"], counts["foreign_turns"], counts["demands_ignored"]) == (1, 0, 0)


async def test_what_is_ignored_is_counted_and_named_in_the_record(bench, http):
    engine = await bench.engine()
    async with bench.proxy() as proxy:
        await ask(http, proxy, tool_choice="required", logprobs=True)
        assert proxy.service.metrics.counts["demands_ignored"] == 2
    assert "structural_tag" not in engine.requests[0]["sampling_params"]
    (path,) = bench.calls.glob("*.gtraj")
    assert read_log(path).calls[0].request["demands_ignored"] == ["logprobs", "tool_choice"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_constrained_answer_that_has_to_move_begins_again_unseen(bench, http, stream):
    engine = await bench.engine()
    bench.brain.says('{"title": "one"}', '{"title": "two"}')
    bench.brain.rest = lambda ids: [*bench.brain.vocabulary.encode(bench.brain.queue[0]), 2]
    engine.hold = 4
    async with bench.proxy() as proxy:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream, "response_format": FORM}
        headers = {"Authorization": "Bearer k"}
        asking = asyncio.create_task(http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers))
        await engine.held.wait()
        bench.brain.queue.pop(0)
        engine.hold = None
        proxy.pool.drain(next(iter(proxy.pool.engines)))
        async with await asking as response:
            raw = await response.text()
        assert proxy.service.metrics.counts["restarts"] == 1
    first, second = engine.requests
    assert first["input_ids"] == second["input_ids"]
    events = [json.loads(x[6:]) for x in raw.splitlines() if x.startswith("data: {")] if stream else [json.loads(raw)]
    pieces = [c.get("delta", c.get("message")) for e in events for c in e["choices"]]
    assert "".join(p.get("content") or "" for p in pieces) == '{"title": "two"}'
    (path,) = bench.calls.glob("*.gtraj")
    (call,) = read_log(path).calls
    assert [(a.tokens, a.end) for a in call.attempts] == [(0, "drain"), (len(unpack_ids(call.output)), "stop")]
    assert len(unpack_logprobs(call.logprobs)) == len(unpack_ids(call.output))


async def test_an_engine_that_never_finishes_a_constrained_answer_is_given_up(bench, http):
    engine = await bench.engine()
    engine.self_abort = 2
    async with bench.proxy(attempts=3) as proxy:
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": FORM}
        headers = {"Authorization": "Bearer k"}
        async with http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 502, await response.text()
    assert len(engine.requests) == 3
