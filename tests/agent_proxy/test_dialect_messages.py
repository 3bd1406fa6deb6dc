"""Anthropic Messages through the proxy, with the anthropic client, over scripted engines."""

from __future__ import annotations

import asyncio
import itertools
import json

import anthropic
import pytest

from gyre_agent_proxy.conversation import Conversation, Reply, Request, Sampling
from gyre_agent_proxy.dialects import messages
from gyre_agent_proxy.dialects.base import Opening
from gyre_agent_proxy.unfolding import Said
from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids

BASH = {
    "name": "bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
USER = {"role": "user", "content": "hi"}
LOOK = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call>'


def client(proxy, key="k", **more):
    return anthropic.AsyncAnthropic(base_url=proxy.url, api_key=key, max_retries=0, timeout=30, **more)


def only_log(bench):
    (path,) = bench.calls.glob("*.gtraj")
    return read_log(path)


async def ask(api, turns, *, stream, **more):
    """The answer as the client puts it together."""
    body = {"model": "policy", "max_tokens": 1000, "messages": turns, **more}
    if not stream:
        return await api.messages.create(**body)
    async with api.messages.stream(**body) as events:
        return await events.get_final_message()


def content(message):
    return [b.to_dict() for b in message.content]


def texts(message):
    return [b.text for b in message.content if b.type == "text"]


both = pytest.mark.parametrize("stream", [False, True])


# --- answers -------------------------------------------------------------------------------------------------------


@both
async def test_one_call(bench, stream):
    engine = await bench.engine()
    bench.brain.says("Hello <b>world</b>\nüñ")
    hot = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, [USER], stream=stream, system="Be brief.", extra_body=hot)
    assert got.id == f"msg_{only_log(bench).calls[0].call}"
    assert (got.type, got.role, got.model, got.stop_reason, got.stop_sequence) == (
        "message",
        "assistant",
        "policy",
        "end_turn",
        None,
    )
    assert content(got) == [{"type": "text", "text": "Hello <b>world</b>\nüñ"}]
    (sent,) = engine.requests
    assert got.usage.to_dict() == {
        "input_tokens": len(sent["input_ids"]),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": len(bench.brain.known[0][1]),
        "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
        "service_tier": "standard",
    }
    params = sent["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["max_new_tokens"]) == (0.5, 0.9, 40, 1000)
    assert "Be brief." in bench.renderer.vocabulary.decode(sent["input_ids"])


@both
async def test_tools_called_at_once_and_their_results(bench, stream):
    await bench.engine()
    bench.brain.says("I look.\n" + LOOK % "echo hi" + LOOK % "ls", "done")
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, [USER], stream=stream, tools=[BASH])
        assert got.stop_reason == "tool_use"
        text, one, two = content(got)
        assert text == {"type": "text", "text": "I look."}
        assert [(b["type"], b["name"], b["input"]) for b in (one, two)] == [
            ("tool_use", "bash", {"command": "echo hi"}),
            ("tool_use", "bash", {"command": "ls"}),
        ]
        assert one["id"] != two["id"]
        results = [
            {"type": "tool_result", "tool_use_id": two["id"], "content": [{"type": "text", "text": "a b"}]},
            {"type": "tool_result", "tool_use_id": one["id"], "content": "no such file", "is_error": True},
            {"type": "text", "text": "and now?"},
        ]
        turns = [USER, {"role": "assistant", "content": content(got)}, {"role": "user", "content": results}]
        assert texts(await ask(api, turns, stream=stream, tools=[BASH])) == ["done"]
    first, second = only_log(bench).calls
    assert second.parent == first.call
    assert bench.renderer.vocabulary.decode(unpack_ids(second.prompt)) == (
        "\n<|im_start|>user\n<tool_response>\n<error>no such file</error>\n</tool_response>\n"
        "<tool_response>\na b\n</tool_response><|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ), "in the order of the calls, then what the user says"


@both
async def test_thinking_goes_out_with_a_signature_and_comes_back(bench, stream):
    await bench.engine()
    bench.brain.says("<think>\nI should look.\n</think>\n\nLooking.", "<think>\nwell\n</think>\n\n", "done")
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, [USER], stream=stream, thinking={"type": "adaptive"})
        thought, said = content(got)
        assert thought["type"] == "thinking"
        assert thought["thinking"] == "I should look."
        assert thought["signature"]
        assert said == {"type": "text", "text": "Looking."}
        turns = [USER, {"role": "assistant", "content": [thought, said]}, USER]
        only = await ask(api, turns, stream=stream)
        assert [b["type"] for b in content(only)] == ["thinking"]
        # Whoever leaves the thinking out continues the same call; whoever changes it does not.
        turns = [USER, {"role": "assistant", "content": [said]}, {"role": "user", "content": "go on"}]
        await ask(api, turns, stream=stream)
        turns[1] = {"role": "assistant", "content": [thought | {"thinking": "other"}, said]}
        await ask(api, turns, stream=stream)
    calls = only_log(bench).calls
    assert [c.parent for c in calls] == [None, calls[0].call, calls[0].call, None]
    assert calls[0].request["thinking"] == {"type": "adaptive"}


