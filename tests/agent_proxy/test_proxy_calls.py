"""Chat Completions through the proxy, with the openai client, over scripted engines."""

from __future__ import annotations

import asyncio
import json

import msgspec
import numpy as np
import openai
import pytest

from gyre_agent_proxy.dialects import chat
from gyre_agent_proxy.dialects.base import Defaults
from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids, unpack_logprobs

SYSTEM = {"role": "system", "content": "You are a helpful AI assistant."}
BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


def client(proxy, key="k"):
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0, timeout=30)


def only_log(bench):
    (path,) = bench.calls.glob("*.gtraj")
    return read_log(path)


async def answer(api, messages, *, stream, **more):
    """(text, tool calls, finish reason) of one call, streaming or not."""
    if not stream:
        done = await api.chat.completions.create(model="policy", messages=messages, **more)
        choice = done.choices[0]
        calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        assert done.usage.completion_tokens > 0
        return choice.message.content or "", calls, choice.finish_reason
    text, calls, finish, usage = "", [], None, None
    chunks = await api.chat.completions.create(
        model="policy", messages=messages, stream=True, stream_options={"include_usage": True}, **more
    )
    async for chunk in chunks:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += [(c.id, c.function.name, c.function.arguments) for c in choice.delta.tool_calls or []]
            finish = choice.finish_reason or finish
    assert usage is not None
    assert usage.completion_tokens > 0
    return text, calls, finish


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call(bench, stream):
    await bench.engine()
    bench.brain.says("Hello <b>world</b>\nüñ")
    async with bench.proxy() as proxy, client(proxy) as api:
        got = await answer(api, [SYSTEM, {"role": "user", "content": "hi"}], stream=stream)
    assert got == ("Hello <b>world</b>\nüñ", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls(bench, stream):
    await bench.engine()
    bench.brain.says(
        'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "echo hi"}}\n</tool_call>\n'
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>',
        "done",
    )
    async with bench.proxy() as proxy, client(proxy) as api:
        messages = [SYSTEM, {"role": "user", "content": "hi"}]
        text, calls, finish = await answer(api, messages, stream=stream, tools=[BASH])
        assert (text, finish) == ("I look.", "tool_calls")
        assert [(n, json.loads(a)) for _, n, a in calls] == [
            ("bash", {"command": "echo hi"}),
            ("bash", {"command": "ls"}),
        ]
        assert len({i for i, *_ in calls}) == 2
        # The harness re-serialises the arguments and turns null content into "".
        replayed = [
            {
                "id": i,
                "type": "function",
                "function": {"name": n, "arguments": json.dumps(json.loads(a), separators=(",", ":"))},
            }
            for i, n, a in calls
        ]
        messages += [{"role": "assistant", "content": text, "tool_calls": replayed}]
        messages += [{"role": "tool", "tool_call_id": i, "content": "out"} for i, *_ in calls]
        assert await answer(api, messages, stream=stream, tools=[BASH]) == ("done", [], "stop")
    first, second = only_log(bench).calls
    assert second.parent == first.call


@pytest.mark.parametrize("stream", [False, True])
async def test_many_turns_and_branches_keep_every_id(bench, stream):
    engine = await bench.engine()
    async with bench.proxy() as proxy, client(proxy) as api:
        trunk = [SYSTEM, {"role": "user", "content": "begin <|im_start|> quoted"}]
        for turn in range(4):
            text, _, _ = await answer(api, trunk, stream=stream)
            branch = [*trunk, {"role": "assistant", "content": text}, {"role": "user", "content": f"side {turn}"}]
            await answer(api, branch, stream=stream)
            trunk = [*trunk, {"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn}"}]
        await answer(api, [SYSTEM, {"role": "user", "content": "summary: it went well"}], stream=stream)
    log = only_log(bench)
    assert [c.parent is None for c in log.calls] == [True] + [False] * 7 + [True]
    by_rid = {r["rid"]: r for r in engine.requests}
    for call in log.calls:
        (attempt,) = call.attempts
        assert log.full_prompt(call.call).tolist() == by_rid[attempt.rid]["input_ids"], "ids sent = ids recorded"
        sampled = next(a for p, a in bench.brain.known if p == by_rid[attempt.rid]["input_ids"])
        assert unpack_ids(call.output).tolist() == sampled
        assert np.allclose(unpack_logprobs(call.logprobs), [-0.001 * (i + 1) for i in range(len(sampled))])
        assert [(s.version, s.start, s.end) for s in call.versions] == [(0, 0, len(sampled))]
        if call.parent is not None:
            before = log.full_ids(call.parent)
            assert log.full_prompt(call.call)[: len(before)].tolist() == before.tolist()
            assert call.prefix == len(before)
            (span,) = call.inserted
            assert unpack_ids(call.prompt)[slice(*span)].tolist() == bench.renderer.vocabulary.encode("\n")
    assert all(log.delivered[c.call] for c in log.calls)


async def test_a_call_is_recorded_before_its_answer_is_delivered(bench):
    await bench.engine()
    seen = []
    async with bench.proxy() as proxy:
        append = proxy.service._recorder.append

        def spy(execution, record):
            seen.append(type(record).__name__)
            append(execution, record)

        proxy.service._recorder.append = spy
        delivered = proxy.service.delivered

        def told(*args, **kwargs):
            seen.append("answer written")
            delivered(*args, **kwargs)

        proxy.service.delivered = told
        async with client(proxy) as api:
            await answer(api, [{"role": "user", "content": "hi"}], stream=True)
    assert seen == ["Call", "answer written", "Delivered"]


async def test_tool_call_ids_that_a_model_repeats_are_made_unique(bench, monkeypatch):
    await bench.engine()
    made = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call>'
    bench.brain.says(made % "one", made % "two")
    async with bench.proxy() as proxy, client(proxy) as api:
        parse = proxy.service._renderer.parse

        def native(*args):
            return msgspec.structs.replace(parse(*args), native_ids=("functions.bash:0",))

        monkeypatch.setattr(proxy.service._renderer, "parse", native)
        asks = [[{"role": "user", "content": text}] for text in ("hi", "ho")]
        ids = [(await answer(api, ask, stream=False, tools=[BASH]))[1][0][0] for ask in asks]
    assert ids[0] == "functions.bash:0"
    assert ids[1].startswith("call_")


async def test_missing_logprobs_make_a_call_untrainable(bench):
    engine = await bench.engine()
    engine.logprobs = False
    async with bench.proxy() as proxy, client(proxy) as api:
        await answer(api, [{"role": "user", "content": "hi"}], stream=False)
        assert proxy.service.metrics.counts["calls_untrainable"] == 1
    (call,) = only_log(bench).calls
    assert call.output
    assert call.logprobs == b""


async def test_incremental_engines_are_read_exactly(bench):
    engine = await bench.engine()
    engine.incremental = True
    bench.brain.says("a longer answer of several tokens")
    async with bench.proxy() as proxy, client(proxy) as api:
        assert (await answer(api, [{"role": "user", "content": "hi"}], stream=True))[0] == (
            "a longer answer of several tokens"
        )
    (call,) = only_log(bench).calls
    assert unpack_ids(call.output).tolist() == bench.brain.known[0][1]
    assert len(unpack_logprobs(call.logprobs)) == len(bench.brain.known[0][1])


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_and_length(bench, stream):
    await bench.engine()
    bench.brain.says("some code ``` and more", "one two three four")
    async with bench.proxy() as proxy, client(proxy) as api:
        ask = [{"role": "user", "content": "hi"}]
        assert await answer(api, ask, stream=stream, stop=["```"]) == ("some code ", [], "stop")
        text, _, finish = await answer(api, [{"role": "user", "content": "ho"}], stream=stream, max_tokens=3)
        assert finish == "length"
        # A turn cut by length is closed on the template's behalf.
        again = [{"role": "user", "content": "ho"}, {"role": "assistant", "content": text}, ask[0]]
        await answer(api, again, stream=stream)
    stopped, cut, child = only_log(bench).calls
    assert (stopped.finish, stopped.matched_stop) == ("stop", "```")
    assert (cut.finish, len(unpack_ids(cut.output))) == ("length", 3)
    assert child.parent == cut.call
    (span,) = child.inserted
    assert bench.renderer.vocabulary.decode(unpack_ids(child.prompt)[slice(*span)]) == "<|im_end|>\n"


@pytest.mark.parametrize("said", ["the code\n```rest", "```", "", " \n```"])
async def test_a_turn_ended_by_a_stop_string_is_continued_as_it_was_sampled(bench, said):
    engine = await bench.engine()
    bench.brain.says(said)
    async with bench.proxy() as proxy, client(proxy) as api:
        ask = [{"role": "user", "content": "hi"}]
        text, *_ = await answer(api, ask, stream=False, stop=["```"])
        assert text == said.partition("```")[0]
        # The harness gives the turn back trimmed.
        await answer(api, [*ask, {"role": "assistant", "content": text.strip()}, *ask], stream=False)
    first, child = only_log(bench).calls
    assert child.parent == first.call
    sampled = unpack_ids(first.output).tolist()
    prompt = engine.requests[1]["input_ids"]
    assert prompt[child.prefix - len(sampled) : child.prefix] == sampled
    (span,) = child.inserted
    closing = bench.renderer.vocabulary.decode(unpack_ids(child.prompt)[slice(*span)])
    assert closing == ("\n" if sampled[-1] == 2 else "<|im_end|>\n")


async def test_an_answer_on_its_way_out_is_recorded_as_delivered_before_the_log_is_closed(bench):
    await bench.engine()
    request = chat.read_request(b'{"messages": [{"role": "user", "content": "hi"}]}', Defaults())
    async with bench.proxy() as proxy:
        attempt = proxy.service.submit("e1", request, {})
        with attempt.waiting():  # a connection that is being written to
            await attempt.reply
            closing = asyncio.create_task(proxy.service.close("e1"))  # the harness has its answer and has ended
            for _ in range(100):
                await asyncio.sleep(0)
            assert not closing.done()
            proxy.service.delivered("e1", attempt, ok=True)
        assert await closing == 1
    log = only_log(bench)
    assert log.delivered == {log.calls[0].call: True}
