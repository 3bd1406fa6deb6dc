"""The quickstart's tasks: a right module scores 1, a half-right one 0.5, an empty one 0, whatever the code does."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.scoring import Scorer
from gyre_agent_proxy.runner.tasks import Task, load_tasks
from gyre_agent_proxy.runner.workspace import prepare, produced
from gyre_traj.intake import Ending
from gyre_transport.config import section
from gyre_transport.process import Child

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
TASKS = {task.name: task for task in load_tasks(QUICKSTART / "tasks")}
SOLUTIONS = {
    "absolute": "return abs(n)",
    "add": "return a + b",
    "contains": "return item in items",
    "count_vowels": "return sum(c in 'aeiou' for c in text)",
    "count_words": "return len(text.split())",
    "double": "return 2 * n",
    "first": "return items[0]",
    "is_even": "return n % 2 == 0",
    "is_odd": "return n % 2 == 1",
    "is_palindrome": "return text == text[::-1]",
    "is_positive": "return n > 0",
    "largest": "return max(items)",
    "last": "return items[-1]",
    "length": "return len(text)",
    "mean": "return sum(items) / len(items)",
    "multiply": "return a * b",
    "reverse": "return text[::-1]",
    "shout": "return text.upper()",
    "smallest": "return min(items)",
    "square": "return n * n",
    "subtract": "return a - b",
    "total": "return sum(items)",
}
Functions = list[tuple[str, str]]  # (module, signature), in the order of the spec


def functions(task: Task) -> Functions:
    """What the spec asks for."""
    found, module = [], ""
    for line in task.instruction.splitlines():
        if line.startswith("## "):
            module = line[3:]
        elif signature := re.match(r"\d+\. `([^`]+)`: return ", line):
            found.append((module, signature[1]))
    return found


def solve(workspace: Path, wanted: Functions) -> None:
    for module, signature in wanted:
        with (workspace / module).open("a") as f:
            f.write(f"def {signature}:\n    {SOLUTIONS[signature.split('(')[0]]}\n\n")


def public_check(workspace: Path) -> str:
    """The last line the agent's own check prints."""
    done = subprocess.run([sys.executable, "-I", "check.py"], cwd=workspace, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_there_are_eight_and_two_have_two_modules() -> None:
    assert len(TASKS) == 8
    assert sorted(len(dict(functions(task))) for task in TASKS.values()) == [1] * 6 + [2] * 2
    assert {len(functions(task)) for task in TASKS.values()} == {2}


@pytest.mark.parametrize("name", TASKS)
async def test_right_half_right_and_empty(tmp_path: Path, name: str) -> None:
    task, wanted, scorer = TASKS[name], functions(TASKS[name]), Scorer(RunnerConfig(), tmp_path / "scoring")
    modules = list(dict(wanted))
    assert task.artifacts == tuple(modules)

    async def score(solved: Functions) -> float | None:
        workspace = tmp_path / "w"
        prepare(task, workspace)
        assert produced(task, workspace) == []
        for module in modules:
            (workspace / module).touch()
        solve(workspace, solved)
        outcome = await scorer.score(task, "e", workspace)
        assert outcome.ending is Ending.SCORED
        return outcome.score

    assert await score(wanted) == 1.0
    assert public_check(tmp_path / "w") == "passed 2 of 2"
    assert await score(wanted[:1]) == 0.5
    assert public_check(tmp_path / "w") == "passed 1 of 2"
    assert await score([]) == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_the_agent_sees_other_cases_than_the_verifier(name: str) -> None:
    task = TASKS[name]
    public, hidden = ((folder / "cases.json").read_text() for folder in (task.environment, task.tests))
    assert not set(public.splitlines()[1:-1]) & set(hidden.splitlines()[1:-1])


@pytest.mark.parametrize(
    "bad",
    [
        "def {0}: return",
        "def {1}:\n    while True: pass\n",
        "def {1}:\n    return {1}\n",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "while True: pass",
        "print('passed 8 of 8'); x = [0] * 10**12",
        "def {1}:\n    return (i for i in 'generators are no JSON')\n",
        "not python",
    ],
)
async def test_code_that_loops_exits_or_breaks_costs_only_its_own_cases(tmp_path: Path, bad: str) -> None:
    """The other module keeps its half; none of it is a failure of the evaluator."""
    task = next(task for task in TASKS.values() if len(dict(functions(task))) == 2)
    (good_module, good), (bad_module, signature) = functions(task)
    workspace = tmp_path / "w"
    prepare(task, workspace)
    solve(workspace, [(good_module, good)])
    (workspace / bad_module).write_text(bad.format("(", signature))
    outcome = await Scorer(RunnerConfig(), tmp_path / "scoring").score(task, "e", workspace)
    assert (outcome.ending, outcome.score) == (Ending.SCORED, 0.5)


def test_the_run_file_names_what_is_there() -> None:
    data = tomllib.loads((QUICKSTART / "run.toml").read_text())
    runner = section(data, "runner", RunnerConfig)
    assert (QUICKSTART / runner.tasks).is_dir()
    assert runner.harness == ("{python}", "{folder}/harness.py")
    assert (data["run"]["steps"], data["batch"], data["feed"]["j_max"]) == (
        6,
        {"groups": 4, "group_size": 8, "per_burst": 2},
        3,
    )


RIGHT = "```python\ndef add(a, b):\n    return a + b\n\ndef is_even(n):\n    return n % 2 == 0"
HALF = RIGHT.replace("a + b", "a - b")
WRONG = "I would rather not."


async def work(tmp_path: Path, answers: list[str | int]) -> tuple[int | None, list[tuple[str, list[Any]]], str, str]:
    """Run the harness on a task against an endpoint that gives `answers` in turn (a number: that HTTP status).

    Returns (exit code, [(role, messages)] as asked, the module it left, its log)."""
    asked: list[tuple[str, list[Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert request.headers["Authorization"] == "Bearer the-key"
        asked.append((request.headers.get("x-gyre-role", "main"), body["messages"]))
        given = answers[min(len(asked), len(answers)) - 1]
        if isinstance(given, int):
            return web.json_response({"error": {"message": "no engine"}}, status=given)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": given}}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    workspace = tmp_path / "w"
    prepare(TASKS["even"], workspace)
    try:
        child = await Child.start(
            "harness",
            [sys.executable, str(QUICKSTART / "harness.py")],
            log=tmp_path / "log",
            env={
                "OPENAI_BASE_URL": f"http://127.0.0.1:{server.addresses[0][1]}/v1",
                "OPENAI_API_KEY": "the-key",
                "GYRE_INSTRUCTION": str(TASKS["even"].folder / "instruction.md"),
            },
            cwd=workspace,
            ready_within=None,
            guarded=True,
        )
        code = await child.wait()
        await child.stop()
    finally:
        await server.cleanup()
    module = workspace / "arithmetic.py"
    return code, asked, module.read_text() if module.exists() else "", (tmp_path / "log").read_text()


async def test_a_first_answer_that_passes_ends_it(tmp_path: Path) -> None:
    code, asked, module, log = await work(tmp_path, [RIGHT])
    assert (code, [role for role, _ in asked]) == (0, ["main"])
    assert "return a + b" in module
    assert "public check: 1.00" in log


async def test_failures_make_a_tree(tmp_path: Path) -> None:
    """A second answer and a summary go on from the first; the last one starts anew, from the spec and the summary."""
    code, asked, module, _ = await work(tmp_path, [WRONG, "no function", HALF, "adds wrongly", RIGHT])
    assert code == 0
    assert [role for role, _ in asked] == ["main", "sub-agent", "main", "main-summary", "main"]
    first, review, second, summary, last = (messages for _, messages in asked)
    answered = [*first, {"role": "assistant", "content": WRONG}]
    assert second[:-1] == answered
    assert summary[:-1] == [*second, {"role": "assistant", "content": HALF}]
    assert last[:-1] == first[:-1]
    assert last[-1]["content"].startswith(first[-1]["content"])  # shares its tokens with the first
    assert review[0]["content"] != first[0]["content"]
    assert "no function" in second[-1]["content"]
    assert "adds wrongly" in last[-1]["content"]
    assert "return a + b" in module


async def test_the_best_version_stays(tmp_path: Path) -> None:
    _, asked, module, log = await work(tmp_path, [HALF, "wrong", WRONG, "worse", WRONG])
    assert len(asked) == 5
    assert "return a - b" in module
    assert "public check: 0.50" in log


async def test_an_endpoint_that_fails_ends_the_harness(tmp_path: Path) -> None:
    """Neither an endless retry nor a file that would be scored."""
    code, asked, module, log = await work(tmp_path, [500])
    assert (code, module) == (1, "")
    assert len(asked) == 2
    assert "no engine" in log
