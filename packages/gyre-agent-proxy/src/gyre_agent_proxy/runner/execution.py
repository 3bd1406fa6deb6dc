"""One execution's harness: a clean environment, its own workspace, a wall-clock budget, the end of its process tree."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gyre_agent_proxy.runner import harnesses
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.contained import NOT_MADE
from gyre_agent_proxy.runner.errors import HarnessError
from gyre_agent_proxy.runner.owner import LABEL
from gyre_agent_proxy.runner.places import Place
from gyre_agent_proxy.runner.sandbox import FAILED, Sandbox, View, harness_view, host_path
from gyre_agent_proxy.runner.tasks import Task
from gyre_transport.errors import ProcessError
from gyre_transport.process import Child

_CONTEXT = 131_072  # tokens a harness is told of where no context is known
_OUTPUT = 32_768  # tokens of an answer it is told of, at most a quarter of the context
_STOP_GRACE = 15.0  # seconds; longer than the guard takes to end a tree
_NOT_STARTED = 127  # the guard's exit code, and the sandbox's; and their words
_CANNOT = "guard: cannot start", "sandbox: cannot start"


class Harness(msgspec.Struct, frozen=True, kw_only=True):
    """The harness command of a run and what it is told; validated by `harness`."""

    command: tuple[str, ...]
    env: dict[str, str]
    folder: str
    model: str
    base_url: str  # of the proxy, without /v1
    instructions: Path  # folder of <task>.md
    stdin: str = ""  # a file; empty: nothing
    files: dict[str, str] = {}  # written below its home
    private: bool = False  # its home is a folder of its own, not the workspace
    context: int = 0  # tokens of prompt and answer together
    output: int = 0  # tokens of an answer
    sandbox: Place = Sandbox()
    owner: str = ""  # of its processes: the run's owner name; empty: they carry none
    hidden: tuple[Path, ...] = ()  # folders that it does not see in the sandbox

    def values(self, task: Task, execution: str, key: str, workspace: Path, home: Path) -> dict[str, str]:
        """What the placeholders stand for."""
        return {
            "python": sys.executable,
            "folder": self.folder,
            "workspace": str(workspace),
            "instruction": task.instruction,
            "instruction_file": str(self.instructions / f"{task.name}.md"),
            "base_url": self.base_url,
            "key": key,
            "model": self.model,
            "task": task.name,
            "execution": execution,
            "home": str(home),
            "context": str(self.context),
            "output": str(self.output),
        }

    def view(
        self, argv: Sequence[str], env: Mapping[str, str], values: Mapping[str, str], folders: Sequence[Path]
    ) -> View:
        """What it sees in the sandbox; `folders` are its own, the workspace first."""
        refers = any("{folder}" in text for text in (*self.command, *self.env.values()))
        return harness_view(
            argv,
            env,
            cwd=folders[0],
            write=folders,
            read=(Path(values["instruction_file"]),),
            folder=Path(self.folder) if refers else None,
            hidden=self.hidden,
            places=self.sandbox.places(folders[0]),
            execution=values["execution"],
            stdin=bool(self.stdin),
        )

    def environment(self, values: dict[str, str]) -> dict[str, str]:
        """The whole environment of the harness: nothing of the runner's own but PATH."""
        return {
            "PATH": host_path(),
            "HOME": values["home"],
            "LANG": "C.UTF-8",
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_KEY": values["key"],
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_AUTH_TOKEN": values["key"],
            "GYRE_MODEL": self.model,
            "GYRE_TASK": values["task"],
            "GYRE_EXECUTION": values["execution"],
            "GYRE_INSTRUCTION": values["instruction_file"],
            **{name: fill(value, values) for name, value in self.env.items()},
            **({LABEL: f"{self.owner}/{values['execution']}"} if self.owner else {}),
        }


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness ended."""

    why: str  # "exit <code>" or "budget"
    code: int | None  # None: its budget ended it
    seconds: float


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace {placeholders}; other braces stay as they are (harness arguments may be JSON)."""
    parts = text.split("{")
    filled = [parts[0]]
    for part in parts[1:]:  # one pass: a value's own braces are not looked at again
        name, brace, rest = part.partition("}")
        filled.append(f"{values[name]}{rest}" if brace and name in values else "{" + part)
    return "".join(filled)


