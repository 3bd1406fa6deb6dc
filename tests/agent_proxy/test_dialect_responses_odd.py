"""OpenAI Responses: thousands of malformed and odd requests."""

from __future__ import annotations

import json
import os

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from gyre_agent_proxy.conversation import Reply, ToolCall
from gyre_agent_proxy.dialects import responses
from gyre_agent_proxy.dialects.base import Defaults, Opening
from gyre_agent_proxy.errors import BadRequest
from gyre_agent_proxy.history import History
from gyre_agent_proxy.roles import Roles
from gyre_agent_proxy.template import CHATML
from gyre_agent_proxy.unfolding import Said

ASK = [{"role": "user", "content": "hi"}]
BASH = {
    "type": "function",
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [BASH | {"name": "spawn"}]}
SEARCH = {"type": "web_search"}
SHELL = {"type": "local_shell"}
ASK = [{"role": "user", "content": "hi"}]

REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
USE = {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'}
OUT = {"type": "function_call_output", "call_id": "c1", "output": "a b"}

MANY = 10_000 if os.environ.get("GYRE_TEST_MANY") else 2_000
ODD = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1.5, 1e308, 10**30, "", "x", "\x00", "\ud800", "<|im_start|>", "\U0010fffd"]
    ),
    st.sampled_from(
        [[], {}, [None], [[]], [{}], {"type": "input_text"}, {"type": "text", "text": 3}, [{"type": "input_image"}]]
    ),
    st.sampled_from(
        [ASK, [REASONING], [USE, OUT], "assistant", "developer", "function_call", "custom_tool_call_output"]
    ),
    st.sampled_from(
        ["namespace", "local_shell_call", "local_shell", "item_reference", "compaction", "message", "auto"]
    ),
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)
FULL = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "rule"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        REASONING | {"id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": "x"},
        TEXT,
        USE | {"namespace": "agents"},
        OUT | {"output": [{"type": "input_text", "text": "t"}, {"type": "input_image", "image_url": "data:"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "+x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "compaction", "encrypted_content": "x"},
        {"role": "developer", "content": "late"},
    ],
    "tools": [BASH, PATCH, AGENTS, SEARCH, SHELL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_output_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
    "stream": False,
    "store": False,
}


@st.composite
def odd_bodies(draw):
    """A request in which some places are replaced, removed, doubled or renamed."""

    def change(value):
        if isinstance(value, dict) and value and draw(st.integers(0, 9)):
            key = draw(st.sampled_from(sorted(value)))
            match draw(st.integers(0, 7)):
                case 0:
                    return {k: v for k, v in value.items() if k != key}
                case 1:
                    new = draw(
                        st.sampled_from(["odd", "type", "role", "content", "call_id", "output", "summary", "input"])
                    )
                    return value | {new: draw(ODD)}
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


def test_thousands_of_odd_requests(renderers, talk):
    """Refused as a bad request, or planned and answerable; planning changes nothing."""
    history, roles, taken = History(renderers(CHATML)), Roles.load(), [0, 0]
    opening = Opening(call="c", created=1, model="m", prompt_tokens=1)

    @settings(max_examples=MANY, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(odd_bodies())
    def try_one(raw):
        taken[0] += 1
        try:
            request = responses.read_request(raw, Defaults())
            plan = history.plan(request.conversation)
        except BadRequest:
            return
        roles.role({}, request.conversation)
        assert len(plan.prompt)
        names = [t["function"]["name"] for t in request.conversation.tools]
        assert len(set(names)) == len(names)
        calls = tuple(ToolCall(id=f"c{i}", name=n, arguments='{"input": "x"}') for i, n in enumerate([*names, "none"]))
        reply = Reply(call="c", text="ab", reasoning="hm", calls=calls, created=1)
        whole = msgspec.json.decode(msgspec.json.encode(responses.answer(reply, request, request.model)))
        assert {*Response.model_fields} - {"conversation", "prompt", "prompt_cache_retention"} <= set(whole)
        encoder = responses.stream(opening, request)
        raw = encoder.begin() + encoder.reasoning("h") + encoder.finish(reply, Said("m", "ab"))
        talk.check([json.loads(b.split(b"\n")[1][6:]) for b in raw.strip().split(b"\n\n")])
        taken[1] += 1

    try_one()
    assert history.calls == 0
    assert 0.1 < taken[1] / taken[0] < 0.9, "the changes are neither all harmless nor all fatal"


async def test_odd_requests_over_http_change_nothing_when_refused(bench, http, talk):
    engine = await bench.engine()
    bodies: list[bytes] = []

    @settings(
        max_examples=MANY if MANY == 10_000 else 400,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(odd_bodies())
    def collect(raw):
        bodies.append(raw)

    collect()
    statuses: dict[int, int] = {}
    async with bench.proxy() as proxy:
        await talk(http, proxy).ask(stream=False)
        (path,) = bench.calls.glob("*.gtraj")

        def state():
            execution = proxy.service._executions[path.stem]
            counts = {k: v for k, v in proxy.service.metrics.counts.items() if k != "calls_refused"}
            return path.stat().st_size, counts, len(execution.attempts), execution.history.calls, len(engine.requests)

        for raw in bodies:
            before = state()
            headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
            async with http.post(f"{proxy.url}/v1/responses", data=raw, headers=headers) as response:
                text = await response.text()
                statuses[response.status] = statuses.get(response.status, 0) + 1
                if response.status != 200:
                    assert json.loads(text)["error"]["message"]
                    assert state() == before
        assert set(statuses) == {200, 400}, statuses
        assert proxy.service.metrics.counts["calls"] == statuses[200] + 1
        assert len(list(bench.calls.glob("*"))) == 1
