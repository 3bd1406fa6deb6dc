"""No interruption: drains, dead engines, aborts and cut connections are invisible and leave exact records."""

from __future__ import annotations

import asyncio

import openai
import pytest

from gyre_agent_proxy.dialects import chat
from gyre_agent_proxy.dialects.base import Defaults
from gyre_agent_proxy.engines import Route
from gyre_agent_proxy.errors import RecordError
from gyre_agent_proxy.pages import PageMoves
from gyre_traj import Tree
from gyre_traj.log import read_log
from gyre_traj.records import Delivered, unpack_ids, unpack_logprobs

ASK = [{"role": "user", "content": "hi"}]
LONG = "a rather long answer that takes its engine quite some tokens to write down"


def client(proxy, key="k"):
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0, timeout=30)


def only_log(bench):
    (path,) = bench.calls.glob("*.gtraj")
    return read_log(path)


async def text_of(api, messages, stream, **more):
    if not stream:
        return (await api.chat.completions.create(model="m", messages=messages, **more)).choices[0].message.content
    chunks = await api.chat.completions.create(model="m", messages=messages, stream=True, **more)
    return "".join([c.choices[0].delta.content or "" async for c in chunks])


def check_whole(bench, engines, text, moved_at):
    """One consistent call: ids as uninterrupted, continuous counts, every attempt continues from the tokens it had."""
    (call,) = only_log(bench).calls
    ((prompt, sampled),) = bench.brain.known
    assert bench.renderer.vocabulary.decode(sampled[:-1]) == text
    assert unpack_ids(call.output).tolist() == sampled
    assert len(unpack_logprobs(call.logprobs)) == len(sampled)
    assert [(s.start, s.end) for s in call.versions] == [(0, moved_at), (moved_at, len(sampled))]
    first, second = call.attempts
    assert first.engine != second.engine
    assert first.rid != second.rid
    assert (first.tokens, second.tokens) == (moved_at, len(sampled) - moved_at)
    requests = {r["rid"]: r for e in engines for r in e.requests}
    assert requests[first.rid]["input_ids"] == prompt
    assert requests[second.rid]["input_ids"] == prompt + sampled[:moved_at]
    limits = [requests[a.rid]["sampling_params"]["max_new_tokens"] for a in call.attempts]
    assert limits[1] == limits[0] - moved_at
    return call


async def two_engines(bench):
    """(engine that gets the first call, the other one); weights of versions 3 and 4."""
    engines = [await bench.engine(), await bench.engine()]
    first, second = sorted(engines, key=lambda e: e.url)
    first.version, second.version = "3", "4"
    return first, second


@pytest.mark.parametrize(("gather", "most"), [(0.0, 100), (20.0, 2)])
async def test_tokens_are_gathered_for_a_stream_until_its_end(bench, gather, most):
    engine = await bench.engine()
    engine.pace = 0.001
    bench.brain.says(LONG)
    async with bench.proxy(gather=gather) as proxy, client(proxy) as api, asyncio.timeout(15):
        chunks = await api.chat.completions.create(model="m", messages=ASK, stream=True)
        told = [text async for c in chunks if c.choices and (text := c.choices[0].delta.content)]
    assert "".join(told) == LONG
    assert most / 20 < len(told) <= most


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
async def test_drain_while_a_call_is_sampled(bench, stream, incremental):
    a, b = await two_engines(bench)
    a.hold, a.incremental, b.incremental = 5, incremental, incremental
    bench.brain.says(LONG)
    async with bench.proxy() as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, stream))
        await a.held.wait()
        state = proxy.pool.engines[a.url]
        proxy.pool.update(1, [Route(b.url, b.url)], [a.url])
        proxy.pool.drain(a.url)
        assert await asking == LONG
        assert not state.active
        assert state.moved == 1
        counts = proxy.service.metrics.counts
        assert (counts["moves"], counts["calls_moved"], counts["engine_failures"]) == (1, 1, 0)
    call = check_whole(bench, [a, b], LONG, 5)
    assert call.attempts[0].end == "drain"
    assert a.aborts == [call.attempts[0].rid] * len(a.aborts)
    assert a.aborts
    assert not a.running, "no orphan keeps decoding"


