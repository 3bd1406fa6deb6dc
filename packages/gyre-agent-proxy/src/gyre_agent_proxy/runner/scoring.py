"""Scoring: run a task's verifier on a copy of a kept workspace and read the reward.

    scratch/<attempt>/workspace   the copy, the verifier's working directory and $WORKSPACE
    scratch/<attempt>/tests       the task's tests, $TESTS_DIR
    scratch/<attempt>/logs        $LOGS_DIR; the reward is read from logs/verifier/reward.json, else reward.txt

What a verifier says of a bad workspace is a score, 0 included. A verifier that does not end, ends with an error, or
leaves no number in [0, 1] has failed: it is tried again, and in the end the execution has no score. A workspace that
is too large to be copied has none at once. A full disk is nobody's failure: it ends the run, which scores again when it
goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec

from gyre_agent_proxy.runner import limits
from gyre_agent_proxy.runner.config import RunnerConfig
from gyre_agent_proxy.runner.errors import RunnerError
from gyre_agent_proxy.runner.owner import LABEL, mark, remove
from gyre_agent_proxy.runner.places import Place
from gyre_agent_proxy.runner.sandbox import Sandbox, View, host_path
from gyre_agent_proxy.runner.tasks import Task
from gyre_agent_proxy.runner.workspace import WorkspaceTooLarge, copy, full, produced
from gyre_traj.intake import Ending, Outcome
from gyre_transport.errors import ProcessError
from gyre_transport.process import Child

log = logging.getLogger(__name__)

_STOP_GRACE = 15.0  # seconds; longer than the guard takes to end a tree
_REWARD_BYTES = 1 << 20


class EvaluatorFailed(RunnerError):
    """One try of a verifier gave no score; `final`: another one would give none either."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class Scorer:
    """Scores workspaces, at most `config.evaluators` at a time."""

    def __init__(self, config: RunnerConfig, scratch: Path, sandbox: Place | None = None) -> None:
        self.sandbox: Place = sandbox or Sandbox()
        self.owner = ""  # of verifiers' processes and folders; empty: they carry none
        self._config = config
        self._scratch = scratch
        self._slots = asyncio.Semaphore(config.evaluators)
        self.failures = 0  # tries that gave no score

    async def score(self, task: Task, execution: str, workspace: Path, sandbox: Place | None = None) -> Outcome:
        """Score `workspace`; the outcome is SCORED, NOTHING_TO_SCORE or EVALUATOR_FAILED (after every try failed).

        sandbox: where the task's programs run, if not where all do.
        """
        sandbox = sandbox or self.sandbox
        try:
            made = await asyncio.to_thread(produced, task, workspace)
        except OSError as e:  # somebody else's files in it
            return Outcome(ending=Ending.EVALUATOR_FAILED, detail=f"the workspace cannot be read: {e}")
        if not made:
            wanted = f"no file matches {', '.join(task.artifacts)}" if task.artifacts else "no file was made or changed"
            return Outcome(ending=Ending.NOTHING_TO_SCORE, detail=wanted)
        failure = ""
        for attempt in range(1, self._config.evaluator_attempts + 1):
            folder = self._scratch / f"{execution}-{attempt}"
            try:
                async with self._slots:
                    score, detail = await self._attempt(task, execution, workspace, folder, sandbox)
            except EvaluatorFailed as e:
                self.failures += 1
                failure = f"attempt {attempt} of {self._config.evaluator_attempts}: {e}"
                log.warning("scoring %s (task %s), %s", execution, task.name, failure)
                if e.final:
                    break
                continue
            finally:
                await asyncio.to_thread(remove, folder)
            return Outcome(ending=Ending.SCORED, score=score, detail=detail)
        return Outcome(ending=Ending.EVALUATOR_FAILED, detail=failure)

    async def _attempt(
        self, task: Task, execution: str, workspace: Path, folder: Path, sandbox: Place
    ) -> tuple[float, str]:
        try:
            await asyncio.to_thread(self._lay_out, task, execution, workspace, folder, sandbox)
        except WorkspaceTooLarge as e:
            raise EvaluatorFailed(str(e), final=True) from e
        except (OSError, shutil.Error) as e:
            if full(e):
                raise
            raise EvaluatorFailed(f"the workspace could not be copied: {e}") from e
        timeout = min(self._config.evaluator_timeout, task.verifier_timeout or self._config.evaluator_timeout)
        logs = folder / "logs"
        places = sandbox.places(folder / "workspace", folder / "tests", logs)
        script = str(places[folder / "tests"] / task.verifier)
        program = ("bash", script) if task.verifier == "test.sh" else (sandbox.python, "-I", script)
        limited = sandbox.limited(int(timeout) + 1, self._config.evaluator_memory_mb << 20, program)
        view = View(
            cwd=folder / "workspace",
            write=(folder,),
            read=(Path(limits.__file__),),
            places=places,
            execution=execution,
            part=folder.name.removeprefix(f"{execution}-"),
        )
        env = {
            "PATH": host_path(),
            "HOME": str(places[logs]),
            "LANG": "C.UTF-8",
            "LOGS_DIR": str(places[logs]),
            "TESTS_DIR": str(places[folder / "tests"]),
            "WORKSPACE": str(places[folder / "workspace"]),
            "PYTHONDONTWRITEBYTECODE": "1",
            **({LABEL: f"{self.owner}/{execution}"} if self.owner else {}),
        }
        command, given = sandbox.launch(limited, env, view)
        try:
            child = await Child.start(
                f"verifier of {task.name}",
                command,
                log=folder / "verifier.log",
                env=given,
                cwd=folder / "workspace",
                ready_within=None,
                guarded=True,
            )
        except (ProcessError, OSError) as e:
            raise EvaluatorFailed(str(e)) from e
        try:
            async with asyncio.timeout(timeout):
                code = await child.wait()
        except TimeoutError:
            raise EvaluatorFailed(f"the verifier did not end in {timeout:g} s; {child.tail()}") from None
        finally:
            await child.stop(_STOP_GRACE)
            await sandbox.ended(execution)
        if code:
            raise EvaluatorFailed(f"the verifier ended with exit code {code}; {child.tail()}")
        return read_reward(logs / "verifier")

    def _lay_out(self, task: Task, execution: str, workspace: Path, folder: Path, sandbox: Place) -> None:
        if self.owner:
            mark(folder, self.owner, execution)
        shutil.rmtree(folder, ignore_errors=True)
        copy(workspace, folder / "workspace", self._config.workspace_limit_mb << 20)
        shutil.copytree(task.tests, folder / "tests")
        (folder / "logs" / "verifier").mkdir(parents=True)
        sandbox.give(folder)