def harness(config: RunnerConfig, model: str, base_url: str, instructions: Path, *, context: int = 0) -> Harness:
    """Validate the harness before anything is dispatched; raises `HarnessError`.

    context: tokens that prompt and answer of a call may have together; 0: not known.
    """
    if not config.harness:
        raise HarnessError(
            f"runner.harness is empty; name a harness ({', '.join(harnesses.names())}), or give a command, such as "
            "['{python}', '{folder}/agent.py']"
        )
    known = {"python": sys.executable, "folder": config.folder}
    if isinstance(config.harness, str):
        name = fill(config.harness, known)
        adapter = harnesses.load(str(Path(config.folder, name)) if name.endswith(".toml") else name)
        remedy = f"install {name}: {adapter.install}" if adapter.install else "install it"
    else:
        adapter = harnesses.Adapter(command=config.harness)
        remedy = "install it or correct runner.harness"
    program = fill(adapter.command[0], known)
    if "{" not in program and shutil.which(program) is None and config.sandbox != "container":  # it may be in the image
        raise HarnessError(f"the harness program {program!r} is not on PATH or not executable; {remedy}")
    for argument in adapter.command:
        path = fill(argument, known)
        if argument.startswith("{folder}/") and not Path(path).exists():
            raise HarnessError(f"runner.harness names {argument!r}, but there is no {path!r}; correct the path")
    context = context or _CONTEXT
    return Harness(
        command=adapter.command,
        env={**adapter.env, **config.env},
        folder=config.folder,
        model=config.model or model,
        base_url=base_url.rstrip("/"),
        instructions=instructions,
        stdin=adapter.stdin,
        files=adapter.files,
        private=isinstance(config.harness, str),
        context=context,
        output=min(_OUTPUT, max(1, context // 4)),
    )


async def start(
    harness: Harness, task: Task, execution: str, key: str, workspace: Path, log: Path, home: Path | None = None
) -> Child:
    """Start the harness in its workspace; raises `ProcessError` when the machine cannot start processes.

    home: where a harness with a private home has it: made anew, with its configuration in it, for the caller to remove.
    """
    own = home if harness.private else None
    inside = harness.sandbox.places(workspace)[workspace]
    values = harness.values(task, execution, key, inside, own or inside)
    if own is not None:
        await asyncio.to_thread(_furnish, own, harness.files, values)
    argv, env = [fill(argument, values) for argument in harness.command], harness.environment(values)
    folders = (workspace,) if own is None else (workspace, own)
    await asyncio.to_thread(harness.sandbox.give, *folders)
    command, given = harness.sandbox.launch(argv, env, harness.view(argv, env, values, folders))
    return await Child.start(
        f"harness of {execution}",
        command,
        log=log,
        env=given,
        cwd=workspace,
        stdin=Path(fill(harness.stdin, values)) if harness.stdin else None,
        ready_within=None,
        guarded=True,
    )


def _furnish(home: Path, files: Mapping[str, str], values: Mapping[str, str]) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True, mode=0o700)
    quoted = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in values.items()}
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fill(text, quoted))


async def finish(child: Child, budget: float) -> End:
    """Wait for the harness's own end or the end of its budget in seconds; then nothing of its process tree is left.

    Raises `HarnessError` when the command could not be executed at all, `ProcessError` when there could be no sandbox.
    """
    began = time.monotonic()
    code: int | None = None
    try:
        async with asyncio.timeout(budget):
            code = await child.wait()
    except TimeoutError:
        pass
    finally:
        await child.stop(_STOP_GRACE)
    if code == _NOT_STARTED and any(word in child.tail(2) for word in _CANNOT):
        raise HarnessError(f"the harness command cannot be executed; correct runner.harness; {child.tail(2)}")
    if (code == FAILED[0] and _begins(child.log, FAILED[1])) or (code == NOT_MADE[0] and NOT_MADE[1] in child.tail(1)):
        raise ProcessError(f"the sandbox could not be made; {child.tail(4)}")
    return End(why="budget" if code is None else f"exit {code}", code=code, seconds=time.monotonic() - began)


def _begins(log: Path, word: bytes) -> bool:
    """Whether nothing was printed before `word`: a harness may print the same, but hardly first of all."""
    try:
        with log.open("rb") as f:
            return f.read(len(word)) == word
    except OSError:
        return False