@both
async def test_why_it_stopped(bench, stream):
    await bench.engine()
    bench.brain.says("some code ``` and more", "one two three four", LOOK % "ls", "")
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, [USER], stream=stream, stop_sequences=["~~~", "```"])
        assert (texts(got), got.stop_reason, got.stop_sequence) == (["some code "], "stop_sequence", "```")
        got = await ask(api, [{"role": "user", "content": "ho"}], stream=stream, max_tokens=3)
        assert (got.stop_reason, got.stop_sequence, got.usage.output_tokens) == ("max_tokens", None, 3)
        got = await ask(api, [{"role": "user", "content": "look"}], stream=stream, tools=[BASH])
        assert [b["type"] for b in content(got)] == ["tool_use"]
        assert got.stop_reason == "tool_use"
        got = await ask(api, [{"role": "user", "content": "nothing"}], stream=stream)
        assert (content(got), got.stop_reason) == ([{"type": "text", "text": ""}], "end_turn")


@both
@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 1, "b": 1.50, "c": 123456789012345678901234567890, "d": "\\ud83d"}', None),
        ("{}", None),
        ('"ls -l"', {"raw_arguments": "ls -l"}),
        ("[1, 2]", {"raw_arguments": "[1, 2]"}),
        ('{"a": NaN}', {"raw_arguments": '{"a": NaN}'}),
        ('{"a": 1e999}', {"raw_arguments": '{"a": Infinity}'}),
    ],
)
async def test_whatever_the_arguments_are_the_input_is_an_object(bench, http, stream, arguments, given):
    await bench.engine()
    bench.brain.says('<tool_call>\n{"name": "bash", "arguments": ' + arguments + "}\n</tool_call>", "done")
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, [USER], stream=stream, tools=[BASH])
        (block,) = content(got)
        assert block["input"] == (json.loads(arguments.replace("\\ud83d", "\\ufffd")) if given is None else given)
        result = {"type": "tool_result", "tool_use_id": block["id"]}
        turns = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        body = {"messages": turns, "tools": [BASH]}
        async with http.post(f"{proxy.url}/v1/messages", json=body, headers={"x-api-key": "k"}) as response:
            assert response.status == 200
        assert proxy.service.metrics.counts["forks"] == 0
    first, second = only_log(bench).calls
    assert second.parent == first.call


