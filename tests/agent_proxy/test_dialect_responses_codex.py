"""What Codex sent and sends: the trees and roles of its calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_agent_proxy.dialects import responses
from gyre_agent_proxy.dialects.base import Defaults
from gyre_agent_proxy.roles import Roles
from gyre_traj.log import read_log

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures" / "codex"
TURN = "x-codex-turn-metadata"
SEARCH = {"type": "web_search"}
BASH = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}}

# (of each call the call it continues, roles)
M, A = "main", "sub-agent"
EXPECTED = {
    # one tool call, then the answer
    "basic": ([None, 0], [M, M]),
    # the same, with reasoning that comes back without its status
    "think": ([None, 0], [M, M]),
    # the second answer hits the token limit: Codex gives up
    "trunc": ([None, 0], [M, M]),
    # the first stream was cut: the second request is the first again, and joins its call
    "cut": ([None, 0], [M, M]),
    # `codex exec resume`: another user turn on the finished conversation
    "resume": ([None, 0, 1], [M, M, M]),
    # main spawns an agent and waits; the agent's calls, with fewer tools, are a root of their own; main goes on
    "sub": ([None, 0, None, 2, 1], [M, M, A, A, M]),
}


def check(done, name):
    assert (done.parents, done.roles) == EXPECTED[name]
    assert (done.counts["forks"], done.counts["foreign_turns"], done.counts["unknown_roles"]) == (0, 0, 0)
    assert done.counts["left_out"] == len(done.log.calls), "web_search, in every call"
    assert all(c.request["tools_left_out"] == [SEARCH] for c in done.log.calls)


def load(name):
    return json.loads((CAPTURES / f"{name}.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
async def test_what_codex_sent(bench, http, replay, name):
    check(await replay(bench, http, load(name)), name)


@pytest.mark.parametrize("how", [{}, {"renames": True}, {"splits": True}])
@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"cut"}))
async def test_the_same_said_otherwise_is_the_same_tree(bench, http, replay, variations, name, how):
    check(await replay(bench, http, load(name), vary=variations.Responses(len(name), **how)), name)


def test_every_capture_is_counted():
    assert {p.stem for p in CAPTURES.glob("*.json")} == set(EXPECTED)


async def test_codex_compacts_and_goes_on_from_the_summary(bench, http, talk):
    """The history and a question without tools, then a new history around the answer: neither continues a call."""
    await bench.engine()
    look = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    bench.brain.says("I look.\n" + look, "done", "SUMMARY: all done", "going on")

    def message(role, text):
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    system, user = [message("developer", t) for t in "ab"], message("user", "task")
    turn, compaction = ({TURN: json.dumps({"request_kind": kind})} for kind in ("turn", "compaction"))

    async def send(headers, tools, *items):
        got = await talk(http, proxy).ask(stream=True, headers=headers, tools=tools, input=[*system, *items])
        return got["output"]

    async with bench.proxy() as proxy:
        first = await send(turn, [BASH, SEARCH], user)
        history = [user, *first, {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "a b"}]
        history += await send(turn, [BASH, SEARCH], *history)
        (summary,) = await send(compaction, [], *history, message("user", "Summarise."))
        said = message("user", "So far: " + summary["content"][0]["text"])
        await send(turn, [BASH, SEARCH], user, said)
        counts = dict(proxy.service.metrics.counts)
    (path,) = bench.calls.glob("*.gtraj")
    calls = read_log(path).calls
    assert [c.parent for c in calls] == [None, calls[0].call, None, None]
    assert [c.role for c in calls] == [M, M, "main-summary", M]
    assert (counts["foreign_turns"], counts["spliced_turns"], counts["forks"]) == (0, 2, 0)


@pytest.mark.parametrize(
    ("headers", "tools", "role"),
    [
        ({TURN: '{"request_kind": "turn", "thread_source": "user"}'}, [BASH], "main"),
        ({TURN: '{"request_kind": "compaction", "thread_source": "user"}'}, [], "main-summary"),
        ({TURN: '{"request_kind": "compaction", "thread_source": "subagent"}'}, [], "sub-agent-summary"),
        ({TURN: '{"request_kind": "compaction"}', "x-openai-subagent": "collab_spawn"}, [], "sub-agent-summary"),
        ({TURN: '{"request_kind": "turn", "thread_source": "subagent"}'}, [BASH], "sub-agent"),
        ({TURN: "{}", "x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t"}, [BASH], "sub-agent"),
        ({TURN: "{}", "x-openai-subagent": "review"}, [BASH], "sub-agent"),
        ({TURN: "{}", "x-openai-subagent": "compact"}, [], "main-summary"),
        ({TURN: "{}", "x-openai-subagent": "memory_consolidation"}, [], "side"),
        ({TURN: "cut off", "x-codex-parent-thread-id": "t"}, [], "sub-agent-summary"),
        ({TURN: "cut off"}, [], "main-summary"),
        ({TURN: "cut off"}, [BASH], "main"),
        ({"originator": "codex_exec", "session-id": "s"}, [BASH], "main"),
    ],
)
def test_codex_s_roles(headers, tools, role):
    body = {"input": "hi", "tools": [*tools, SEARCH] if tools else []}
    conversation = responses.read_request(json.dumps(body).encode(), Defaults()).conversation
    assert Roles.load().role(headers, conversation) == (role, True)
