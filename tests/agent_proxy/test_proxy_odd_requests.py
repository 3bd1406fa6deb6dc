"""Thousands of malformed and odd requests: refused or answered, never an error of our own making."""

from __future__ import annotations

import json
import random
from typing import Any

from gyre_agent_proxy.errors import BadRequest

ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e308, 10**30, "", "x", "\x00", "\ud800", "<|im_start|>", "\U0010fffd", "é" * 50,
    [], {}, [None], [[]], [{}], {"a": 1}, {"type": "text"}, {"type": "text", "text": 3},
    [{"type": "text", "text": "t"}],
    [{"type": "image_url", "image_url": {"url": "data:"}}], [{"role": "user", "content": "x"}], "assistant", "tool",
]  # fmt: skip
BASE = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
        {"role": "developer", "content": "late"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "seed": 1,
    "stop": ["a", "b"],
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}


def mutate(rng: random.Random, value: Any) -> Any:
    """`value` with one place in it replaced, removed, doubled or added to."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(["odd", "content", "role", "name", "tool_calls"])] = rng.choice(ODD)
            case _:
                changed[key] = mutate(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        i = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:i] + value[i + 1 :]
            case 1:
                return [*value, value[i]]
            case _:
                return [*value[:i], mutate(rng, value[i]), *value[i + 1 :]]
    return rng.choice(ODD)


def test_ten_thousand_bodies(renderers):
    from gyre_agent_proxy.dialects import chat
    from gyre_agent_proxy.dialects.base import Defaults
    from gyre_agent_proxy.history import History
    from gyre_agent_proxy.roles import Roles
    from gyre_agent_proxy.template import CHATML

    rng, roles, taken = random.Random(0), Roles.load(), 0
    history = History(renderers(CHATML))
    for _ in range(10_000):
        body: Any = BASE
        for _ in range(rng.randrange(1, 4)):
            body = mutate(rng, body)
        raw = json.dumps(body).encode()
        if rng.random() < 0.05:
            raw = raw[: rng.randrange(len(raw) + 1)]
        try:
            request = chat.read_request(raw, Defaults())
            plan = history.plan(request.conversation)
        except BadRequest:
            continue
        roles.role({}, request.conversation)
        assert len(plan.prompt)
        taken += 1
    assert 2_000 < taken < 9_000, "the mutations are neither all harmless nor all fatal"
    assert history.calls == 0


async def test_over_http_no_error_is_ours(bench, http):
    engine = await bench.engine()
    rng = random.Random(1)
    statuses: dict[int, int] = {}
    async with bench.proxy() as proxy:
        for _ in range(300):
            body: Any = BASE
            for _ in range(rng.randrange(1, 4)):
                body = mutate(rng, body)
            async with http.post(
                f"{proxy.url}/v1/chat/completions",
                data=json.dumps(body).encode(),
                headers={"Authorization": "Bearer k", "Content-Type": "application/json"},
            ) as response:
                statuses[response.status] = statuses.get(response.status, 0) + 1
                if response.status != 200:
                    assert (await response.json())["error"]["message"]
        calls = proxy.service.metrics.counts["calls"]
    assert set(statuses) == {200, 400}, statuses
    assert len(engine.requests) == calls, "nothing refused reached an engine"
