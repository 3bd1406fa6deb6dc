"""Real harnesses behind the proxy: each works on a scripted two-tool task, to a right end, with every token recorded.

They are looked for in $GYRE_HARNESSES (bin/ and node_modules/.bin/), then on PATH; how to install them is in
CONTRIBUTING. Where one is missing its test is skipped, or fails if GYRE_REQUIRE_HARNESSES names it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre_agent_proxy.runner import harnesses
from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids, unpack_logprobs
from gyre_traj.tree import Tree

CLI = [sys.executable, "-m", "gyre_agent_proxy.cli"]
INSTRUCTION = 'Write 41 into answer.txt, then correct it to 42, and say "done {}".\n--this line looks like an option'
SUMMARISE = "CRITICAL: Respond with TEXT ONLY"  # Claude Code's; others offer no tools with such a call
DONE = "It says 42 now: done {}."


class Step(msgspec.Struct):
    """What the model says at one turn of the main line: text and tool calls."""

    text: str
    calls: list[tuple[str, dict[str, Any]]] = []


class Case(msgspec.Struct):
    """A harness's script. In arguments, {w} is the workspace and {session} a number a tool gave."""

    steps: list[Step]
    side: str = "A title"  # the answer to calls without tools
    roles: dict[str, int] = msgspec.field(default_factory=lambda: {"main": 3})
    roots: int = 1
    outside: str = ""  # whom it calls beside the proxy, for want of a switch: a regular expression
    primed: int = 0  # assistant turns that the harness itself made up


SHELL, EDIT = "I write it.", "I correct it."
CASES = {
    "mini-swe-agent": Case(
        steps=[
            Step(SHELL, [("bash", {"command": "echo 41 > answer.txt"})]),
            Step(EDIT, [("bash", {"command": "sed -i s/41/42/ answer.txt && cat answer.txt"})]),
            Step(DONE, [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})]),
        ],
    ),
    "opencode": Case(
        steps=[
            Step(SHELL, [("bash", {"command": "echo 41 > answer.txt", "description": "Write 41"})]),
            Step("", [("read", {"filePath": "{w}/answer.txt"})]),
            Step(EDIT, [("edit", {"filePath": "{w}/answer.txt", "oldString": "41", "newString": "42"})]),
            Step(DONE),
        ],
        roles={"main": 4, "side": 1},
        roots=2,
    ),
    "codex": Case(
        steps=[
            Step(SHELL, [("exec_command", {"cmd": "echo 41 > answer.txt"})]),
            Step(EDIT, [("exec_command", {"cmd": "read n; echo $n > answer.txt", "tty": True, "yield_time_ms": 250})]),
            Step("", [("write_stdin", {"session_id": "{session}", "chars": "42\n"})]),
            Step(DONE),
        ],
        roles={"main": 4},
    ),
    "claude-code": Case(
        steps=[
            Step(SHELL, [("Bash", {"command": "echo 41 > answer.txt", "description": "Write 41"})]),
            Step("", [("Read", {"file_path": "{w}/answer.txt"})]),
            Step(EDIT, [("Edit", {"file_path": "{w}/answer.txt", "old_string": "41", "new_string": "42"})]),
            Step(DONE),
        ],
        roles={"main": 4},
    ),
    "qwen-code": Case(
        steps=[
            Step(SHELL, [("run_shell_command", {"command": "echo 41 > answer.txt", "is_background": False})]),
            Step("", [("read_file", {"file_path": "{w}/answer.txt"})]),
            Step(EDIT, [("edit", {"file_path": "{w}/answer.txt", "old_string": "41", "new_string": "42"})]),
            Step(DONE),
        ],
        roles={"main": 4},
        primed=1,
    ),
    "openhands": Case(
        steps=[
            Step(
                SHELL,
                [("terminal", {"command": "echo 41 > answer.txt", "summary": "Write 41", "security_risk": "LOW"})],
            ),
            Step(
                EDIT,
                [
                    (
                        "file_editor",
                        {
                            "command": "str_replace",
                            "path": "{w}/answer.txt",
                            "old_str": "41",
                            "new_str": "42",
                            "summary": "Correct it",
                            "security_risk": "LOW",
                        },
                    )
                ],
            ),
            Step("", [("finish", {"message": DONE, "summary": "Done", "security_risk": "LOW"})]),
        ],
        outside=r"CONNECT pypi\.\w+:443",
    ),
}
IN_CI = ("mini-swe-agent", "codex")


class Script:
    """What the engine samples: the main line's next step for a prompt not seen before; else the side answer."""

    def __init__(self, bench: Any, case: Case, workspace: Path) -> None:
        self.vocabulary = bench.renderer.vocabulary
        self._case = case
        self._workspace = str(workspace)
        self._steps = iter(case.steps)
        self._said_to: dict[tuple[int, ...], str] = {}

    def rest(self, input_ids: list[int]) -> list[int]:
        """The whole answer: nothing is cut and continued here."""
        key = tuple(input_ids)
        if key not in self._said_to:
            prompt = self.vocabulary.decode(input_ids)
            last = prompt.rpartition("<|im_start|>user")[2]
            main = "<tools>" in prompt and SUMMARISE not in last
            self._said_to[key] = (
                self._said(next(self._steps, self._case.steps[-1]), prompt) if main else self._case.side
            )
        return [*self.vocabulary.encode(self._said_to[key]), 2]

    def _said(self, step: Step, prompt: str) -> str:
        text = step.text
        for name, arguments in step.calls:
            call = {"name": name, "arguments": {k: self._filled(v, prompt) for k, v in arguments.items()}}
            text += f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return text

    def _filled(self, value: Any, prompt: str) -> Any:
        if value == "{session}":
            return int(re.findall(r"session ID (\d+)", prompt)[-1])
        return value.replace("{w}", self._workspace) if isinstance(value, str) else value


