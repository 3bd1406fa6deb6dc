"""`gyre-agent-proxy replay`: recorded traffic of real harnesses through a proxy, from the command line."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from gyre_agent_proxy.errors import CaptureError
from gyre_agent_proxy.replay import Exchange, load_capture
from gyre_agent_proxy.replay import replay as replay_capture
from gyre_traj.log import read_log

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures"


async def run(*arguments):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gyre_agent_proxy.cli", "replay", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("name", ["mini-swe-agent/mini-par", "claude-code/par", "codex/basic"])
async def test_a_capture_passes_and_its_calls_are_known_again(bench, name):
    engine = await bench.engine()
    path = CAPTURES / f"{name}.json"
    exchanges = load_capture(path)
    for _ in exchanges:  # as many tool calls as anybody was answered with
        bench.brain.says('<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>' * 3)
    code, out, err = await run(path, "--engine", engine.url, "--model", bench.folder, "--template", "chatml", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [e["status"] for e in report["exchanges"]] == [200] * len(exchanges)
    (tree,) = report["trees"]
    assert tree["calls"] == report["counters"]["calls"] > 1
    assert report["counters"]["forks"] == 0


async def test_an_exchange_that_fails_is_shown_and_is_the_exit_code(bench, tmp_path):
    engine = await bench.engine()
    capture = tmp_path / "capture.jsonl"
    capture.write_text(
        '{"path": "/v1/chat/completions", "body": {"messages": []}}\n{"method": "GET", "path": "/health"}\n'
    )
    code, out, err = await run(capture, "--engine", engine.url, "--model", bench.folder, "--template", "chatml")
    assert code == 1
    assert "400" in err
    assert "at least one message" in err
    assert "calls_refused 1" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no exchange"), ("nonsense", "not a capture"), ("[1]", "not a capture"), ('[{"body": {}}]', "not a capture")],
)
def test_what_is_no_capture_is_refused(tmp_path, text, message):
    path = tmp_path / "capture.json"
    path.write_text(text)
    with pytest.raises(CaptureError, match=message):
        load_capture(path)


def test_a_capture_that_is_not_there(tmp_path):
    with pytest.raises(CaptureError, match="cannot read"):
        load_capture(tmp_path / "none.json")


def tree_of(bench):
    (path,) = bench.calls.glob("*.gtraj")
    calls = read_log(path).calls
    index = {c.call: i for i, c in enumerate(calls)}
    return [(c.role, None if c.parent is None else index[c.parent]) for c in calls]


@pytest.mark.parametrize(
    "name", sorted(str(p.relative_to(CAPTURES).with_suffix("")) for p in CAPTURES.glob("*/*.json"))
)
async def test_whatever_the_engine_answers_the_tree_is_the_capture_s(bench, http, replay, tmp_path, name):
    """The reference is `parts/replay.py`, whose engine samples what was recorded."""
    done = await replay(bench, http, json.loads((CAPTURES / f"{name}.json").read_text()))
    expected = list(zip(done.roles, done.parents, strict=True))
    bench.calls, bench.metrics = tmp_path / "again", tmp_path / "again.json"
    bench.brain.queue.clear()
    async with bench.proxy() as proxy:
        found = [one async for one in replay_capture(load_capture(CAPTURES / f"{name}.json"), proxy.url, "k")]
        counts = proxy.service.metrics.counts
    assert [one.status for one in found] == [200] * len(found)
    assert tree_of(bench) == expected
    assert counts["foreign_turns"] == done.counts["foreign_turns"]


async def test_a_cut_stream_is_joined_by_its_repeat_even_if_another_call_comes_between(bench):
    engine = await bench.engine()

    def exchange(text, response=None):
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
        return Exchange(path="/v1/chat/completions", body=body, response=response)

    capture = [exchange("q", {"cut_after": 1}), exchange("title"), exchange("q"), exchange("title")]
    async with bench.proxy() as proxy:
        found = [one async for one in replay_capture(capture, proxy.url, "k")]
        assert proxy.service.metrics.counts["duplicates"] == 1
    assert [(one.index, one.status) for one in found] == [(0, 200), (2, 200), (1, 200), (3, 200)]
    assert len(engine.requests) == 3, "the other one was delivered, and is a sample of its own"
