"""Thousands of malformed and odd Messages requests: refused or answered, and what is refused changes nothing.

2,000 are made by default and 10,000 with GYRE_TEST_MANY=1 in the environment.
"""

from __future__ import annotations

import itertools
import json
import os

import anthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_agent_proxy.conversation import Reply, ToolCall
from gyre_agent_proxy.dialects import messages
from gyre_agent_proxy.dialects.base import Defaults, Opening
from gyre_agent_proxy.errors import BadRequest
from gyre_agent_proxy.history import History
from gyre_agent_proxy.roles import Roles
from gyre_agent_proxy.template import CHATML

MANY = 10_000 if os.environ.get("GYRE_TEST_MANY") else 2_000
HTTP = MANY if MANY == 10_000 else 400

TEXT = {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "x"}
USE = {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls", "n": [1, None]}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, IMAGE], "is_error": True}
BASH = {"name": "bash", "description": "d", "input_schema": {"type": "object", "properties": {}}}
FULL = {
    "model": "m",
    "system": [{"type": "text", "text": "x-anthropic-billing-header: v;"}, TEXT],
    "messages": [
        {"role": "user", "content": [TEXT, IMAGE, {"type": "document", "source": {"type": "text", "data": "d"}}]},
        {"role": "system", "content": "rule"},
        {"role": "assistant", "content": [THINKING, TEXT, USE, USE | {"id": "c2"}]},
        {
            "role": "user",
            "content": [RESULT, RESULT | {"tool_use_id": "c2", "content": "plain"}, TEXT],
        },
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use"}]},
        {"role": "assistant", "content": "more"},
        {"role": "user", "content": [{"type": "search_result", "content": [TEXT]}, "bare"]},
    ],
    "tools": [BASH, {"type": "web_search_20250305", "name": "web_search"}, BASH | {"type": "custom", "name": "f"}],
    "tool_choice": {"type": "auto"},
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "stop_sequences": ["a", "b"],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": []},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
    "stream": False,
}
NAMES = ["odd", "type", "role", "content", "id", "name", "input", "tool_use_id", "text", "input_schema", "system"]
ODD = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1.5, 1e308, 10**30, "", "\x00", "\ud800", "<|im_start|>", "\U0010fffd", "é" * 9]
    ),
    st.sampled_from([[], {}, [None], [[]], [{}], {"type": "text"}, {"type": "text", "text": 3}, [IMAGE], [TEXT]]),
    st.sampled_from([TEXT, IMAGE, THINKING, USE, RESULT, [USE], [RESULT], [THINKING], {"type": "tool_reference"}]),
    st.sampled_from(["user", "assistant", "system", "tool", "tool_use", "tool_result", "thinking", "image"]),
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)


@st.composite
def odd_bodies(draw):
    """A request in which some places are replaced, removed, doubled or added to."""

    def change(value):
        if isinstance(value, dict) and value and draw(st.integers(0, 9)):
            key = draw(st.sampled_from(sorted(value)))
            match draw(st.integers(0, 7)):
                case 0:
                    return {k: v for k, v in value.items() if k != key}
                case 1:
                    return value | {draw(st.sampled_from(NAMES)): draw(ODD)}
            return value | {key: change(value[key])}
        if isinstance(value, list) and value and draw(st.integers(0, 9)):
            at = draw(st.integers(0, len(value) - 1))
            match draw(st.integers(0, 7)):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return [*value, value[at]]
            return [*value[:at], change(value[at]), *value[at + 1 :]]
        return draw(ODD)

    body = FULL
    for _ in range(draw(st.integers(1, 4))):
        body = change(body)
    raw = json.dumps(body).encode()
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 19)) == 0 else raw


def odd(number):
    quiet = settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    return lambda test: quiet(given(odd_bodies())(test))


def test_thousands_of_odd_requests(renderers):
    """Refused as a bad request, or planned and answerable; planning changes nothing."""
    histories = [History(renderers(t)) for t in (CHATML, "thinking")]
    roles, taken = Roles.load(), [0, 0]
    headers = {"x-claude-code-session-id": "s"}

    @odd(MANY)
    def try_one(raw):
        taken[0] += 1
        try:
            request = messages.read_request(raw, Defaults())
            plans = [history.plan(request.conversation) for history in histories]
        except BadRequest:
            return
        role, known = roles.role(headers, request.conversation)
        assert known
        assert (role == "side") == (not request.conversation.tools)
        assert all(len(p.prompt) for p in plans)
        turns = [m.role for m in request.conversation.messages]
        assert not any(a == b != "tool" for a, b in itertools.pairwise(turns)), "turns alternate"
        calls = (ToolCall(id="c9", name="f", arguments=raw.decode(errors="replace")),)
        reply = Reply(call="c", text="ab", reasoning="hm", calls=calls)
        whole = messages.answer(reply, request, request.model)
        anthropic.types.Message.model_validate_json(json.dumps(whole, allow_nan=False))
        taken[1] += 1

    try_one()
    assert all(h.calls == 0 for h in histories)
    assert 0.1 < taken[1] / taken[0] < 0.9, "the changes are neither all harmless nor all fatal"


async def test_odd_requests_over_http_change_nothing_when_refused(bench, http):
    engine = await bench.engine()
    bodies: list[bytes] = []
    odd(HTTP)(lambda raw: bodies.append(raw))()  # hypothesis wants a function
    statuses: dict[int, int] = {}
    headers = {"x-api-key": "k", "Content-Type": "application/json"}
    async with bench.proxy() as proxy:
        url = f"{proxy.url}/v1/messages"
        async with http.post(url, json=FULL, headers=headers) as response:
            assert response.status == 200
        (path,) = bench.calls.glob("*.gtraj")

        def state():
            execution = proxy.service._executions[path.stem]
            counts = {k: v for k, v in proxy.service.metrics.counts.items() if k != "calls_refused"}
            return path.stat().st_size, counts, len(execution.attempts), execution.history.calls, len(engine.requests)

        for raw in bodies:
            before = state()
            async with http.post(f"{url}/count_tokens", data=raw, headers=headers) as response:
                counted = response.status, await response.read()
            assert state() == before, "counting changes nothing"
            async with http.post(url, data=raw, headers=headers) as response:
                text = await response.text()
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert counted[0] == response.status
            if response.status != 200:
                error = json.loads(text)["error"]
                assert error["type"] == "invalid_request_error"
                assert error["message"]
                assert state() == before
            elif '"type": "message"' in text:
                usage = json.loads(text)["usage"]
                assert json.loads(counted[1])["input_tokens"] == usage["input_tokens"]
        assert set(statuses) == {200, 400}, statuses
        assert proxy.service.metrics.counts["calls"] == statuses[200] + 1
        assert len(list(bench.calls.glob("*"))) == 1


def test_an_opening_without_an_answer_is_still_a_stream():
    request = messages.read_request(json.dumps(FULL).encode(), Defaults())
    encoder = messages.stream(Opening(call="c", created=1, model="m", prompt_tokens=1), request)
    raw = encoder.begin() + encoder.delta("a") + encoder.failure(BadRequest("no"))
    assert raw.endswith(b"\n\n")
    assert raw.count(b"event: ") == raw.count(b"data: ")
