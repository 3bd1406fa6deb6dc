"""Answers streamed while they are sampled, in every dialect, with its own client: reasoning, then text, then calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import ClassVar

import anthropic
import openai
import pytest

from gyre_agent_proxy.template import CHATML

ASK = [{"role": "user", "content": "hi"}]
BASH = {"name": "bash", "description": "Run it.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
THOUGHT, TEXT = "I think, hence I am;\nso much is süre 漢字 <b>.", "So: yes, two words"
TURN = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{CALL}"
EXPECTED = (THOUGHT, TEXT, '{"command": "ls"}')


class Chat:
    path = "/v1/chat/completions"
    body: ClassVar = {"messages": ASK, "tools": [{"type": "function", "function": BASH}]}
    reasoning, keepalive = b"reasoning_content", b": keepalive"

    async def pieces(self, url, **more):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=30) as api:
            async for chunk in await api.chat.completions.create(model="m", stream=True, **self.body, **more):
                for choice in chunk.choices:
                    if (reasoning := getattr(choice.delta, "reasoning_content", None)) is not None:
                        yield "reasoning", reasoning
                    if choice.delta.content is not None:
                        yield "text", choice.delta.content
                    for call in choice.delta.tool_calls or []:
                        yield "call", call.function.arguments

    async def whole(self, url, **more):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=30) as api:
            message = (await api.chat.completions.create(model="m", **self.body, **more)).choices[0].message
        calls = "".join(c.function.arguments for c in message.tool_calls or [])
        return getattr(message, "reasoning_content", None) or "", message.content or "", calls

    def stop(self, *stops):
        return {"stop": list(stops)}


class Messages:
    path = "/v1/messages"
    body: ClassVar = {
        "messages": ASK,
        "max_tokens": 1000,
        "tools": [{"name": "bash", "description": "Run it.", "input_schema": BASH["parameters"]}],
    }
    reasoning, keepalive = b'"thinking_delta"', b'"type":"thinking_delta","thinking":""'  # the one a client sees

    async def pieces(self, url, **more):
        kinds = {"thinking_delta": ("reasoning", "thinking"), "text_delta": ("text", "text")}
        kinds["input_json_delta"] = ("call", "partial_json")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0, timeout=30) as api:
            async for event in await api.messages.create(model="m", stream=True, **self.body, **more):
                if event.type == "content_block_delta" and event.delta.type in kinds:
                    kind, field = kinds[event.delta.type]
                    yield kind, getattr(event.delta, field)

    async def whole(self, url, **more):
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0, timeout=30) as api:
            blocks = (await api.messages.create(model="m", **self.body, **more)).content
        parts = {"thinking": "", "text": "", "tool_use": ""}
        for b in blocks:
            parts[b.type] += json.dumps(b.input) if b.type == "tool_use" else getattr(b, b.type)
        return tuple(parts.values())

    def stop(self, *stops):
        return {"stop_sequences": list(stops)}


class Responses:
    path = "/v1/responses"
    body: ClassVar = {"input": ASK, "tools": [{"type": "function", "strict": False, **BASH}]}
    reasoning, keepalive = b"reasoning_text.delta", b"event: keepalive"

    async def pieces(self, url, **more):
        kinds = {"reasoning_text": "reasoning", "output_text": "text", "function_call_arguments": "call"}
        summary = content = ""
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=30) as api:
            async for event in await api.responses.create(model="m", stream=True, **self.body, **more):
                _, _, name = event.type.partition(".")
                what, _, end = name.rpartition(".")
                if end != "delta":
                    continue
                if what == "reasoning_summary_text":
                    summary += event.delta
                    continue
                content += event.delta if what == "reasoning_text" else ""
                yield kinds[what], event.delta
        assert summary == content

    async def whole(self, url, **more):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=30) as api:
            response = await api.responses.create(model="m", **self.body, **more)
        thought = "".join(p.text for i in response.output if i.type == "reasoning" for p in i.content)
        calls = "".join(i.arguments for i in response.output if i.type == "function_call")
        return thought, response.output_text, calls

    def stop(self, *stops):
        return {}  # this API has none


dialects = pytest.mark.parametrize("dialect", [Chat(), Messages(), Responses()], ids=lambda d: type(d).__name__)


async def all_of(pieces):
    return [piece async for piece in pieces]


def together(pieces):
    """(reasoning, text, calls): what the pieces add up to; they must come in this order."""
    kinds = [kind for kind, _ in itertools.groupby(pieces, key=lambda p: p[0])]
    assert kinds == [k for k in ("reasoning", "text", "call") if k in kinds]
    return tuple("".join(p for kind, p in pieces if kind == k) for k in ("reasoning", "text", "call"))


def tokens(bench, text):
    return len(bench.renderer.vocabulary.encode(text))


@dialects
async def test_reasoning_is_sent_while_the_model_thinks_and_text_while_it_speaks(bench, dialect):
    engine = await bench.engine()
    bench.brain.says(TURN)
    engine.hold = tokens(bench, TURN[:40])
    got = []
    async with asyncio.timeout(30), bench.proxy() as proxy, contextlib.aclosing(dialect.pieces(proxy.url)) as pieces:
        while "hence" not in together(got)[0]:
            got.append(await anext(pieces))
        assert len(got) > 2
        assert THOUGHT.startswith(together(got)[0]), "the engine waits in the middle of the reasoning"
        assert not engine._released.is_set()
        engine.hold = tokens(bench, TURN.partition(" words")[0])
        engine._released.set()
        engine._released.clear()
        while "two" not in together(got)[1]:
            got.append(await anext(pieces))
        assert together(got)[0] == THOUGHT
        engine.release()
        got += [piece async for piece in pieces]
    assert together(got) == EXPECTED


@dialects
@pytest.mark.parametrize(
    "at", ["<think>", TURN[:30], TURN[:-80], TURN[:-20]], ids=["opened", "thinking", "text", "call"]
)
async def test_whoever_joins_in_the_middle_gets_everything_once(bench, dialect, at):
    engine = await bench.engine()
    bench.brain.says(TURN)
    engine.hold = tokens(bench, at)
    async with asyncio.timeout(30), bench.proxy() as proxy:
        first = asyncio.create_task(all_of(dialect.pieces(proxy.url)))
        await engine.held.wait()
        others = [asyncio.create_task(all_of(dialect.pieces(proxy.url))) for _ in range(2)]
        whole = asyncio.create_task(dialect.whole(proxy.url))
        while proxy.service.metrics.counts["duplicates"] < 3:
            await asyncio.sleep(0.01)
        engine.release()
        for streamed in await asyncio.gather(first, *others):
            assert together(streamed) == EXPECTED
        assert await whole == EXPECTED
    assert len(engine.requests) == 1


@dialects
@pytest.mark.parametrize(
    ("turn", "stops"),
    [
        ("<think>\n\n</think>\n\nHello", ()),
        ("<think>never closed", ()),
        ("<think></think>" + CALL, ()),
        (" \n<think>hm\n\n\n</think>\n\n\n  Hello\n", ()),
        ("</think>a <think> b </think> c", ()),
        (f"{CALL}\nand\n{CALL}\n", ()),
        ("<tool_call>{broken</tool_call> yes", ()),
        ("cut <tool_call>\n{", ()),
        ("", ()),
        ("<think>a STOP b</think>c", ("STOP",)),
        ("<think>a</think>b <tool_STOP call>", ("STOP", "_STO")),
        ("<think>ST OP </th STO\n</think>STO ST", ("STOP",)),
    ],
)
async def test_a_stream_says_what_the_whole_answer_says(bench, caplog, dialect, turn, stops):
    await bench.engine()
    bench.brain.says(turn, turn)
    more = dialect.stop(*stops) if stops else {}
    async with bench.proxy() as proxy:
        streamed = together(await all_of(dialect.pieces(proxy.url, **more)))
        whole = await dialect.whole(proxy.url, **more)
    assert streamed == whole
    assert "is not the beginning of the answer" not in caplog.text


@dialects
async def test_reasoning_that_the_prompt_opened_is_streamed_too(bench, model_folder, tmp_path, dialect):
    template = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}")
    thinks = type(bench)(model_folder(template), tmp_path / "thinks")
    engine = await thinks.engine()
    thinks.brain.says(TURN.removeprefix("<think>\n"))
    engine.hold = 8
    async with asyncio.timeout(30), thinks.proxy() as proxy:
        try:
            got = []
            async with contextlib.aclosing(dialect.pieces(proxy.url)) as pieces:
                got.append(await anext(pieces))
                assert got[0][0] == "reasoning"
                engine.release()
                got += [piece async for piece in pieces]
        finally:
            await engine.stop()
    assert together(got) == EXPECTED


@dialects
async def test_what_only_its_renderer_can_read_comes_at_the_end(bench, model_folder, tmp_path, dialect):
    packaged = type(bench)(model_folder("thinking"), tmp_path / "packaged")
    engine = await packaged.engine()
    packaged.brain.says(TURN)
    async with asyncio.timeout(60), packaged.proxy(template="qwen3") as proxy:
        try:
            got = await all_of(dialect.pieces(proxy.url))
        finally:
            await engine.stop()
    assert [kind for kind, _ in got] == ["reasoning", "text", "call"]
    assert together(got) == EXPECTED


# --- keepalives ----------------------------------------------------------------------------------------------------


async def raw_stream(http, proxy, dialect, until=None, then=None):
    """The bytes of a stream; once `until` holds for those so far, `then` is called."""
    body, raw = {"model": "m", "stream": True, **dialect.body}, b""
    headers = {"x-api-key": "k"}
    async with http.post(proxy.url + dialect.path, json=body, headers=headers) as response:
        assert response.status == 200
        while until is not None and not until(raw):
            raw += await response.content.readany()
        if then is not None:
            then()
        return raw + await response.read()


def data(raw):
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]


@dialects
async def test_a_pause_in_the_middle_of_thinking_is_filled(bench, http, wires, dialect):
    engine = await bench.engine()
    bench.brain.says(TURN)
    engine.hold = tokens(bench, TURN[:40])
    async with asyncio.timeout(30), bench.proxy(keepalive=0.02) as proxy:
        raw = await raw_stream(http, proxy, dialect, lambda r: r.count(dialect.keepalive) >= 3, engine.release)
    assert raw.index(dialect.reasoning) < raw.index(dialect.keepalive)
    got = wires[dialect.path].streamed([e for e in data(raw) if e.get("type") != "keepalive"])
    assert (got.reasoning, got.text, got.calls[0][2]) == (THOUGHT, TEXT, {"command": "ls"})
    if isinstance(dialect, Messages):
        blocks = [e["content_block"]["type"] for e in data(raw) if e["type"] == "content_block_start"]
        assert blocks == ["thinking", "text", "tool_use"], "and begins no block of its own"


@dialects
async def test_what_is_sampled_but_cannot_be_sent_yet_is_a_pause_too(bench, http, dialect):
    """The arguments of a call, which may be a long file."""
    engine = await bench.engine()
    bench.brain.says(
        '<tool_call>\n{"name": "bash", "arguments": {"command": "' + "echo hi; " * 20 + '"}}\n</tool_call>'
    )
    engine.pace = 0.01
    async with asyncio.timeout(30), bench.proxy(keepalive=0.02) as proxy:
        raw = await raw_stream(http, proxy, dialect)
    before, _, _ = raw.partition(b"echo hi")
    assert before.count(dialect.keepalive) > 1


# --- the events themselves -----------------------------------------------------------------------------------------


def events_of(kinds):
    """Runs of equal pairs and singles as one."""
    return [kind for kind, _ in itertools.groupby(kinds)]


async def test_the_order_of_messages_events(bench, http):
    await bench.engine()
    bench.brain.says(TURN)
    async with bench.proxy() as proxy:
        events = data(await raw_stream(http, proxy, Messages()))
    thinking, text, call = "thinking_delta", "text_delta", "input_json_delta"
    assert events_of((e["type"], e.get("index"), e.get("delta", {}).get("type")) for e in events) == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, thinking),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, text),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, call),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    thought = [e["delta"]["thinking"] for e in events if e.get("delta", {}).get("type") == thinking]
    assert len(thought) > 5
    assert "".join(thought) == THOUGHT


async def test_the_order_of_responses_events(bench, http, talk):
    await bench.engine()
    bench.brain.says(TURN)
    async with bench.proxy() as proxy:
        events = await talk(http, proxy).events(tools=Responses.body["tools"])
    names = [e["type"].removeprefix("response.") for e in events]
    deltas = ["reasoning_summary_text.delta", "reasoning_text.delta"]
    first, last = names.index(deltas[0]), len(names) - names[::-1].index(deltas[1])
    assert names[first:last] == deltas * ((last - first) // 2), "both forms of the reasoning grow together"
    assert last - first > 10
    assert events_of([*names[:first], *deltas, *names[last:]]) == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "content_part.added",
        *deltas,
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    ids = {e.get("item_id") or e["item"]["id"] for e in events if e.get("output_index") == 0}
    assert len(ids) == 1, "an item has one identity"


async def test_the_helpers_of_both_clients_put_a_streamed_answer_together(bench):
    await bench.engine()
    bench.brain.says(TURN, TURN)
    async with bench.proxy() as proxy:
        api = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0)
        async with api, api.responses.stream(model="m", **Responses.body) as stream:
            response = await stream.get_final_response()
        thought, message, call = response.output
        assert (thought.summary[0].text, thought.content[0].text) == (THOUGHT, THOUGHT)
        assert (message.content[0].text, call.arguments) == EXPECTED[1:]
        api = anthropic.AsyncAnthropic(base_url=proxy.url, api_key="k", max_retries=0)
        async with api, api.messages.stream(model="m", **Messages.body) as stream:
            blocks = (await stream.get_final_message()).content
        assert (blocks[0].thinking, blocks[1].text, blocks[2].input) == (THOUGHT, TEXT, {"command": "ls"})
        assert blocks[0].signature
