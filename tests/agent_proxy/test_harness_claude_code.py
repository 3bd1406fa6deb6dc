"""The real Claude Code where it gets difficult: odd calls, twin sub-agents, a token limit, a full context, a restart.

It is looked for in $GYRE_HARNESSES/node_modules/.bin, then on PATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gyre_traj.log import read_log

pytestmark = pytest.mark.harness

PATH = os.pathsep.join(
    [str(Path(os.environ.get("GYRE_HARNESSES", "-"), "node_modules", ".bin").absolute()), os.environ.get("PATH", "")]
)
NOWHERE = "http://127.0.0.1:9"  # nothing but the proxy can be reached
COMPACT = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."


class Script:
    """What the engine samples: `says(prompt, number of this turn)`, the same for the same prompt."""

    def __init__(self, bench: Any, says: Callable[[str, int], str]) -> None:
        self.vocabulary = bench.renderer.vocabulary
        self._says = says

    def rest(self, input_ids: list[int]) -> list[int]:
        """The whole answer: nothing is cut and continued here."""
        prompt = self.vocabulary.decode(input_ids)
        return [*self.vocabulary.encode(self._says(prompt, prompt.count("<|im_start|>assistant\n"))), 2]


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def bash(command: str) -> str:
    return call("Bash", {"command": command, "description": "x"})


@contextlib.asynccontextmanager
async def claude(url: str, folder: Path, **env: str) -> AsyncIterator[asyncio.Task[str]]:
    """Runs it in `folder`; the task's result is what it printed last, once it has ended well."""
    if shutil.which("claude", path=PATH) is None:
        pytest.skip("claude is not installed")
    workspace, home = folder / "workspace", folder / "home"
    for made in (workspace, home):
        made.mkdir()
    switches = ("IS_SANDBOX", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_GROWTHBOOK")
    env = {
        "PATH": PATH, "HOME": str(home), "CLAUDE_CONFIG_DIR": str(home / "claude"),
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "k",
        "ANTHROPIC_MODEL": "policy", "ANTHROPIC_SMALL_FAST_MODEL": "policy",
        "HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        **dict.fromkeys(switches, "1"), **env,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *("claude", "--print", "--dangerously-skip-permissions", "MAINJOB: go"),
        cwd=workspace, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip

    async def result() -> str:
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        return out.decode().strip()

    running = asyncio.create_task(result())
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.gather(running, return_exceptions=True)


def recorded(bench: Any) -> tuple[list[Any], list[int | None]]:
    """The calls, and of each the index of the one it continues."""
    (path,) = bench.calls.glob("*.gtraj")
    calls = read_log(path).calls
    index = {c.call: i for i, c in enumerate(calls)}
    return calls, [None if c.parent is None else index[c.parent] for c in calls]


async def test_odd_calls_twin_sub_agents_and_a_token_limit(bench, tmp_path):
    twin = call("Agent", {"description": "s", "prompt": "SUBJOB: run it", "subagent_type": "general-purpose"})
    main = [
        "<think>\nLet me see.\n</think>\n\nI look." + bash("echo hi") + bash("printf 'a\\xff'"),
        call("Bash", "ls -l"),  # no object
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo \\ud83d", "description": "x"}}\n</tool_call>',
        twin * 2,
        "long words " * 900,
        "and the end",
    ]
    sub = [bash("echo sub"), "SUB RESULT"]

    def says(prompt: str, turn: int) -> str:
        return (main if "MAINJOB" in prompt else sub)[turn - 1]

    bench.brain = Script(bench, says)
    await bench.engine()
    limit = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1500"}
    async with bench.proxy() as proxy, claude(proxy.url, tmp_path, **limit) as running:
        assert await running == "and the end"
        counts = dict(proxy.service.metrics.counts)
    calls, parents = recorded(bench)
    roles = [c.role for c in calls]
    assert (roles.count("main"), roles.count("sub-agent"), len(roles)) == (6, 4, 10)
    of_main = [i for i, c in enumerate(calls) if c.role == "main"]
    assert [parents[i] for i in of_main] == [None, *of_main[:-1]], "one path, the turn cut by the limit in it"
    assert [calls[i].finish for i in of_main] == ["stop"] * 4 + ["length", "stop"]
    of_sub = [i for i, c in enumerate(calls) if c.role == "sub-agent"]
    assert [parents[i] for i in of_sub].count(None) == 2, "each twin is a root, though they ask the same at once"
    assert (counts["roots"], counts["forks"], counts["foreign_turns"], counts["duplicates"]) == (3, 0, 0, 0)
    assert (counts["calls_failed"], counts["calls_refused"], counts["unknown_roles"]) == (0, 0, 0)


async def test_a_prompt_that_is_too_long_makes_it_compact(bench, tmp_path):
    def says(prompt: str, turn: int) -> str:
        if COMPACT in prompt.rpartition("<|im_start|>user")[2]:
            return "<summary>SUMMARY: it went well</summary>"
        if "SUMMARY: it went well" in prompt:
            return "all finished"
        return bash(f"seq {turn}0001 {turn}1800")

    bench.brain = Script(bench, says)
    await bench.engine()
    async with bench.proxy(context=100_000) as proxy, claude(proxy.url, tmp_path) as running:
        assert await running == "all finished"
        counts = dict(proxy.service.metrics.counts)
    calls, parents = recorded(bench)
    *_, last, summary, after = calls
    assert [last.role, summary.role, after.role] == ["main", "main-summary", "main"]
    assert parents[-2] is not None, "a branch that ends the old tree"
    assert parents[-1] is None, "and a new root"
    assert counts["calls_refused"] >= 1
    assert (counts["roots"], counts["forks"], counts["foreign_turns"]) == (2, 0, 0)
    assert counts["spliced_turns"] >= 1, "what it takes over is what was sampled"


async def test_a_proxy_that_is_restarted_in_the_middle_of_an_answer(bench, tmp_path, free_port):
    steps = [bash("echo hi"), "and a long answer to the end"]

    def says(prompt: str, turn: int) -> str:
        if turn == 2:
            engine.hold = 5
        return steps[turn - 1]

    bench.brain = Script(bench, says)
    engine = await bench.engine()
    async with contextlib.AsyncExitStack() as stack:
        async with bench.proxy(port=free_port) as proxy:
            running = await stack.enter_async_context(claude(proxy.url, tmp_path))
            await engine.held.wait()
        engine.release()
        await stack.enter_async_context(bench.proxy(port=free_port))
        assert await running == "and a long answer to the end"
    calls, parents = recorded(bench)
    answered = [(c.role, c.finish, p) for c, p in zip(calls, parents, strict=True) if c.finish != "abort"]
    assert answered == [("main", "stop", None), ("main", "stop", 0)]
