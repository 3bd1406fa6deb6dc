"""Real harnesses behind the proxy: each works on a scripted two-tool task, to a right end, with every token recorded.

They are looked for in $GYRE_HARNESSES (bin/ and node_modules/.bin/), then on PATH; how to install them is in
CONTRIBUTING. Where one is missing its test is skipped, or fails if GYRE_REQUIRE_HARNESSES names it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gyre_agent_proxy.runner import harnesses
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.sandbox import find
from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids, unpack_logprobs
from gyre_traj.tree import Tree

NAMES = ("mini-swe-agent", "codex", "opencode", "claude-code", "qwen-code", "openhands")
IN_CI = ("mini-swe-agent", "codex")


@pytest.fixture
async def fence(scripted: Any) -> AsyncIterator[Any]:
    made = scripted.Fence()
    async with await made.start():
        yield made


EACH = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in IN_CI else [pytest.mark.harness]) for n in NAMES]
)


@EACH
async def test_a_two_tool_task(bench, scripted, tmp_path, fence, name):
    scripted.require(name)
    case = scripted.CASES[name]
    out = tmp_path / "out"
    workspace = out / "workspaces" / "e0"
    bench.brain = scripted.Script(bench, case, workspace)
    engine = await bench.engine()
    code, stdout, stderr = await scripted.run(
        *scripted.arguments(name, bench, out),
        *(part for pair in fence.environment for part in ("--env", pair)),
    )
    printed = (out / "logs" / "harness.log").read_text(errors="replace")
    trouble = f"{stderr}\n{printed[-3000:]}"
    assert code == 0, trouble
    assert (workspace / "answer.txt").read_text() == "42\n", trouble
    assert "done {}" in printed, trouble
    assert [called for called in fence.outside if not re.fullmatch(case.outside, called)] == []

    report = json.loads(stdout)
    counters = report["counters"]
    assert report["harness"]["why"] == "exit 0"
    log = read_log(out / "calls" / "e0.gtraj")
    roles = Counter(call.role for call in log.calls)
    assert dict(roles) == case.roles, [(c.role, c.finish, c.request) for c in log.calls]
    assert counters["roots"] == case.roots
    assert counters["foreign_turns"] == case.primed
    assert counters["forks"] == counters["calls_failed"] == counters["calls_refused"] == 0
    assert all(log.delivered[call.call] for call in log.calls)
    assert Tree.from_log(log).untrainable == {}
    # Sent is recorded, sampled is recorded, and the main line is one path.
    sent = {r["rid"]: r["input_ids"] for r in engine.requests if not r["rid"].startswith("gyre-probe")}
    assert len(sent) == len(log.calls)
    for call in log.calls:
        assert log.full_prompt(call.call).tolist() == sent[call.attempts[0].rid]
    main = [call for call in log.calls if call.role == "main"]
    for earlier, later in pairwise(main):
        assert later.parent == earlier.call
    instructed = [p for p in sent.values() if "--this line looks like an option" in bench.renderer.vocabulary.decode(p)]
    assert len(instructed) >= len(main)
    assert not (out / "homes" / "e0").exists()


@EACH
async def test_in_a_sandbox_that_reaches_the_proxy_alone(bench, scripted, tmp_path, name):
    scripted.require(name)
    if not (await find(RunnerConfig())).bwrap:
        pytest.skip("needs bubblewrap and leave to make namespaces")
    out = tmp_path / "out"
    bench.brain = scripted.Script(bench, scripted.CASES[name], out / "workspaces" / "e0")
    await bench.engine()
    code, stdout, stderr = await scripted.run(*scripted.arguments(name, bench, out, sandbox="bubblewrap"))
    printed = (out / "logs" / "harness.log").read_text(errors="replace")
    assert code == 0, f"{stderr}\n{printed[-3000:]}"
    assert (out / "workspaces" / "e0" / "answer.txt").read_text() == "42\n"
    assert "done {}" in printed
    counters = json.loads(stdout)["counters"]
    assert counters["calls"] == sum(scripted.CASES[name].roles.values())
    assert counters["calls_failed"] == counters["duplicates"] == counters["undelivered"] == 0


@EACH
async def test_an_engine_that_dies_is_not_noticed(bench, scripted, tmp_path, name):
    """The engine that answers dies in mid-answer; the other goes on from the tokens at hand."""
    scripted.require(name)
    case = scripted.CASES[name]
    out = tmp_path / "out"
    bench.brain = scripted.Script(bench, case, out / "workspaces" / "e0")
    engines = [await bench.engine() for _ in range(2)]
    for engine in engines:
        engine.hold = 6  # more than a probe's tokens

    async def kill() -> None:
        waits = {asyncio.create_task(engine.held.wait()): engine for engine in engines}
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        victim = waits[done.pop()]
        (other,) = (engine for engine in engines if engine is not victim)
        other.release()
        await victim.die()

    code, stdout, stderr = await scripted.run(*scripted.arguments(name, bench, out), meanwhile=kill())
    assert code == 0, stderr
    assert (out / "workspaces" / "e0" / "answer.txt").read_text() == "42\n"
    counters = json.loads(stdout)["counters"]
    assert counters["engine_failures"] >= 1
    assert counters["calls_moved"] >= 1
    assert counters["calls_failed"] == counters["duplicates"] == 0
    log = read_log(out / "calls" / "e0.gtraj")
    assert sum(case.roles.values()) == len(log.calls)
    assert [call.role for call in log.calls if len(call.attempts) > 1]
    assert Tree.from_log(log).untrainable == {}


@EACH
async def test_interrupted_nothing_of_it_is_left(bench, scripted, tmp_path, name):
    """Its tool runs a program in the background and waits for it; SIGTERM to `run` ends the lot."""
    scripted.require(name)
    tool, arguments = scripted.CASES[name].steps[0].calls[0]
    loop = "sh -c 'echo $$ > pid; mv pid started; exec sleep 600' & wait"
    forever = {k: loop if k in ("command", "cmd") else v for k, v in arguments.items()}
    steps = [scripted.Step(scripted.SHELL, [(tool, forever)]), scripted.Step(scripted.DONE)]
    bench.brain = scripted.Script(bench, scripted.Case(steps=steps), tmp_path)
    await bench.engine()
    out = tmp_path / "out"
    process = await scripted.begin(*scripted.arguments(name, bench, out))
    started = out / "workspaces" / "e0" / "started"
    try:
        async with asyncio.timeout(120):
            while not started.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
    finally:
        process.terminate()
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130, err
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert not (out / "homes" / "e0").exists()


@pytest.mark.harness
@pytest.mark.parametrize("name", NAMES[1:])  # mini-swe-agent asks again for a minute, whatever the error
async def test_a_spent_token_budget_ends_it(bench, scripted, tmp_path, name):
    """It would go on for ever; an answer is cut off, the next call is refused, and it gives up by itself."""
    scripted.require(name)
    bench.brain = scripted.Script(bench, scripted.Case(steps=scripted.CASES[name].steps[:1]), tmp_path)
    await bench.engine()
    out = tmp_path / "out"
    code, stdout, stderr = await scripted.run(*scripted.arguments(name, bench, out), "--tokens", "200")
    assert code in (0, 3), stderr
    report = json.loads(stdout)
    assert report["harness"]["why"].startswith("exit ")
    assert report["counters"]["completion_tokens"] == 200
    assert read_log(out / "calls" / "e0.gtraj").calls[-1].finish == "length"


@pytest.mark.harness
@pytest.mark.parametrize("name", NAMES[1:])
async def test_reasoning_stays_on_the_path(bench, scripted, tmp_path, name):
    """Whether the harness sends it back or not: the next prompt begins with all that was sampled."""
    scripted.require(name)
    case = scripted.CASES[name]
    thought = "<think>\nI ponder it.\n</think>\n\n"
    steps = [msgspec.structs.replace(step, text=thought + step.text) for step in case.steps]
    out = tmp_path / "out"
    bench.brain = scripted.Script(bench, msgspec.structs.replace(case, steps=steps), out / "workspaces" / "e0")
    await bench.engine()
    code, stdout, stderr = await scripted.run(*scripted.arguments(name, bench, out))
    assert code == 0, stderr
    assert (out / "workspaces" / "e0" / "answer.txt").read_text() == "42\n"
    counters = json.loads(stdout)["counters"]
    assert (counters["forks"], counters["foreign_turns"], counters["roots"]) == (0, case.primed, case.roots)
    log = read_log(out / "calls" / "e0.gtraj")
    main = [call for call in log.calls if call.role == "main"]
    assert [call.parent for call in main[1:]] == [call.call for call in main[:-1]]
    whole = bench.renderer.vocabulary.decode(log.full_ids(main[-1].call).tolist())
    assert whole.count("I ponder it.") == len(main)


@pytest.mark.harness
@pytest.mark.parametrize("name", ["codex", "opencode", "claude-code", "qwen-code"])
async def test_a_helper_is_a_sub_agent_with_a_root_of_its_own(bench, scripted, tmp_path, name):
    scripted.require(name)
    case = scripted.DELEGATING[name]
    bench.brain = scripted.Script(bench, case, tmp_path)
    await bench.engine()
    out = tmp_path / "out"
    code, stdout, stderr = await scripted.run(*scripted.arguments(name, bench, out))
    assert code == 0, stderr
    log = read_log(out / "calls" / "e0.gtraj")
    assert dict(Counter(call.role for call in log.calls)) == case.roles
    (helper,) = (call for call in log.calls if call.role == "sub-agent")
    assert helper.parent is None
    told = bench.renderer.vocabulary.decode(log.full_prompt(log.calls[-1].call).tolist())
    assert "It is seven." in told
    assert json.loads(stdout)["counters"]["forks"] == 0


@pytest.mark.engine
async def test_mini_swe_agent_with_a_real_engine(tiny_engine, tiny_model, scripted, tmp_path):
    """A model of random weights says nothing to the point; what it samples is recorded all the same."""
    adapter = scripted.require("mini-swe-agent")
    short = adapter.files["gyre.yaml"].replace("{output}", "16")
    adapter = msgspec.structs.replace(adapter, files={"gyre.yaml": short})
    (tmp_path / "short.toml").write_bytes(msgspec.toml.encode(adapter))
    out = tmp_path / "out"
    code, stdout, stderr = await scripted.run(
        *("--harness", str(tmp_path / "short.toml"), "--instruction", "Say hello.", "--out", str(out), "--json"),
        *("--engine", tiny_engine, "--model", str(tiny_model), "--budget", "200"),
    )
    assert code == 0, f"{stderr}\n{(out / 'logs' / 'harness.log').read_text()[-3000:]}"
    assert json.loads(stdout)["counters"]["calls_untrainable"] == 0
    log = read_log(out / "calls" / "e0.gtraj")
    assert len(log.calls) == 3, "it gives up after three answers without a tool call"
    for call in log.calls:
        ids, logprobs = unpack_ids(call.output), unpack_logprobs(call.logprobs)
        assert 0 < len(ids) == len(logprobs) <= 16
        assert max(ids) < 1024
        assert max(logprobs) < 0
        assert [(span.start, span.end) for span in call.versions] == [(0, len(ids))]
        assert log.delivered[call.call]


@pytest.mark.parametrize("name", harnesses.names())
def test_the_version_is_one_that_is_known_to_work(name, scripted, tmp_path):
    adapter = scripted.require(name)
    done = subprocess.run(
        adapter.version, capture_output=True, text=True, timeout=60, check=True,
        env={"PATH": scripted.search_path(), "HOME": str(tmp_path), "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)},
    )  # fmt: skip
    found = re.search(r"\d+\.\d+\.\d+", done.stdout)
    assert found is not None, done.stdout
    assert found[0] in adapter.versions


# Contexts that the first prompt fits into, but not with the first tool's output and what the harness keeps free.
COMPACTS = {"codex": 40_000, "opencode": 40_000, "qwen-code": 90_000, "claude-code": 100_000}


@pytest.mark.harness
@pytest.mark.parametrize("name", COMPACTS)
async def test_it_sums_up_when_the_context_it_was_told_of_fills(bench, scripted, tmp_path, name):
    scripted.require(name)
    tool, arguments = scripted.CASES[name].steps[0].calls[0]
    many = {k: "seq 100000 100900" if k in ("command", "cmd") else v for k, v in arguments.items()}
    calls = [(scripted.SHELL, [(tool, many)]), (scripted.EDIT, [(tool, arguments)]), (scripted.DONE, [])]
    steps = [scripted.Step(*step) for step in calls]
    bench.brain = scripted.Script(bench, scripted.Case(steps=steps, side="A summary"), tmp_path)
    await bench.engine()
    out = tmp_path / "out"
    code, stdout, stderr = await scripted.run(*scripted.arguments(name, bench, out, COMPACTS[name]))
    log = read_log(out / "calls" / "e0.gtraj")
    sizes = [(call.role, len(log.full_prompt(call.call))) for call in log.calls]
    assert code == 0, (stderr, sizes)
    counters = json.loads(stdout)["counters"]
    assert counters["calls_refused"] == counters["calls_failed"] == 0, sizes
    roles = [role for role, _ in sizes if role != "side"]
    at = roles.index("main-summary")
    assert roles == ["main"] * at + ["main-summary"] + ["main"] * (len(roles) - at - 1), sizes
    assert at > 0, sizes
    assert roles[-1] == "main", sizes
