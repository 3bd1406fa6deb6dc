"""What real harnesses sent (their words replaced), replayed: each conversation becomes the tree a person would draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures"


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
    "qwen-code/image": (1, 1, 0, [M, M]),
    "qwen-code/compact": (10, 10, 14, [M, M, S, M, S, M, S, M, S, M, S, M]),
}


def load(name):
    return json.loads((CAPTURES / f"{name}.json").read_text())


def check(done, name):
    counts = done.counts
    roots, foreign, spliced, roles = EXPECTED[name]
    assert (counts["roots"], counts["forks"]) == (roots, 0)
    assert (counts["foreign_turns"], counts["spliced_turns"]) == (foreign, spliced)
    assert done.roles == roles


@pytest.mark.parametrize("name", EXPECTED)
async def test_replay(bench, http, replay, name):
    check(await replay(bench, http, load(name)), name)


@pytest.mark.parametrize("how", [{}, {"renames": True}, {"splits": True}])
@pytest.mark.parametrize("name", EXPECTED)
async def test_the_same_said_otherwise_is_the_same_tree(bench, http, replay, variations, name, how):
    check(await replay(bench, http, load(name), vary=variations.Variation(len(name), **how)), name)