def read_reward(folder: Path) -> tuple[float, str]:
    """Return (reward in [0, 1], what else reward.json says) from reward.json or else reward.txt in `folder`.

    Raises `EvaluatorFailed` when there is no regular file or no finite number in [0, 1] in it.
    """
    if folder.is_symlink():
        raise EvaluatorFailed(
            "$LOGS_DIR/verifier is a link; the verifier writes its reward into the folder it was given"
        )
    for name in ("reward.json", "reward.txt"):
        path = folder / name
        try:
            raw = _content(path)
        except FileNotFoundError:
            continue
        except OSError as e:
            raise EvaluatorFailed(f"{name} cannot be read: {e.strerror}") from e
        try:
            value = msgspec.json.decode(raw) if name == "reward.json" else float(raw)
        except (msgspec.DecodeError, ValueError) as e:
            raise EvaluatorFailed(f"{name} holds {raw[:80]!r}, expected a number in [0, 1]: {e}") from e
        return _reward(value, name)
    raise EvaluatorFailed("the verifier wrote neither reward.json nor reward.txt into $LOGS_DIR/verifier")


def _content(path: Path) -> bytes:
    """The beginning of a regular file. Raises `EvaluatorFailed` for anything else, which could block or lead away."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise EvaluatorFailed(f"{path.name} is no regular file; the verifier writes its reward into one")
        with open(fd, "rb", closefd=False) as f:
            return f.read(_REWARD_BYTES)
    finally:
        os.close(fd)


def _reward(value: Any, name: str) -> tuple[float, str]:
    rest = ""
    if isinstance(value, dict):
        keys = sorted(value)
        if "reward" in value:
            rest = json.dumps({k: v for k, v in value.items() if k != "reward"})[:500] if len(value) > 1 else ""
            value = value["reward"]
        elif len(value) == 1:
            value = value[keys[0]]
        else:
            raise EvaluatorFailed(f"{name} has the keys {keys}, expected 'reward' or a single one")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise EvaluatorFailed(f"{name} says {value!r}, expected a number in [0, 1]")
    return float(value), rest