@pytest.mark.parametrize(("stream", "interval", "sent"), [(True, 16, 7), (False, 1, 7), (False, 3, 7), (False, 16, 1)])
@pytest.mark.parametrize("incremental", [False, True])
async def test_engine_dies_while_a_call_is_sampled(bench, stream, interval, sent, incremental):
    a, b = await two_engines(bench)
    a.hold, a.incremental, b.incremental = 7, incremental, incremental
    bench.brain.says(LONG)
    async with bench.proxy(whole_interval=interval, backoff_limit=9, backoff=9) as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, stream))
        await a.held.wait()
        await a.die()
        assert await asking == LONG
        assert proxy.service.metrics.counts["calls_failed"] == 0
    call = check_whole(bench, [a, b], LONG, sent)
    assert call.attempts[0].end.startswith("error")


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_a_dead_engine_that_did_not_say_which_weights_sampled_them(bench, stream):
    a, _ = await two_engines(bench)
    a.swap, a.hold, a.spans = (3, "9"), 11, False
    bench.brain.says(LONG)
    async with bench.proxy(whole_interval=4, backoff_limit=9, backoff=9) as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, stream))
        await a.held.wait()
        await a.die()
        assert await asking == LONG
    (call,) = only_log(bench).calls
    first, second = call.attempts
    assert unpack_ids(call.output).tolist() == bench.brain.known[0][1]
    if stream:  # an event a token: the label is enough
        assert [(s.version, s.start, s.end) for s in call.versions] == [(3, 0, 3), (9, 3, 11), (4, 11, 61)]
        assert (first.tokens, second.tokens) == (11, 50)
    else:  # given up from the event that may hold both, and sampled again
        assert [(s.version, s.start, s.end) for s in call.versions] == [(3, 0, 1), (4, 1, 61)]
        assert (first.tokens, second.tokens) == (1, 60)


async def test_an_engine_that_begins_to_drain_while_pages_are_fetched_gets_no_request(bench, monkeypatch):
    a, b = await two_engines(bench)
    c = await bench.engine()
    async with bench.proxy() as proxy, client(proxy) as api:

        async def bring(pages, source, target, tokens):
            proxy.pool.update(3, [Route(c.url, c.url)], [a.url, b.url])

        proxy.pool.update(1, [Route(a.url, a.url)])
        await text_of(api, ASK, False)
        monkeypatch.setattr(PageMoves, "bring", bring)
        proxy.pool.update(2, [Route(b.url, b.url)], [a.url])
        await text_of(api, [{"role": "user", "content": "and then?"}], False)
    assert [len(e.requests) for e in (a, b, c)] == [1, 0, 1]


async def test_an_abort_nobody_here_asked_for_is_continued(bench):
    a, b = await two_engines(bench)
    a.self_abort = 4
    bench.brain.says(LONG)
    async with bench.proxy() as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, False))
        while not a.requests:
            await asyncio.sleep(0)
        proxy.pool.update(1, [Route(b.url, b.url)], [])
        assert await asking == LONG
    check_whole(bench, [a, b], LONG, 4)


@pytest.mark.parametrize("cut", [0, 3])
async def test_a_broken_connection_is_continued_on_the_same_engine_if_there_is_no_other(bench, cut):
    a = await bench.engine()
    a.cut = cut
    bench.brain.says(*[LONG] * 100)  # without a token there is nothing to continue: the engine samples anew
    async with bench.proxy(attempts=100) as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, True))
        while len(a.requests) < 3:
            await asyncio.sleep(0.001)
        a.cut = None
        assert await asking == LONG
    (call,) = only_log(bench).calls
    assert len(call.attempts) >= 3
    assert sum(t.tokens for t in call.attempts) == len(unpack_ids(call.output))
    assert bench.renderer.vocabulary.decode(unpack_ids(call.output)[:-1]) == LONG


@pytest.mark.parametrize("stream", [True, False])  # in events of a token, or most of the rest in one
async def test_a_stop_string_that_spans_the_cut_ends_the_call(bench, stream):
    a, b = await two_engines(bench)
    vocabulary = bench.renderer.vocabulary
    tokens = [vocabulary.encode(c)[0] for c in "def x```abcdefgh"]
    assert vocabulary.decode(tokens) == "def x```abcdefgh"
    bench.brain.says([*tokens, 2])
    a.hold = 6  # the first of three back-ticks
    async with bench.proxy() as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, stream, stop=["```"]))
        await a.held.wait()
        proxy.pool.update(1, [Route(b.url, b.url)], [a.url])
        proxy.pool.drain(a.url)
        assert await asking == "def x"
    (call,) = only_log(bench).calls
    assert unpack_ids(call.output).tolist() == tokens[:8]
    assert len(unpack_logprobs(call.logprobs)) == 8
    assert (call.finish, call.matched_stop) == ("stop", "```")
    assert [t.tokens for t in call.attempts] == [6, 2]
    assert call.versions[-1].end == 8