async def test_what_was_cached_is_told_apart():
    reply = Reply(call="c", text="x", prompt_tokens=100, cached_tokens=64, completion_tokens=5)
    request = Request(
        conversation=Conversation(messages=()), sampling=Sampling(max_tokens=9), dialect="messages", model="m"
    )
    usage = messages.answer(reply, request, "m")["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (36, 64, 5)
    encoder = messages.stream(Opening(call="c", created=0, model="m", prompt_tokens=100), request)
    assert b'"input_tokens":100' in encoder.begin()
    assert json.dumps(usage, separators=(",", ":")).encode() in encoder.finish(reply, Said(text="x"))


# --- streams -------------------------------------------------------------------------------------------------------


async def stream_of(http, proxy, **body):
    """The raw events of a stream: their names agree with their types."""
    body = {"messages": [USER], "stream": True, **body}
    async with http.post(f"{proxy.url}/v1/messages?beta=true", json=body, headers={"x-api-key": "k"}) as response:
        assert response.status == 200
        assert response.headers["request-id"].startswith("req_")
        raw = await response.text()
    events = []
    for part in raw.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_the_events_of_a_stream(bench, http):
    await bench.engine()
    bench.brain.says("<think>\nhm\n</think>\n\nI look." + LOOK % "ls" + LOOK % "pwd")
    async with bench.proxy() as proxy:
        events = await stream_of(http, proxy, tools=[BASH])
    assert [e["type"] for e in events if e["type"] != "content_block_delta"] == [
        "message_start",
        "ping",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    begun = [(e["index"], e["content_block"]["type"]) for e in events if e["type"] == "content_block_start"]
    assert begun == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    deltas = [(e["index"], e["delta"]["type"]) for e in events if e["type"] == "content_block_delta"]
    assert [delta for delta, _ in itertools.groupby(deltas)] == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
        (3, "input_json_delta"),
    ]


async def test_text_is_streamed_as_it_comes_and_pings_fill_a_pause(bench, http):
    engine = await bench.engine()
    engine.hold = 12
    bench.brain.says("a long answer of several words and then some more")
    async with bench.proxy(keepalive=0.05) as proxy:
        body = {"messages": [USER], "stream": True}
        async with http.post(f"{proxy.url}/v1/messages", json=body, headers={"x-api-key": "k"}) as response:
            raw = b""
            while raw.count(b"event: ping") < 4:  # one belongs to the beginning
                raw += await response.content.readany()
            assert b"text_delta" in raw
            assert b"message_stop" not in raw
            engine.release()
            raw += await response.read()
    events = [json.loads(x[6:]) for x in raw.decode().splitlines() if x.startswith("data: ")]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    said = [d["text"] for d in deltas if d["type"] == "text_delta"]
    assert "" in said, "a client that does not see the pings sees that it goes on"
    assert len(list(filter(None, said))) > 1
    assert "".join(said) == "a long answer of several words and then some more"
    assert sum(e.get("content_block", {}).get("type") == "text" for e in events) == 1


@pytest.mark.parametrize("said", ["<think>\nhm\n</think>\n\nHello", "Hello", "", LOOK % "ls"])
async def test_a_long_wait_for_the_first_token_shows_as_thinking(bench, said):
    engine = await bench.engine()
    bench.brain.says(said)
    engine.hold = 0
    async with bench.proxy(keepalive=0.01) as proxy, client(proxy) as api:
        body = {"model": "m", "max_tokens": 99, "messages": [USER], "tools": [BASH]}
        async with api.messages.stream(**body) as stream:
            async for event in stream:
                if event.type == "content_block_delta":
                    assert event.delta.to_dict() == {"type": "thinking_delta", "thinking": ""}
                    break
            engine.release()
            got = await stream.get_final_message()
        thought, *rest = content(got)
        assert thought == {"type": "thinking", "thinking": "hm" if "hm" in said else "", "signature": "Z3lyZQ=="}
        assert [b["type"] for b in rest] == (["tool_use"] if "tool_call" in said else ["text"])
        assert texts(got) == ([] if "tool_call" in said else [said.rpartition("\n")[2]])
        turns = [USER, {"role": "assistant", "content": content(got)}, USER]
        await ask(api, turns, stream=False, tools=[BASH])
    first, second = only_log(bench).calls
    assert second.parent == first.call, "and changes nothing in what comes back"


async def test_a_failure_after_the_stream_began_is_an_error_event(bench):
    engine = await bench.engine()
    bench.brain.says("a long answer of several words")
    engine.hold = 8
    async with bench.proxy(attempts=1, keepalive=0.05) as proxy, client(proxy) as api:
        events = await api.messages.create(model="m", max_tokens=99, messages=[USER], stream=True)
        assert (await anext(aiter(events))).type == "message_start"
        engine.report = (8, {"message": "out of memory", "code": 500})
        engine.release()
        with pytest.raises(anthropic.APIStatusError) as caught:
            [event async for event in events]
    assert caught.value.body["error"]["type"] == "api_error"
    assert "out of memory" in caught.value.body["error"]["message"]


async def test_a_cut_stream_is_repeated_without_streaming_and_gets_the_same_answer(bench, http):
    engine = await bench.engine()
    bench.brain.says("the one answer")
    engine.hold = 2
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.%s;"}
    body = {
        "model": "m",
        "max_tokens": 1000,
        "system": [header | {"text": header["text"] % "d2c"}, {"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [block]}],
        "metadata": {"user_id": "u1"},
    }
    again = body | {
        "system": [header | {"text": header["text"] % "7lo"}, {"type": "text", "text": "Be brief."}],
        "messages": [USER],
        "metadata": {"user_id": "u2"},
    }
    async with bench.proxy(disconnect_grace=60.0) as proxy, client(proxy) as api:
        url, headers = f"{proxy.url}/v1/messages", {"x-api-key": "k"}
        cut = asyncio.create_task(http.post(url, json={**body, "stream": True}, headers=headers))
        await engine.held.wait()
        cut.cancel()
        other = asyncio.create_task(api.messages.create(**again, extra_body={"temperature": 0.5}))
        joined = asyncio.create_task(api.messages.create(**again))
        while proxy.service.metrics.counts["duplicates"] == 0 or len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        engine.release()
        assert texts(await joined) == ["the one answer"]
        await other
        assert proxy.service.metrics.counts["duplicates"] == 1, "another temperature is another request"
        await api.messages.create(**again)
        assert proxy.service.metrics.counts["duplicates"] == 1, "after delivery it is a new sample"
    assert len(engine.requests) == 3
    assert only_log(bench).calls[0].request["billing_header"].startswith("x-anthropic-billing-header: cc_version")


async def test_two_agents_that_ask_the_same_are_two_calls_and_one_that_repeats_is_one(bench):
    engine = await bench.engine()
    engine.hold = 1
    bench.brain.says("one", "two")
    async with bench.proxy(disconnect_grace=60.0) as proxy, client(proxy) as api:
        body = {"model": "m", "max_tokens": 99, "messages": [USER]}
        running = [
            asyncio.create_task(api.messages.create(**body, extra_headers={"x-claude-code-agent-id": agent}))
            for agent in ("a", "b", "a")
        ]
        while len(engine.requests) < 2 or proxy.service.metrics.counts["duplicates"] < 1:
            await asyncio.sleep(0.01)
        engine.release()
        got = [texts(m)[0] for m in await asyncio.gather(*running)]
        assert got[0] == got[2]
        assert proxy.service.metrics.counts["duplicates"] == 1
    assert len(engine.requests) == 2


@pytest.mark.parametrize("said", ["one two three four", "<think>\none two three", LOOK % "one two three"])
async def test_a_turn_cut_by_the_limit_is_resumed(bench, said):
    await bench.engine()
    cut = bench.renderer.vocabulary.encode(said)[:-4]
    bench.brain.says(cut, "done")
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await ask(api, [USER], stream=True, tools=[BASH], max_tokens=len(cut))
        assert got.stop_reason == "max_tokens"
        resume = {"role": "user", "content": "Output token limit hit. Resume directly."}
        await ask(api, [USER, {"role": "assistant", "content": content(got)}, resume], stream=False, tools=[BASH])
        assert proxy.service.metrics.counts["foreign_turns"] == 0
    first, second = only_log(bench).calls
    assert (first.finish, second.parent) == ("length", first.call)
    (span,) = second.inserted
    closing = bench.renderer.vocabulary.decode(unpack_ids(second.prompt)[slice(*span)])
    assert closing == ("\n</think>\n\n<|im_end|>\n" if "<think>" in said else "<|im_end|>\n")
