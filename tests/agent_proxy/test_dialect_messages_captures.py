"""What Claude Code sent (its words replaced), replayed as it was, and as it might be serialised another time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures" / "claude-code"
MAIN, SUMMARY, SUB, TITLE = "main", "main-summary", "sub-agent", "side"

# name: (parents, roles, sampled turns spliced into a new root, turns of the harness's own making)
#
# One call that makes up a title is a root of its own, except where the harness was told to leave it out ("lean"). Then
# the work: a call, the tool, a call that goes on from it.
WORK = ([None, None, 1], [TITLE, MAIN, MAIN], 0, 0)
EXPECTED: dict[str, tuple[list[int | None], list[str], int, int]] = {
    "basic": WORK,
    "claudemodel": WORK,
    "cut": WORK,  # the title's stream is cut; its repeat, not streamed, is given the same answer
    "err529": WORK,  # the title's call was told to come again, and never did
    "image": WORK,  # a picture in a tool's result
    "par": WORK,  # two calls at once
    "think": WORK,
    "lean": ([None, 0], [MAIN, MAIN], 0, 0),
    # The sub-agent is a root with tools and a system prompt of its own; the main conversation goes on from its call.
    "sub": ([None, None, None, 2, 1], [TITLE, MAIN, SUB, SUB, MAIN], 0, 0),
    "sub-lean": ([None, None, 1, 0], [MAIN, SUB, SUB, MAIN], 0, 0),
    # A message of the user's and a demand for a summary are two branches after the tool's result. The session goes on
    # under a new root, into which the last answer is taken over as it was sampled.
    "multiturn": ([None, None, 1, 1, None, 4], [TITLE, MAIN, MAIN, SUMMARY, MAIN, MAIN], 1, 0),
    # A second process resumes: one more turn, and beside it the summary. After the new root the harness says something
    # itself where it was interrupted ("No response requested.").
    "resume": ([None, None, 1, 2, 2, None, 5], [TITLE, MAIN, MAIN, MAIN, SUMMARY, MAIN, MAIN], 1, 1),
}


def load(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CAPTURES / f"{name}.json").read_text())
    return found


def check(done: Any, name: str) -> None:
    parents, roles, spliced, foreign = EXPECTED[name]
    assert done.parents == parents
    assert done.roles == roles
    counts = done.counts
    assert (counts["spliced_turns"], counts["foreign_turns"], counts["forks"]) == (spliced, foreign, 0)
    assert (counts["restored_turns"], counts["unknown_roles"], counts["calls_failed"]) == (0, 0, 0)
    assert counts["media_omitted"] == (name == "image")


def test_every_capture_is_replayed():
    assert {p.stem for p in CAPTURES.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
async def test_replay(bench, http, replay, name):
    check(await replay(bench, http, load(name)), name)


class Variation:
    """Another serialisation of the same request."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        body = {**body, "metadata": {"user_id": f"user {self._rng.random()}"}}
        if isinstance(system := body.get("system"), list):
            header = {"type": "text", "text": f"x-anthropic-billing-header: v={self._rng.random()};"}
            rest = [b for b in system if not b["text"].startswith("x-anthropic-billing-header:")]
            body["system"] = [header, *map(self._block, rest)] if self._rng.random() < 0.8 else rest
        body["messages"] = [m for message in body["messages"] for m in self._message(message)]
        body["tools"] = [{**t, **self._cache()} for t in body.get("tools") or []]
        return self._shuffled(body)

    def _message(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            blocks: list[dict[str, Any]] = [{"type": "text", "text": content}]
        else:
            blocks = [self._block(b) for b in content]
        if role == "system":
            return [{"role": role, "content": content}]
        if role == "assistant" and self._rng.random() < 0.3:
            blocks = [b for b in blocks if b["type"] != "thinking"]
        if len(blocks) > 1 and self._rng.random() < 0.3:  # consecutive messages of one role are one turn
            at = self._rng.randrange(1, len(blocks))
            return [{"role": role, "content": blocks[:at]}, {"role": role, "content": blocks[at:]}]
        if len(blocks) == 1 and blocks[0]["type"] == "text" and self._rng.random() < 0.5:
            return [{"role": role, "content": blocks[0]["text"]}]
        return [self._shuffled({"role": role, "content": blocks})]

    def _block(self, block: dict[str, Any]) -> dict[str, Any]:
        block = {k: v for k, v in block.items() if k != "cache_control"} | self._cache()
        if block["type"] == "tool_use":
            block["input"] = self._shuffled(block["input"])
        if block["type"] == "tool_result" and isinstance(block["content"], str) and self._rng.random() < 0.5:
            block["content"] = [{"type": "text", "text": block["content"]}]
        if block["type"] == "tool_result" and block.get("is_error") is False and self._rng.random() < 0.5:
            del block["is_error"]
        if block["type"] == "thinking":
            block["signature"] = f"{self._rng.random()}"
        return self._shuffled(block)

    def _cache(self) -> dict[str, Any]:
        return {"cache_control": {"type": "ephemeral", "ttl": "1h"}} if self._rng.random() < 0.3 else {}

    def _shuffled(self, value: dict[str, Any]) -> dict[str, Any]:
        keys = list(value)
        self._rng.shuffle(keys)
        return {k: value[k] for k in keys}


@pytest.mark.parametrize("name", EXPECTED)
async def test_the_same_said_otherwise_is_the_same_tree(bench, http, replay, name):
    check(await replay(bench, http, load(name), vary=Variation(len(name))), name)


async def test_agents_that_take_turns_stay_apart(bench, http, replay):
    """The sub-agent of a capture twice, call by call in turns: two roots, each with its own second call."""
    *before, one, two, last = load("sub")
    agent = one["headers"]["x-claude-code-agent-id"]

    def other(exchange: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(exchange).replace(agent, "another").replace("SUBJOB", "OTHERJOB").replace("toolu_", "toolu_b")
        found: dict[str, Any] = json.loads(text)
        return found

    done = await replay(bench, http, [*before, one, other(one), other(two), two, last])
    assert done.parents == [None, None, None, None, 3, 2, 1]
    assert done.roles == [TITLE, MAIN, SUB, SUB, SUB, SUB, MAIN]
    assert (done.counts["foreign_turns"], done.counts["forks"]) == (0, 0)
