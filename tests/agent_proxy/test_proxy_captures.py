"""What real harnesses sent (their words replaced), replayed: each conversation becomes the tree a person would draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures"


def sampled(message):
    """The turn a model would have sampled to give this answer."""
    text = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if message.get("reasoning_content") else ""
    text += message.get("content") or ""
    for call in message.get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"])
        text += (
            "<tool_call>\n" + json.dumps({"name": call["function"]["name"], "arguments": arguments}) + "\n</tool_call>"
        )
    return text


async def replay(bench, http, capture):
    """Send a capture's requests in order, each with the call ids this proxy made; returns the log and the counters."""
    ids: dict[str, str] = {}
    engine = await bench.engine()
    async with bench.proxy() as proxy:
        for exchange in capture:
            body = json.dumps(exchange["body"])
            for theirs, ours in ids.items():
                body = body.replace(theirs, ours)
            choice = exchange["response"]["choices"][0]
            turn = bench.renderer.vocabulary.encode(sampled(choice["message"]))
            body = json.loads(body)
            if choice["finish_reason"] == "length":
                body |= {"max_tokens": len(turn)}
            bench.brain.says([*turn, 2])
            headers = {**exchange["headers"], "Authorization": "Bearer k"}
            headers.pop("content-length", None)
            async with http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                raw = await response.text()
            calls = []
            if body.get("stream"):
                events = [json.loads(x[6:]) for x in raw.splitlines() if x.startswith("data: {")]
                deltas = [c["delta"] for e in events for c in e["choices"]]
                calls = [c for d in deltas for c in d.get("tool_calls") or []]
                text = "".join(d.get("content") or "" for d in deltas)
                finish = [c["finish_reason"] for e in events for c in e["choices"]][-1]
            else:
                answer = json.loads(raw)["choices"][0]
                calls, text = answer["message"].get("tool_calls") or [], answer["message"]["content"] or ""
                finish = answer["finish_reason"]
            theirs = choice["message"].get("tool_calls") or []
            assert text == (choice["message"].get("content") or "")
            assert finish == choice["finish_reason"]
            assert len(calls) == len(theirs)
            ids |= {a["id"]: b["id"] for a, b in zip(theirs, calls, strict=True)}
        counts = dict(proxy.service.metrics.counts)
    (path,) = bench.calls.glob("*.gtraj")
    log = read_log(path)
    sent = {r["rid"]: r["input_ids"] for r in engine.requests}
    for call in log.calls:
        prompt = log.full_prompt(call.call).tolist()
        assert prompt == sent[call.attempts[0].rid]
        if call.parent is not None:
            before = log.full_ids(call.parent).tolist()
            assert prompt[: len(before)] == before
        assert len(unpack_ids(call.logprobs)) == len(unpack_ids(call.output))
    return log, counts


# (roots, turns encoded from text because they were never sampled here, sampled turns spliced into another root, roles)
M, S, T = "main", "main-summary", "side"
EXPECTED = {
    "mini-swe-agent/mini": (1, 0, 0, [M, M]),
    "mini-swe-agent/mini-par": (1, 0, 0, [M, M, M, M]),
    "mini-swe-agent/mini-textbased": (1, 0, 0, [M, M]),
    "mini-swe-agent/mini-think": (1, 0, 0, [M, M]),
    "mini-swe-agent/mini-trunc": (1, 0, 0, [M, M]),
    "openhands-sdk/basic": (1, 0, 0, [M, M]),
    "opencode/basic": (2, 0, 0, [T, M, M]),
    "opencode/par": (2, 0, 0, [T, M, M]),
    "opencode/multi": (2, 0, 0, [T, M, M]),
    "opencode/think": (2, 0, 0, [T, M, M]),
    "opencode/trunc": (2, 0, 0, [T, M, M]),
    "opencode/compact": (12, 0, 5, [T, M, M, S, M, S, M, S, M, S, M, S, M]),
    "qwen-code/basic": (1, 1, 0, [M, M]),
    "qwen-code/par": (1, 1, 0, [M, M]),
    "qwen-code/trunc": (1, 1, 0, [M, M, M]),
    "qwen-code/cut": (1, 1, 0, [M]),
    "qwen-code/compact": (10, 10, 14, [M, M, S, M, S, M, S, M, S, M, S, M]),
}


@pytest.mark.parametrize("name", EXPECTED)
async def test_replay(bench, http, name):
    capture = json.loads((CAPTURES / f"{name}.json").read_text())
    log, counts = await replay(bench, http, capture)
    roots, foreign, spliced, roles = EXPECTED[name]
    assert (counts["roots"], counts["forks"]) == (roots, 0)
    assert (counts["foreign_turns"], counts["spliced_turns"]) == (foreign, spliced)
    assert [c.role for c in log.calls] == roles
