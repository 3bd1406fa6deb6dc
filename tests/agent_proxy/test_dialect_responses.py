"""OpenAI Responses through the proxy: what Codex sent, and the openai client over scripted engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures" / "codex"

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


@pytest.mark.parametrize("name", EXPECTED)
async def test_what_codex_sent(bench, http, replay, name):
    done = await replay(bench, http, json.loads((CAPTURES / f"{name}.json").read_text()))
    assert (done.parents, done.roles) == EXPECTED[name]
    assert (done.counts["forks"], done.counts["foreign_turns"], done.counts["unknown_roles"]) == (0, 0, 0)
