"""What a proxy keeps over hours is bounded, and nothing about an answer that has gone out can fail any more."""

from __future__ import annotations

import json

import pytest

from gyre_agent_proxy.dialects import chat
from gyre_agent_proxy.dialects.base import Defaults
from gyre_agent_proxy.errors import RecordError
from gyre_traj.log import read_log
from gyre_traj.records import Delivered

ASK = [{"role": "user", "content": "hi"}]


async def ask(http, proxy, key, messages=ASK, path="/v1/chat/completions", **fields):
    body = {"model": "m", "messages": messages, **fields}
    async with http.post(f"{proxy.url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        return response.status, await response.json()


async def test_silent_executions_are_set_aside_and_go_on_from_their_logs(bench, http):
    await bench.engine()
    async with bench.proxy(executions=2) as proxy:
        talks = {}
        for key in "abc":
            _, answer = await ask(http, proxy, key)
            talks[key] = [*ASK, answer["choices"][0]["message"], {"role": "user", "content": "more"}]
        service = proxy.service
        assert service.stats["open_executions"] == 2
        assert len(service._recorder._writers) == 2
        assert len(next(iter(proxy.pool.engines.values())).executions) == 2
        for key in "cab":  # the one that was set aside comes second
            status, _ = await ask(http, proxy, key, talks[key])
            assert status == 200
        counts = service.metrics.counts
        assert (counts["executions"], counts["roots"], counts["calls"]) == (3, 3, 6)
        assert counts["executions_set_aside"] == 3
        assert service.stats["open_executions"] == 2
    for path in bench.calls.glob("*.gtraj"):
        first, second = read_log(path).calls
        assert (first.parent, second.parent) == (None, first.call)


async def test_an_execution_with_an_open_call_is_never_set_aside(bench, http):
    engine = await bench.engine()
    engine.hold = 1
    request = chat.read_request(json.dumps({"messages": ASK}).encode(), Defaults())
    async with bench.proxy(executions=1, disconnect_grace=60.0) as proxy:
        first = proxy.service.submit("busy", request, {})
        await engine.held.wait()
        for key in "ab":
            await ask(http, proxy, key, path="/v1/messages/count_tokens")
        second = proxy.service.submit("other", request, {})
        assert proxy.service.stats["open_executions"] == 2
        engine.release()
        await first.reply
        await second.reply


async def test_an_answer_that_waits_to_be_asked_for_again_holds_no_prompt(bench):
    engine = await bench.engine()
    request = chat.read_request(json.dumps({"messages": ASK, "odd": 1}).encode(), Defaults())
    async with bench.proxy(disconnect_grace=60.0) as proxy:
        attempt = proxy.service.submit("e", request, {})
        await attempt.reply
        (kept,) = proxy.service._executions["e"].attempts.values()
        assert kept is attempt
        assert attempt.generation is None
        assert (attempt.request.conversation.messages, attempt.request.other) == ((), {})
        assert proxy.service.submit("e", request, {}) is attempt, "and is still found"
    assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_gone_out_when_the_record_of_it_fails(bench, http, stream, caplog):
    await bench.engine()
    async with bench.proxy() as proxy:
        append = proxy.service._recorder.append

        def full(execution, record):
            if isinstance(record, Delivered):
                raise RecordError("no space left")
            append(execution, record)

        proxy.service._recorder.append = full
        body = {"model": "m", "messages": ASK, "stream": stream}
        headers = {"Authorization": "Bearer k"}
        async with http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
        assert text.endswith("data: [DONE]\n\n") if stream else json.loads(text)["choices"]
        counts = proxy.service.metrics.counts
        assert (counts["deliveries_unrecorded"], counts["calls_failed"]) == (1, 0)
    assert "no space left" in caplog.text


async def test_what_is_nested_too_deeply_is_refused(bench, http):
    engine = await bench.engine()
    async with bench.proxy() as proxy:
        for depth in (*range(850, 1000, 3), 5_000):
            inner = '{"a":' * depth + "1" + "}" * depth
            tool = '{"type": "function", "function": {"name": "f", "parameters": %s}}'
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool % inner}]}}'
            headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
            async with http.post(f"{proxy.url}/v1/chat/completions", data=body, headers=headers) as response:
                answer = await response.json()
                assert response.status in (200, 400), answer
        assert response.status == 400
        assert len(engine.requests) == proxy.service.metrics.counts["calls"]