def search_path() -> str:
    """PATH with $GYRE_HARNESSES before it."""
    folder = os.environ.get("GYRE_HARNESSES")
    own = [str(Path(folder).resolve() / name) for name in ("bin", "node_modules/.bin")] if folder else []
    return os.pathsep.join([*own, os.environ.get("PATH", os.defpath)])


def require(name: str) -> harnesses.Adapter:
    """The adapter of an installed harness; skips, or fails where the harness is required."""
    adapter = harnesses.load(name)
    if shutil.which(adapter.command[0], path=search_path()) is None:
        missing = f"{name} is not installed: {adapter.install}"
        if name in os.environ.get("GYRE_REQUIRE_HARNESSES", "").split(","):
            pytest.fail(missing)
        pytest.skip(missing)
    return adapter


class Fence:
    """An HTTP proxy that lets calls of this machine through and refuses all others; `outside` names them.

    For harnesses that do not send calls of this machine past a proxy, as NO_PROXY asks.
    """

    def __init__(self) -> None:
        self.outside: list[str] = []
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    @property
    def environment(self) -> list[str]:
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        found = [f"{n}={self.url}" for name in names for n in (name, name.lower())]
        return [*found, "NO_PROXY=127.0.0.1,localhost", "no_proxy=127.0.0.1,localhost"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(maxsplit=2)
        host, _, port = target.rpartition(":")
        try:
            if method != "CONNECT" or host != "127.0.0.1":
                self.outside.append(f"{method} {target}")
                writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await asyncio.gather(self._pipe(reader, far_writer), self._pipe(far_reader, writer))
        except ConnectionError:
            pass
        finally:
            writer.close()

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def fence() -> AsyncIterator[Fence]:
    made = Fence()
    async with await made.start():
        yield made


async def run(*arguments: str) -> tuple[int, str, str]:
    """`gyre-agent-proxy run` with harnesses on PATH; returns (exit code, stdout, stderr)."""
    process = await asyncio.create_subprocess_exec(
        *CLI, "run", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PATH": search_path()},
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), 240)
    except BaseException:
        process.terminate()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_CI else [pytest.mark.harness]) for n in CASES])
async def test_a_two_tool_task(bench, tmp_path, fence, name):
    require(name)
    case = CASES[name]
    out = tmp_path / "out"
    workspace = out / "workspaces" / "e0"
    bench.brain = Script(bench, case, workspace)
    engine = await bench.engine()
    code, stdout, stderr = await run(
        *("--harness", name, "--instruction", INSTRUCTION, "--engine", engine.url, "--model", str(bench.folder)),
        *("--name", "policy", "--context", "1000000", "--budget", "200", "--out", str(out), "--json"),
        *(part for pair in fence.environment for part in ("--env", pair)),
    )
    printed = (out / "logs" / "harness.log").read_text(errors="replace")
    trouble = f"{stderr}\n{printed[-3000:]}"
    assert code == 0, trouble
    assert (workspace / "answer.txt").read_text() == "42\n", trouble
    assert "done {}" in printed, trouble
    assert all(re.fullmatch(case.outside, called) for called in fence.outside), "it called somebody else"

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


@pytest.mark.engine
async def test_mini_swe_agent_with_a_real_engine(tiny_engine, tiny_model, tmp_path):
    """A model of random weights says nothing to the point; what it samples is recorded all the same."""
    adapter = require("mini-swe-agent")
    short = adapter.files["gyre.yaml"].replace("{output}", "16")
    adapter = msgspec.structs.replace(adapter, files={"gyre.yaml": short})
    (tmp_path / "short.toml").write_bytes(msgspec.toml.encode(adapter))
    out = tmp_path / "out"
    code, stdout, stderr = await run(
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
def test_the_version_is_one_that_is_known_to_work(name, tmp_path):
    adapter = require(name)
    done = subprocess.run(
        adapter.version, capture_output=True, text=True, timeout=60, check=True,
        env={"PATH": search_path(), "HOME": str(tmp_path), "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)},
    )  # fmt: skip
    found = re.search(r"\d+\.\d+\.\d+", done.stdout)
    assert found is not None, done.stdout
    assert found[0] in adapter.versions


# Contexts that the first prompt fits into, but not with the first tool's output and what the harness keeps free.
COMPACTS = {"codex": 40_000, "opencode": 40_000, "qwen-code": 90_000, "claude-code": 100_000}


@pytest.mark.harness
@pytest.mark.parametrize("name", COMPACTS)
async def test_it_sums_up_when_the_context_it_was_told_of_fills(bench, tmp_path, name):
    require(name)
    tool, arguments = CASES[name].steps[0].calls[0]
    many = {k: "seq 100000 100900" if k in ("command", "cmd") else v for k, v in arguments.items()}
    case = Case(steps=[Step(SHELL, [(tool, many)]), Step(EDIT, [(tool, arguments)]), Step(DONE)], side="A summary")
    bench.brain = Script(bench, case, tmp_path)
    engine = await bench.engine()
    out = tmp_path / "out"
    code, stdout, stderr = await run(
        *("--harness", name, "--instruction", INSTRUCTION, "--engine", engine.url, "--model", str(bench.folder)),
        *("--name", "policy", "--context", str(COMPACTS[name]), "--budget", "200", "--out", str(out), "--json"),
    )
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
