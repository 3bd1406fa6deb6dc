"""Replays what a harness sent, in order, through a proxy whose engine samples what the harness was answered.

    for each exchange: its body, with the call ids that this proxy made ─▶ proxy ─▶ the same answer
    an exchange whose stream was cut (or whose body is sent again next) is cut here too; the repeat joins it

A wire knows one dialect's shapes: `sampled` is the turn a model would have sampled to give an answer, `answer` reads
one whole answer, `streamed` the events of a stream, `limited` asks for at most so many tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from gyre_traj.log import Log, read_log
from gyre_traj.records import unpack_ids

Json = dict[str, Any]


@dataclass
class Answer:
    """calls: (id, name, arguments) in order."""

    text: str
    calls: list[tuple[str, str, Any]]
    finish: str
    reasoning: str = ""


class Wire(Protocol):
    def answer(self, body: Json) -> Answer: ...

    def streamed(self, events: list[Json]) -> Answer: ...

    def limited(self, body: Json, tokens: int) -> Json: ...


class Chat:
    """Chat Completions."""

    def answer(self, body: Json) -> Answer:
        choice = body["choices"][0]
        message = choice["message"]
        return self._answer([message], choice["finish_reason"])

    def streamed(self, events: list[Json]) -> Answer:
        choices = [c for e in events for c in e["choices"]]
        return self._answer([c["delta"] for c in choices], choices[-1]["finish_reason"])

    def _answer(self, pieces: list[Json], finish: str) -> Answer:
        calls = [
            (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
            for p in pieces
            for c in p.get("tool_calls") or []
        ]
        reasoning = "".join(p.get("reasoning_content") or "" for p in pieces)
        return Answer("".join(p.get("content") or "" for p in pieces), calls, finish, reasoning)

    def limited(self, body: Json, tokens: int) -> Json:
        return {**body, "max_tokens": tokens}


class Messages:
    """Anthropic Messages."""

    def answer(self, body: Json) -> Answer:
        blocks = body["content"]
        return Answer(
            text="".join(b["text"] for b in blocks if b["type"] == "text"),
            calls=[(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"],
            finish=body["stop_reason"],
            reasoning="".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
        )

    def streamed(self, events: list[Json]) -> Answer:
        blocks: list[Json] = []
        parts: list[str] = []
        finish = ""
        for e in events:
            match e["type"]:
                case "content_block_start":
                    blocks.append(dict(e["content_block"]))
                    parts.append("")
                case "content_block_delta":
                    delta = e["delta"]
                    for kind in ("text", "thinking", "partial_json"):
                        parts[e["index"]] += delta.get(kind, "")
                case "message_delta":
                    finish = e["delta"]["stop_reason"]
        for block, part in zip(blocks, parts, strict=True):
            if block["type"] == "tool_use":
                block["input"] = json.loads(part)
            else:
                block[block["type"]] = part
        return self.answer({"content": blocks, "stop_reason": finish})

    def limited(self, body: Json, tokens: int) -> Json:
        return {**body, "max_tokens": tokens}


class Responses:
    """OpenAI Responses; a call's name is the one the model knows."""

    def answer(self, body: Json) -> Answer:
        found = Answer("", [], body["status"])
        for item in body["output"]:
            match item["type"]:
                case "message":
                    found.text += "".join(p["text"] for p in item["content"])
                case "reasoning":
                    found.reasoning += "".join(p["text"] for p in item["content"])
                case "function_call":
                    space = [item["namespace"]] if item.get("namespace") else []
                    name = "__".join([*space, item["name"]])
                    found.calls.append((item["call_id"], name, json.loads(item["arguments"])))
                case "custom_tool_call":
                    found.calls.append((item["call_id"], item["name"], {"input": item["input"]}))
        return found

    def streamed(self, events: list[Json]) -> Answer:
        *_, last = events
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == last["response"]["output"], "the harness reads the items, the last event must agree"
        return self.answer(last["response"])

    def limited(self, body: Json, tokens: int) -> Json:
        return {**body, "max_output_tokens": tokens}


WIRES: dict[str, Wire] = {
    "/v1/chat/completions": Chat(),
    "/v1/messages": Messages(),
    "/v1/responses": Responses(),
}
LENGTH = ("length", "max_tokens", "incomplete")


def sampled(answer: Answer) -> str:
    """The turn a model would have sampled to give this answer."""
    text = f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""
    text += answer.text
    for _, name, arguments in answer.calls:
        text += "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
    return text


@dataclass
class Replayed:
    """What was recorded, and the proxy's counters."""

    log: Log
    counts: dict[str, int]

    @property
    def parents(self) -> list[int | None]:
        """Of each call the index of the call it continues."""
        index = {c.call: i for i, c in enumerate(self.log.calls)}
        return [None if c.parent is None else index[c.parent] for c in self.log.calls]

    @property
    def roles(self) -> list[str]:
        return [c.role for c in self.log.calls]


