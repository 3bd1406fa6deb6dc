"""Child processes: readiness, ends, and that nothing outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_transport.errors import ProcessError
from gyre_transport.process import Child, follow_parent, ready

SCRIPTS = Path(__file__).parent / "scripts"
LONG = 60.0


def ours(how: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "child.py"), how]


def daemons(pids: Path, how: str) -> list[str]:
    return ["/bin/sh", str(SCRIPTS / "daemon.sh"), str(pids), how]


def listed(pids: Path) -> list[int]:
    return [int(p) for p in pids.read_text().split()]


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "logs" / "child.log"


async def test_a_child_says_what_it_serves_and_stops_in_order(log, monkeypatch):
    for name in [n for n in os.environ if n.startswith("GYRE_")]:  # of whoever runs the tests
        monkeypatch.delenv(name)
    child = await Child.start("child", ours("good"), log=log, ready_within=LONG)
    assert child.info == {"pid": child.pid}
    assert child.returncode is None
    assert await child.stop() == 0
    assert await child.stop() == 0
    assert child.returncode == 0
    assert log.read_text() == "child good\nleft:\nstopped in order\n"  # its own children inherit none of our names


async def test_logs_are_appended(log):
    for _ in range(2):
        child = await Child.start("child", ours("good"), log=log, ready_within=LONG)
        await child.stop()
    assert log.read_text().count("stopped in order") == 2


async def test_a_child_that_is_not_ready_in_time_is_stopped_and_the_error_shows_its_log(log):
    log.parent.mkdir()
    log.write_text("loading the weights\n")
    with pytest.raises(
        ProcessError, match=r"(?s)child was not ready in 0\.5 s; .* log '.*child\.log':\nloading the weights"
    ):
        await Child.start("child", ours("never"), log=log, ready_within=0.5)


async def test_a_child_that_ends_before_it_is_ready(log):
    with pytest.raises(ProcessError, match=r"(?s)exit code 3 before it was ready.*no such model"):
        await Child.start("child", ours("early"), log=log, ready_within=LONG)


async def test_a_child_whose_grandchild_holds_the_pipe(log):
    with pytest.raises(ProcessError, match="exit code 4 before it was ready"):
        await Child.start("child", ours("orphaning"), log=log, ready_within=LONG)
    os.kill(int(log.read_text().split()[-1]), signal.SIGKILL)


async def test_a_child_that_announces_something_else(log):
    with pytest.raises(ProcessError, match="announced b'hello"):
        await Child.start("child", ours("garbage"), log=log, ready_within=LONG)


async def test_a_child_that_loses_the_pipe_is_not_waited_for_for_ever(log):
    with pytest.raises(ProcessError, match="was not ready"):
        await Child.start("child", ours("silent"), log=log, ready_within=1.0)


@pytest.mark.parametrize("guarded", [False, True])
async def test_a_program_that_is_not_there(log, guarded):
    start = Child.start("engine", ["/no/such/program"], log=log, ready_within=None, guarded=guarded)
    if not guarded:
        with pytest.raises(ProcessError, match=r"cannot start engine .*/no/such/program"):
            await start
        return
    child = await start
    assert await child.wait() == 127
    assert "cannot start '/no/such/program'" in child.tail()


async def test_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / "logs").write_text("a file, not a folder")
    with pytest.raises(ProcessError, match="cannot start child"):
        await Child.start("child", ours("good"), log=tmp_path / "logs" / "child.log")


async def test_a_deaf_child_is_killed_after_the_grace(log):
    child = await Child.start("child", ours("deaf"), log=log, ready_within=LONG)
    assert await child.stop(grace=0.1) == -signal.SIGKILL


async def test_the_whole_environment_is_given(log):
    program = [sys.executable, "-c", "import os, json; print(json.dumps(dict(os.environ)))"]
    child = await Child.start(
        "program", program, log=log, ready_within=None, guarded=True, env={"ONLY": "this", "PATH": "/usr/bin:/bin"}
    )
    assert await child.wait() == 0
    environment = json.loads(log.read_text())
    environment.pop("LC_CTYPE", None)  # Python's own
    assert environment == {"ONLY": "this", "PATH": "/usr/bin:/bin"}


async def test_a_guarded_child_of_ours_can_say_it_is_ready(log):
    child = await Child.start("child", ours("good"), log=log, ready_within=LONG, guarded=True)
    assert child.info["pid"] != child.pid
    assert await child.stop() == 0


@pytest.mark.parametrize(("how", "code"), [("exit", 5), ("signal", 128 + signal.SIGSEGV)])
async def test_the_guard_ends_what_a_program_leaves_behind(log, tmp_path, alive, how, code):
    pids = tmp_path / "pids"
    pids.touch()
    child = await Child.start("program", daemons(pids, how), log=log, ready_within=None, guarded=True)
    assert await child.wait() == code
    assert "all started" in log.read_text()
    assert len(listed(pids)) == 4
    assert not [p for p in listed(pids) if alive(p)]


async def test_stopping_a_guarded_program_is_polite_first(log, tmp_path, alive, eventually):
    pids = tmp_path / "pids"
    pids.touch()
    child = await Child.start("program", daemons(pids, "wait"), log=log, ready_within=None, guarded=True)
    eventually(lambda: "all started" in log.read_text())
    assert await child.stop() == 6
    assert "program told to stop" in log.read_text()
    assert not [p for p in listed(pids) if alive(p)]


async def test_a_short_grace_still_ends_the_whole_tree(log, tmp_path, alive, eventually):
    pids = tmp_path / "pids"
    pids.touch()
    child = await Child.start("program", daemons(pids, "deaf"), log=log, ready_within=None, guarded=True)
    eventually(lambda: "all started" in log.read_text())
    assert await child.stop(grace=0.05) == 128 + signal.SIGKILL
    assert not [p for p in listed(pids) if alive(p)]


def test_a_second_sigterm_ends_the_guards_patience(log, tmp_path, alive, eventually):
    pids = tmp_path / "pids"
    pids.touch()
    code = "import sys; from gyre_transport import guard; guard._GRACE = 600; sys.exit(guard.main(sys.argv[1:]))"
    log.parent.mkdir()
    with log.open("w") as out:
        guard = subprocess.Popen([sys.executable, "-c", code, *daemons(pids, "deaf")], stdout=out)
    eventually(lambda: "all started" in log.read_text())
    guard.send_signal(signal.SIGTERM)
    eventually(lambda: "program told to stop" in log.read_text())
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(LONG) == 128 + signal.SIGKILL
    assert not [p for p in listed(pids) if alive(p)]


@pytest.mark.parametrize("how", ["good", "deaf"])
def test_a_child_ends_when_its_parent_is_killed(script, log, alive, eventually, how):
    parent = script("parent.py", "own", str(log), how)
    child = parent.receive()
    assert alive(child)
    parent.kill()
    eventually(lambda: not alive(child))
    if how == "good":
        assert "stopped in order" in log.read_text()


def test_a_guarded_tree_ends_when_the_parent_is_killed(script, log, tmp_path, alive, eventually):
    pids = tmp_path / "pids"
    pids.touch()
    parent = script("parent.py", "guarded", str(log), *daemons(pids, "wait"))
    guard = parent.receive()
    eventually(lambda: "all started" in log.read_text())
    parent.kill()
    eventually(lambda: not alive(guard))
    assert not [p for p in listed(pids) if alive(p)]


def test_a_program_ends_when_its_guard_is_killed(script, log, alive, eventually, tmp_path):
    pid = tmp_path / "pid"
    pid.touch()
    parent = script("parent.py", "guarded", str(log), "/bin/sh", "-c", 'echo $$ >"$0"; sleep 600 & wait', str(pid))
    guard = parent.receive()
    eventually(lambda: pid.read_text().endswith("\n"))
    program = int(pid.read_text())
    group = os.getpgid(program)
    os.kill(guard, signal.SIGKILL)
    eventually(lambda: not alive(program))
    os.killpg(group, signal.SIGKILL)  # what a dead guard cannot end


def test_without_a_parent_nothing_happens(monkeypatch):
    monkeypatch.delenv("GYRE_PARENT_FD", raising=False)
    monkeypatch.delenv("GYRE_READY_FD", raising=False)
    follow_parent()
    ready(port=1)


async def test_tail_of_a_log_that_is_gone(log):
    child = await Child.start("child", ours("good"), log=log, ready_within=LONG)
    await child.stop()
    log.unlink()
    assert "cannot be read" in child.tail()


async def test_the_exit_code_of_a_child_that_ends_as_it_is_stopped(log):
    child = await Child.start("child", ["/bin/sleep", "600"], log=log, ready_within=None)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and the event loop did not see it yet
    assert child.returncode is None
    assert await child.stop() == -signal.SIGKILL
