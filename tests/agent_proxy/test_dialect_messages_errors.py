"""What a Messages client meets beside answers: counting, models, what is left out, errors with their status."""

from __future__ import annotations

import asyncio

import anthropic
import pytest

from gyre_agent_proxy import keys
from gyre_traj.log import read_log

BASH = {
    "name": "bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
USER = {"role": "user", "content": "hi"}


def client(proxy, key="k"):
    return anthropic.AsyncAnthropic(base_url=proxy.url, api_key=key, max_retries=0, timeout=30)


async def ask(api, turns, *, stream=False, **more):
    body = {"model": "policy", "max_tokens": 1000, "messages": turns, **more}
    if not stream:
        return await api.messages.create(**body)
    async with api.messages.stream(**body) as events:
        return await events.get_final_message()


async def test_tokens_are_counted_exactly_and_nothing_changes(bench):
    engine = await bench.engine()
    bench.brain.says("<think>\nhm\n</think>\n\nHello")
    async with bench.proxy() as proxy, client(proxy) as api:
        count = await api.messages.count_tokens(model="m", messages=[USER], system="s", tools=[BASH])
        assert not list(bench.calls.glob("*")), "an execution begins with its first call"
        got = await ask(api, [USER], system="s", tools=[BASH])
        assert count.input_tokens == got.usage.input_tokens == len(engine.requests[0]["input_ids"])
        turns = [USER, {"role": "assistant", "content": got.content[1].text}, USER]
        before = dict(proxy.service.metrics.counts)
        count = await api.messages.count_tokens(model="m", messages=turns, system="s", tools=[BASH])
        assert proxy.service.metrics.counts == before
        await ask(api, turns, system="s", tools=[BASH])
        assert count.input_tokens == len(engine.requests[1]["input_ids"]), "the thinking stays on the path"
        with pytest.raises(anthropic.BadRequestError):
            await api.messages.count_tokens(model="m", messages=[])
    async with bench.proxy() as proxy, client(proxy) as api:
        again = await api.messages.count_tokens(model="m", messages=turns, system="s", tools=[BASH])
        assert again.input_tokens == count.input_tokens, "after a restart too"
    (path,) = bench.calls.glob("*.gtraj")
    assert len(read_log(path).calls) == len(engine.requests) == 2


async def test_liveness_and_models(bench, http):
    async with bench.proxy(context=4096) as proxy, client(proxy) as api:
        for method in ("HEAD", "GET"):
            async with http.request(method, f"{proxy.url}/") as response:
                assert response.status == 200
        page = await api.models.list()
        assert [(m.id, m.type, m.max_input_tokens) for m in page.data] == [("policy", "model", 4096)]
        assert not page.has_more
        assert (await api.models.retrieve("any/other")).id == "any/other"
        async with http.get(f"{proxy.url}/v1/models/x", headers={"Authorization": "Bearer k"}) as response:
            assert (await response.json())["object"] == "model"


async def test_what_cannot_be_used_is_counted_and_kept_in_the_record(bench):
    engine = await bench.engine()
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    async with bench.proxy() as proxy, client(proxy) as api:
        await ask(
            api,
            [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}],
            tools=[BASH, search],
            tool_choice={"type": "auto"},
            thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "u"},
            extra_body={"output_config": {"effort": "high"}, "odd": [1]},
        )
        counts = proxy.service.metrics.counts
        assert (counts["left_out"], counts["media_omitted"]) == (1, 1)
    (path,) = bench.calls.glob("*.gtraj")
    (call,) = read_log(path).calls
    kept = call.request
    assert kept["tools_left_out"] == [search]
    assert (kept["tool_choice"], kept["output_config"], kept["odd"]) == ({"type": "auto"}, {"effort": "high"}, [1])
    assert kept["thinking"] == {"type": "enabled", "budget_tokens": 1024}
    assert call.dialect == "messages"
    prompt = bench.renderer.vocabulary.decode(engine.requests[0]["input_ids"])
    assert "[image omitted: this model reads text only]\nwhat?" in prompt
    assert "web_search" not in prompt


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "kind"),
    [
        ("POST", "/v1/messages", {}, b"{}", 401, "authentication_error"),
        ("POST", "/v1/messages", {"Authorization": "Basic x"}, b"{}", 401, "authentication_error"),
        ("POST", "/v1/messages", {"Authorization": "Bearer k"}, b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages?beta=true", {"x-api-key": "k"}, b"{}", 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"x-api-key": "k"}, b" " * 5000, 413, "request_too_large"),
        ("POST", "/v1/messages/count_tokens", {"x-api-key": "k"}, b"[]", 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", {}, b"[]", 401, "authentication_error"),
        ("GET", "/v1/messages", {"x-api-key": "k"}, None, 405, "invalid_request_error"),
        ("GET", "/v1/nothing", {"anthropic-version": "2023-06-01"}, None, 404, "not_found_error"),
        ("GET", "/v1/models", {"anthropic-version": "2023-06-01"}, None, 401, "authentication_error"),
    ],
)
async def test_errors_have_anthropic_s_shape(bench, http, method, path, headers, body, status, kind):
    async with (
        bench.proxy(max_body=4000) as proxy,
        http.request(method, proxy.url + path, data=body, headers=headers) as response,
    ):
        assert response.status == status
        error = await response.json()
    assert set(error) == {"type", "error", "request_id"}
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert error["error"]["message"]
    assert response.headers["request-id"] == error["request_id"]
    assert not list(bench.calls.glob("*")), "a refused request leaves nothing behind"


async def test_overload_is_529_and_says_when_to_come_again(bench):
    engine = await bench.engine()
    engine.hold = 1
    async with bench.proxy(queue=1) as proxy, client(proxy) as api:
        running = asyncio.create_task(ask(api, [USER]))
        await engine.held.wait()
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(api, [{"role": "user", "content": "other"}], stream=True)
        engine.release()
        await running
    assert caught.value.status_code == 529
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
async def test_without_an_engine_too(bench, stream):
    async with bench.proxy(engines=(), route_wait=0.05) as proxy, client(proxy) as api:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(api, [USER], stream=stream)
    assert caught.value.status_code == 529
    assert caught.value.response.headers["retry-after"]


async def test_other_errors_have_their_status(bench, http):
    engine = await bench.engine()
    secret = b"s" * 64
    key = keys.make_key(secret, "e1")
    async with bench.proxy(secret, context=20, attempts=1) as proxy, client(proxy, key) as api:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 20 maximum"):
            await ask(api, [{"role": "user", "content": "hi " * 50}], stream=True)
        engine.report = (1, {"message": "out of memory", "code": 500})
        with pytest.raises(anthropic.InternalServerError) as caught:
            await ask(api, [{"role": "user", "content": ""}])
        assert (caught.value.status_code, caught.value.body["error"]["type"]) == (500, "api_error")
        url = f"{proxy.url}/gyre/executions/e1/close"
        async with http.post(url, headers={"x-api-key": key}) as response:
            assert response.status == 200
        with pytest.raises(anthropic.PermissionDeniedError) as caught:
            await ask(api, [USER])
        assert caught.value.body["error"]["type"] == "permission_error"
        async with client(proxy, "sk-gyre-e1.forged") as forged:
            with pytest.raises(anthropic.AuthenticationError):
                await ask(forged, [USER])