async def replay(
    bench: Any,
    http: aiohttp.ClientSession,
    capture: list[Json],
    wires: dict[str, Wire] = WIRES,
    vary: Callable[[Json], Json] = dict,
) -> Replayed:
    """Send a capture; every request must be answered 200, and as it was answered to the harness.

    vary: makes another serialisation of a body.
    """
    player = _Player(bench, http, await bench.engine(), wires, vary)
    async with bench.proxy(disconnect_grace=60.0) as proxy:
        player.proxy = proxy
        for i, exchange in enumerate(capture):
            await player.play(exchange, capture[i + 1] if i + 1 < len(capture) else None)
        counts = dict(proxy.service.metrics.counts)
    assert counts["duplicates"] == player.cuts
    (path,) = bench.calls.glob("*.gtraj")
    log = read_log(path)
    sent = {r["rid"]: r["input_ids"] for r in player.engine.requests}
    for call in log.calls:
        prompt = log.full_prompt(call.call).tolist()
        assert prompt == sent[call.attempts[0].rid], "ids sent = ids recorded"
        if call.parent is not None:
            before = log.full_ids(call.parent).tolist()
            assert prompt[: len(before)] == before, "a child begins with its parent's prompt and output"
        assert len(unpack_ids(call.logprobs)) == len(unpack_ids(call.output))
    return Replayed(log, counts)


class _Player:
    def __init__(
        self,
        bench: Any,
        http: aiohttp.ClientSession,
        engine: Any,
        wires: dict[str, Wire],
        vary: Callable[[Json], Json],
    ) -> None:
        self.bench = bench
        self.http = http
        self.engine = engine
        self.wires = wires
        self.vary = vary
        self.proxy: Any = None
        self.cuts = 0
        self._ids: dict[str, str] = {}  # call ids of the capture -> this proxy's
        self._waiting = False  # a cut call is held at the engine, its repeat is next

    async def play(self, exchange: Json, following: Json | None) -> None:
        headers = {k: v for k, v in exchange["headers"].items() if k != "content-length"}
        headers["Authorization"] = "Bearer k"
        ask = (exchange.get("method", "POST"), self.proxy.url + exchange["path"])
        wire = self.wires.get(exchange["path"].partition("?")[0])
        if wire is None:  # liveness, counting
            before = len(self.engine.requests)
            async with self.http.request(*ask, json=exchange["body"], headers=headers) as response:
                assert response.status == 200, await response.text()
            assert len(self.engine.requests) == before
            return
        raw = json.dumps(exchange["body"])
        for theirs, ours in self._ids.items():
            raw = raw.replace(theirs, ours)
        body = self.vary(json.loads(raw))
        recorded = exchange["response"]
        failed = recorded.get("type") == "error"  # the harness was told to come again, and did not
        expected = Answer("any", [], "") if failed else wire.answer(recorded.get("message", recorded))
        turn = self.bench.renderer.vocabulary.encode(sampled(expected))
        if expected.finish in LENGTH:
            body = wire.limited(body, len(turn))
        if self._waiting:
            sending = asyncio.create_task(self._send(ask, body, headers))
            while self.proxy.service.metrics.counts["duplicates"] < self.cuts:
                await asyncio.sleep(0.01)
            self.engine.release()
            self._waiting = False
            events = await sending
        else:
            self.bench.brain.says([*turn, 2])
            if "cut_after" in recorded or _again(exchange, following):
                await self._cut(ask, body, headers)
                return
            events = await self._send(ask, body, headers)
        if failed:
            return
        got = wire.streamed(events) if body.get("stream") else wire.answer(events[0])
        self._ids |= {a[0]: b[0] for a, b in zip(expected.calls, got.calls, strict=True)}
        assert [c[1:] for c in got.calls] == [c[1:] for c in expected.calls]
        assert (got.text, got.finish, got.reasoning) == (expected.text, expected.finish, expected.reasoning)

    async def _send(self, ask: tuple[str, str], body: Json, headers: Json) -> list[Json]:
        """The events of a stream, or the one whole answer."""
        async with self.http.request(*ask, json=body, headers=headers) as response:
            raw = await response.text()
            assert response.status == 200, raw
        if not body.get("stream"):
            return [json.loads(raw)]
        return [json.loads(x[6:]) for x in raw.splitlines() if x.startswith("data: {")]

    async def _cut(self, ask: tuple[str, str], body: Json, headers: Json) -> None:
        """Ask, and hang up when the engine has begun; it goes on when the request is repeated."""
        self.engine.held.clear()
        self.engine._released.clear()
        self.engine.hold = 1
        sending = asyncio.create_task(self._send(ask, body, headers))
        await self.engine.held.wait()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        self.cuts += 1
        self._waiting = True


def _again(exchange: Json, following: Json | None) -> bool:
    """Whether the next request is this one again, whatever its stream mode."""
    if following is None or not isinstance(exchange["body"], dict) or not exchange["body"].get("stream"):
        return False
    return {**following["body"], "stream": True} == exchange["body"] if following["body"] else False
