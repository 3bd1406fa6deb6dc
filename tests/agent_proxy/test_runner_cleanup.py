"""Clean-up by label: what carries a run's own is ended and removed, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gyre_agent_proxy.runner import cleanup, owner
from gyre_agent_proxy.runner.errors import RunnerError
from gyre_agent_proxy.runner.ledger import Row, State
from gyre_traj.intake import Ending
from gyre_transport.run import RunDir

SECRET = b"0123456789abcdef" * 4
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(label, source): a process with that label, which has printed a line."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(
        label: str | None, source: str = "import time; print(flush=True); time.sleep(600)"
    ) -> subprocess.Popen[bytes]:
        env = {} if label is None else {owner.LABEL: label}
        made.append(subprocess.Popen([sys.executable, "-c", source], env=env, stdout=subprocess.PIPE))
        stdout = made[-1].stdout
        assert stdout is not None
        stdout.readline()
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.communicate()


def test_an_owner_name_is_one_run_s(tmp_path: Path) -> None:
    names = {
        owner.owner_name(SECRET, tmp_path),
        owner.owner_name(SECRET, tmp_path / "copy"),
        owner.owner_name(SECRET[::-1], tmp_path),
    }
    assert len(names) == 3
    assert owner.owner_name(SECRET, tmp_path / "x" / "..") in names
    assert not any(SECRET.decode() in name for name in names)


async def test_only_what_carries_the_label_is_ended(start: Start) -> None:
    mine = [start("run-a/e0"), start("run-a/e1", STUBBORN)]
    others = [start("run-b/e0"), start("run-ab/e0"), start("xrun-a/e0"), start(None)]
    found, left = await owner.end_processes("run-a", grace=0.5)
    assert {(p.pid, p.execution) for p in found} == {(mine[0].pid, "e0"), (mine[1].pid, "e1")}
    assert left == []
    assert [p.wait() for p in mine] == [-signal.SIGTERM, -signal.SIGKILL]
    assert [p.poll() for p in others] == [None] * 4


async def test_a_process_that_took_the_pid_since_is_left_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("run-a/e0")
    (seen,) = owner.processes("run-a")
    looks = iter([[msgspec.structs.replace(seen, started=seen.started - 1)], []])
    monkeypatch.setattr(owner, "processes", lambda _: next(looks))
    await owner.end_processes("run-a", grace=5.0)
    assert process.poll() is None


async def test_one_runner_at_a_time(tmp_path: Path) -> None:
    async with owner.alone(tmp_path / "run", 0.0):
        with pytest.raises(RunnerError, match="another runner is at work in"):
            async with owner.alone(tmp_path / "run", 0.0):
                pass
        async with owner.alone(tmp_path / "other", 0.0):
            pass
    async with owner.alone(tmp_path / "run", 0.0):
        pass


async def test_a_runner_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    order = []

    async def first() -> None:
        async with owner.alone(tmp_path, 0.0):
            held.set()
            await ending.wait()
            order.append("first")

    async def second() -> None:
        async with owner.alone(tmp_path, 60.0):
            order.append("second")

    held, ending = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as both:
        both.create_task(first())
        await held.wait()
        both.create_task(second())
        await asyncio.sleep(0)
        ending.set()
    assert order == ["first", "second"]


def test_folders_are_removed_whatever_is_in_them(tmp_path: Path) -> None:
    folder = tmp_path / "workspaces" / "b0-g00-e0"
    owner.mark(folder, "run-a", "b0-g00-e0")
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").touch()
    (folder / "link").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / "a" / "b").chmod(0o000)
    (folder / "a").chmod(0o500)
    assert owner.marked(folder.parent, "run-a") == {folder: "b0-g00-e0"}
    assert owner.marked(folder.parent, "run-b") == {}
    assert owner.remove(folder)
    assert list(folder.parent.iterdir()) == []
    assert tmp_path.is_dir()
    assert owner.remove(folder), "it is gone already"


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("all", {"scored", "aborted", "nothing_to_score", "evaluator_failed"}),
        ("failed", {"aborted", "nothing_to_score", "evaluator_failed"}),
        ("none", set()),
    ],
)
async def test_workspaces_of_executions_that_are_done(tmp_path: Path, keep: cleanup.Keep, kept: set[str]) -> None:
    """Those of executions that the feed does not have stay, and so does what is not this run's."""
    folders = RunDir(tmp_path)
    rows = []
    for state in (State.JUDGED, State.SUBMITTED, State.TRAINED):
        for ending in Ending:
            name = f"{state}-{ending}"
            owner.mark(folders.workspaces / name, "run-a", name)
            (folders.workspaces / name).mkdir()
            rows.append(Row(id=name, task="t", grp="g", burst=0, state=state, dispatched=0.0, ending=ending))
    for parent in (cleanup.homes(folders), cleanup.scoring(folders)):
        for whose in ("run-a", "run-b"):
            owner.mark(parent / f"{whose}-e", whose, "e")
            (parent / f"{whose}-e").mkdir()
    (folders.workspaces / "somebody's").mkdir()
    await cleanup.clean(folders, "run-a", rows, keep)
    left = {path.name for path in folders.workspaces.iterdir() if path.is_dir()}
    judged = {f"judged-{ending}" for ending in Ending}
    assert left == judged | {f"{state}-{e}" for state in ("submitted", "trained") for e in kept} | {"somebody's"}
    for parent in (cleanup.homes(folders), cleanup.scoring(folders)):
        assert {path.name for path in parent.iterdir()} == {"run-b-e", "run-b-e.owner"}


async def test_a_process_that_does_not_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(name: str, grace: float) -> tuple[list[owner.Process], list[owner.Process]]:
        return [owner.Process(7, 1, "b0-g00-e0")], [owner.Process(7, 1, "b0-g00-e0")]

    monkeypatch.setattr(owner, "end_processes", stuck)
    with pytest.raises(RunnerError, match=r"do not end: 7 \(of b0-g00-e0\); end them"):
        await cleanup.clean(RunDir(tmp_path), "run-a", [], "all")