async def test_a_call_waits_while_no_engine_is_routable_and_its_stream_is_kept_alive(bench, http):
    a = await bench.engine()
    bench.brain.says(LONG)
    async with bench.proxy(keepalive=0.02) as proxy:
        proxy.pool.update(1, [], [])
        headers = {"Authorization": "Bearer k"}
        body = {"messages": ASK, "stream": True}
        async with http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
            assert (await response.content.readline()).strip() == b": keepalive"
            proxy.pool.update(2, [Route("a", a.url)])
            await proxy.pool.notify()
            rest = await response.text()
    assert rest.endswith("data: [DONE]\n\n")


async def test_without_any_engine_the_call_fails_in_the_end_with_a_clear_error(bench):
    async with bench.proxy(route_wait=0.05) as proxy, client(proxy) as api:
        with pytest.raises(openai.InternalServerError, match="no engine took the call within"):
            await text_of(api, ASK, False)
        assert proxy.service.metrics.counts["calls_failed"] == 1


async def test_engines_that_fail_every_time_are_given_up_after_the_limit(bench):
    a = await bench.engine()
    a.cut = 0
    async with bench.proxy(attempts=3) as proxy, client(proxy) as api:
        with pytest.raises(openai.APIStatusError, match="engines failed this call 3 times"):
            await text_of(api, ASK, False)
    assert len(a.requests) == 3


async def test_what_the_engine_refuses_is_the_harness_s_error(bench):
    a = await bench.engine()
    a.refuse = "The input is longer than the model's context length."
    async with bench.proxy() as proxy, client(proxy) as api:
        with pytest.raises(openai.BadRequestError, match="longer than the model's context length"):
            await text_of(api, ASK, False)
        assert proxy.service.metrics.counts["calls_failed"] == 0
        assert proxy.service.metrics.counts["calls_refused"] == 1


@pytest.mark.parametrize(("after", "code"), [(3, 400), (3, 500), (0, 500), (0, None)])
async def test_an_engine_s_error_event_is_continued_elsewhere(bench, after, code):
    a, b = await two_engines(bench)
    a.report = after, {"message": "out of memory"} | ({"code": code} if code else {})
    bench.brain.says(LONG, LONG)  # one that failed at once has used up its answer
    async with bench.proxy() as proxy, client(proxy) as api:
        assert await text_of(api, ASK, False) == LONG
        counts = proxy.service.metrics.counts
        assert (counts["engine_failures"], counts["calls"], counts["calls_moved"]) == (1, 1, int(after > 0))
    assert b.requests


async def test_an_error_event_with_400_before_the_first_token_refuses_the_request(bench):
    a = await bench.engine()
    a.report = 0, {"message": "longer than the context", "code": 400}
    async with bench.proxy() as proxy, client(proxy) as api:
        with pytest.raises(openai.BadRequestError, match="longer than the context"):
            await text_of(api, ASK, False)
    assert len(a.requests) == 1


async def test_a_request_refused_in_the_stream_is_the_harness_s_error_and_nothing_was_sampled(bench):
    a = await bench.engine()
    a.rejects = "Failed to compile json grammar"
    async with bench.proxy() as proxy, client(proxy) as api:
        with pytest.raises(openai.BadRequestError, match="Failed to compile"):
            await text_of(api, ASK, False)
        counts = proxy.service.metrics.counts
        assert (counts["calls_refused"], counts["engine_failures"], counts["completion_tokens"]) == (1, 0, 0)
    assert len(a.requests) == 1
    assert only_log(bench).calls == []


async def test_what_an_engine_samples_for_a_call_it_refuses_to_go_on_with_is_not_taken(bench):
    a, b = await two_engines(bench)
    a.hold, b.rejects = 5, "not here"
    bench.brain.says(LONG)
    async with bench.proxy() as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, False))
        await a.held.wait()
        proxy.pool.update(1, [Route(b.url, b.url)], [a.url])
        proxy.pool.drain(a.url)
        assert await asking == LONG
        assert proxy.service.metrics.counts["engine_failures"] == 1
    (call,) = only_log(bench).calls
    ends = [(x.tokens, x.end) for x in call.attempts]
    assert ends[:2] == [(5, "drain"), (0, "error: refused by the engine: not here")]
    assert unpack_ids(call.output).tolist() == bench.brain.known[0][1]


