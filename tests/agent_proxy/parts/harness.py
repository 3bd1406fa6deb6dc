"""Drives a real harness: where it is, what the model says to it, and `gyre-agent-proxy run` around it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre_agent_proxy.runner import harnesses

CLI = [sys.executable, "-m", "gyre_agent_proxy.cli"]
INSTRUCTION = 'Write 41 into answer.txt, then correct it to 42, and say "done {}".\n--this line looks like an option'
SUBJOB = "SUBJOB: say what it is."
SUMMARISE = "CRITICAL: Respond with TEXT ONLY"  # Claude Code's; others offer no tools with such a call
DONE = "It says 42 now: done {}."


class Step(msgspec.Struct):
    """What the model says at one turn of the main line: text and tool calls."""

    text: str
    calls: list[tuple[str, dict[str, Any]]] = []


class Case(msgspec.Struct):
    """A harness's script. In arguments, {w} is the workspace, {session} and {agent} are what a tool gave."""

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

_HELP = {"description": "Find it", "prompt": SUBJOB, "subagent_type": "general-purpose"}
DELEGATING = {
    "codex": Case(
        steps=[
            Step("", [("multi_agent_v1__spawn_agent", {"message": SUBJOB})]),
            Step("", [("multi_agent_v1__wait_agent", {"targets": ["{agent}"], "timeout_ms": 60_000})]),
            Step(DONE),
        ],
        roles={"main": 3, "sub-agent": 1},
    ),
    "opencode": Case(
        steps=[Step("", [("task", _HELP | {"subagent_type": "general"})]), Step(DONE)],
        roles={"main": 2, "sub-agent": 1, "side": 1},
    ),
    "claude-code": Case(steps=[Step("", [("Agent", _HELP)]), Step(DONE)], roles={"main": 2, "sub-agent": 1}),
    "qwen-code": Case(steps=[Step("", [("agent", _HELP)]), Step(DONE)], roles={"main": 2, "sub-agent": 1}),
}


class Script:
    """What the engine samples: the main line's next step for a prompt not seen before; else the side answer."""

    def __init__(self, bench: Any, case: Case, workspace: Path) -> None:
        self.vocabulary = bench.renderer.vocabulary
        self._case = case
        self._workspace = str(workspace)
        self._steps = iter(case.steps)
        self._answers: list[tuple[list[int], list[int]]] = []  # prompt, answer

    def rest(self, input_ids: list[int]) -> list[int]:
        """The answer, from wherever another engine was cut off in it."""
        for prompt, answer in self._answers:
            got = input_ids[len(prompt) :]
            if input_ids[: len(prompt)] == prompt and answer[: len(got)] == got:
                return answer[len(got) :]
        text = self.vocabulary.decode(input_ids)
        last = text.rpartition("<|im_start|>user")[2]
        if SUBJOB in text and INSTRUCTION not in text:
            said = "It is seven."
        elif "<tools>" in text and SUMMARISE not in last:
            said = self._said(next(self._steps, self._case.steps[-1]), text)
        else:
            said = self._case.side
        answer = [*self.vocabulary.encode(said), 2]
        self._answers.append((input_ids, answer))
        return answer

    def _said(self, step: Step, prompt: str) -> str:
        text = step.text
        for name, arguments in step.calls:
            call = {"name": name, "arguments": {k: self._filled(v, prompt) for k, v in arguments.items()}}
            text += f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return text

    def _filled(self, value: Any, prompt: str) -> Any:
        if value == "{session}":
            return int(re.findall(r"session ID (\d+)", prompt)[-1])
        if value == ["{agent}"]:
            return re.findall(r'"agent_id":"([0-9a-f-]+)"', prompt)[-1:]
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
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, target, _ = head.split(maxsplit=2)
            host, _, port = target.rpartition(":")
            if method != "CONNECT" or host != "127.0.0.1":
                if method == "CONNECT" or "://" in target:  # what asks for a path has not come to a proxy
                    self.outside.append(f"{method} {target}")
                writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await asyncio.gather(self._pipe(reader, far_writer), self._pipe(far_reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


def arguments(name: str, bench: Any, out: Path, context: int = 1_000_000, sandbox: str = "none") -> list[str]:
    """Of `gyre-agent-proxy run` for the harness `name` and all engines of the bench."""
    found = [
        "--sandbox",
        sandbox,
        "--harness",
        name,
        "--instruction",
        INSTRUCTION,
        "--out",
        str(out),
        "--json",
        "--budget",
        "200",
    ]
    found += ["--model", str(bench.folder), "--name", "policy", "--context", str(context)]
    return found + [part for engine in bench.engines for part in ("--engine", engine.url)]


async def begin(*arguments: str) -> asyncio.subprocess.Process:
    """Start `gyre-agent-proxy run` with harnesses on PATH."""
    return await asyncio.create_subprocess_exec(
        *CLI, "run", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PATH": search_path()},
    )  # fmt: skip


async def run(*arguments: str, meanwhile: Coroutine[Any, Any, None] | None = None) -> tuple[int, str, str]:
    """`gyre-agent-proxy run`; returns (exit code, stdout, stderr)."""
    process = await begin(*arguments)
    beside = asyncio.create_task(meanwhile) if meanwhile is not None else None
    try:
        out, err = await asyncio.wait_for(process.communicate(), 240)
    except BaseException:
        process.terminate()
        await process.wait()
        raise
    finally:
        if beside is not None:
            beside.cancel()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()