async def test_a_call_nobody_waits_for_is_no_move_of_the_drain_it_was_told_of(bench):
    a = await bench.engine()
    a.hold = 3
    async with bench.proxy() as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, False))
        await a.held.wait()
        (generation,) = proxy.pool.engines[a.url].active
        generation.move("drain")
        generation.abandon()
        with pytest.raises(openai.APIStatusError):
            await asking
        counts = proxy.service.metrics.counts
        assert (counts["moves"], counts["calls"], counts["calls_aborted"], counts["calls_moved"]) == (0, 0, 1, 0)


async def test_a_call_is_recorded_once_when_the_record_of_its_delivery_fails(bench):
    a = await bench.engine()
    a.hold = 3
    async with bench.proxy() as proxy, client(proxy) as api:
        append = proxy.service._recorder.append

        def full(execution, record):
            if isinstance(record, Delivered):
                raise RecordError("no space left")
            append(execution, record)

        proxy.service._recorder.append = full
        asking = asyncio.create_task(text_of(api, ASK, False))
        await a.held.wait()
        (generation,) = proxy.pool.engines[a.url].active
        generation.abandon()
        with pytest.raises(openai.APIStatusError):
            await asking
    log = only_log(bench)
    assert [c.finish for c in log.calls] == ["abort"]
    assert Tree.from_log(log).trainable == 0


async def test_a_failed_attempt_leaves_the_one_that_replaced_it(bench):
    a = await bench.engine()
    a.hold = 3
    request = chat.read_request(b'{"messages": [{"role": "user", "content": "hi"}]}', Defaults())
    async with bench.proxy() as proxy:
        first = proxy.service.submit("e", request, {})
        await a.held.wait()
        first.generation.abandon()  # no longer joinable
        append = proxy.service._recorder.append

        def full(execution, record):
            proxy.service._recorder.append = append
            raise RecordError("no space left")

        proxy.service._recorder.append = full
        second = proxy.service.submit("e", request, {})
        assert second is not first
        with pytest.raises(RecordError):
            await first.reply
        assert proxy.service.submit("e", request, {}) is second
        a.release()
        await second.reply


async def test_a_client_that_goes_away_ends_its_generation_at_the_engine(bench):
    a = await bench.engine()
    a.hold = 3
    async with bench.proxy() as proxy, client(proxy) as api:
        asking = asyncio.create_task(text_of(api, ASK, False))
        await a.held.wait()
        asking.cancel()
        while not a.aborts or a.running:
            await asyncio.sleep(0.001)
        while not proxy.service.metrics.counts["calls_aborted"]:
            await asyncio.sleep(0.001)
    log = only_log(bench)
    (call,) = log.calls
    assert (call.finish, len(unpack_ids(call.output))) == ("abort", 3)
    assert log.delivered[call.call] is False


async def test_an_equal_request_in_flight_joins_in_the_other_stream_mode(bench):
    a = await bench.engine()
    a.hold = 3
    bench.brain.says(LONG)
    async with bench.proxy() as proxy, client(proxy) as api:
        first = asyncio.create_task(text_of(api, ASK, True))
        await a.held.wait()
        second = asyncio.create_task(text_of(api, ASK, False))
        while not proxy.service.metrics.counts["duplicates"]:
            await asyncio.sleep(0.001)
        a.release()
        assert await asyncio.gather(first, second) == [LONG, LONG]
        # After full delivery an equal request is a new sample: a sibling.
        bench.brain.says("another")
        assert await text_of(api, ASK, False) == "another"
    calls = only_log(bench).calls
    assert [c.parent for c in calls] == [None, None]
    assert len(a.requests) == 2


async def test_a_lost_stream_is_repeated_within_the_grace_and_joins(bench, http):
    a = await bench.engine()
    a.hold = 3
    bench.brain.says(LONG)
    async with bench.proxy(disconnect_grace=30.0) as proxy, client(proxy) as api:
        lost = asyncio.create_task(text_of(api, ASK, True))
        await a.held.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        again = asyncio.create_task(text_of(api, ASK, False))
        while not proxy.service.metrics.counts["duplicates"]:
            await asyncio.sleep(0.001)
        a.release()
        assert await again == LONG
    assert len(only_log(bench).calls) == 1
    assert len(a.requests) == 1
