"""A cell's agent with a scripted engine and a scripted trainer, each a process of its own, over the real bus."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from gyre_sched import protocol as p
from gyre_sched.agent import CellAgent, trainer_command
from gyre_sched.config import SchedConfig
from gyre_sched.engine import launch
from gyre_sched.errors import EngineError, EngineStartError, TrainerError
from gyre_transport.bus import Client, Server
from gyre_transport.run import Context

PARTS = Path(__file__).parent / "parts"
WAIT = 60.0  # seconds until a test gives up


class Rig:
    """A run with one cell: its config, a scheduler that listens, and the agent once `up`."""

    def __init__(self, folder: Path, bus: str, scheduler: Any) -> None:
        self.folder = folder
        self.bus = bus
        self.scheduler = scheduler
        self.client = Client(f"ipc://{bus}/agent-0", p.AgentReply)
        self.agent: CellAgent
        self.running: asyncio.Task[None] | None = None
        self.before = set(psutil.Process().children())  # the session's engine may be up

    def write(self, *, cell: int = 0, sched: str = "", engine: str = "", trainer: str = "trainer.py") -> Path:
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        config = self.folder / "config.toml"
        config.write_text(f"""
[run]
dir = "{self.folder}"
[bus]
dir = "{self.bus}"
[model]
path = "{model}"
name = "policy"
[sched]
heartbeat = 0.2
trainer = ["{sys.executable}", "{PARTS / trainer}"]
{sched}
[engine]
device = "cpu"
stop_timeout = 5.0
{engine}
""")
        return config

    def start(self, *, cell: int = 0, **config: str) -> asyncio.Task[None]:
        self.client = Client(f"ipc://{self.bus}/agent-{cell}", p.AgentReply)
        self.agent = CellAgent(Context(self.write(**config)), cell)
        self.running = asyncio.create_task(self.agent.run())
        return self.running

    async def up(self, **config: Any) -> asyncio.Task[None]:
        running = self.start(**config)
        state = asyncio.create_task(self.scheduler.state(lambda s: s.routable, wait=WAIT))
        await asyncio.wait({running, state}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            state.cancel()
            running.result()
        await state
        return running

    async def ask(self, request: p.AgentRequest) -> p.AgentReply:
        if isinstance(request, p.EnterTraining | p.EnterRollout | p.Refresh):
            request = msgspec.structs.replace(request, term=1, registration=1)
        reply: p.AgentReply = await self.client.call(request, deadline=WAIT)
        return reply

    async def end(self, running: asyncio.Task[None]) -> None:
        async with asyncio.timeout(WAIT):
            await running

    def faults(self, *names: str) -> None:
        (self.folder / "faults").write_text("\n".join(names))

    def kill_engine(self) -> None:
        assert self.agent.engine.pid is not None
        psutil.Process(self.agent.engine.pid).children()[0].kill()  # below its guard

    def nothing_left(self) -> bool:
        return set(psutil.Process().children()) <= self.before


@pytest_asyncio.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: Any) -> AsyncIterator[Rig]:
    argv = [sys.executable, str(PARTS / "engine.py")]
    monkeypatch.setattr(
        launch,
        "command",
        lambda c, m, port, cuda, kv=None: ([*argv, str(port), str(tmp_path / "faults")], dict(os.environ)),
    )
    monkeypatch.setattr(launch, "check", lambda *args, **settings: None)
    with tempfile.TemporaryDirectory(prefix="gyre-") as bus:
        scheduler = heard()
        made = Rig(tmp_path, bus, scheduler)
        async with Server(f"ipc://{bus}/scheduler", p.Request, scheduler.handle):
            yield made
            if made.running is not None:
                made.running.cancel()
                await asyncio.gather(made.running, return_exceptions=True)
            await made.client.close()
        assert made.nothing_left()


async def test_stop_waits_for_the_trainers_clean_exit_and_ends_everything(rig: Rig) -> None:
    running = await rig.up()
    assert isinstance(await rig.ask(p.EnterTraining()), p.Done)
    assert isinstance(await rig.ask(p.StopCell()), p.Done)
    await rig.end(running)
    assert (rig.folder / "stopped-0").exists(), "the trainer had the time to save"
    assert rig.nothing_left()


async def test_stop_tells_of_a_trainer_that_does_not_end(rig: Rig) -> None:
    running = await rig.up(trainer="stubborn.py", sched="return_timeout = 1.0")
    reply = await rig.ask(p.StopCell())
    assert isinstance(reply, p.Failed)
    assert "did not stop in 0.9 s" in reply.detail
    with pytest.raises(TrainerError, match="did not stop"):
        await rig.end(running)
    assert rig.nothing_left()


async def test_stop_interrupts_a_switch(rig: Rig) -> None:
    running = await rig.up(trainer="stubborn.py", sched="return_timeout = 2.0")
    entering = asyncio.create_task(rig.ask(p.EnterTraining()))  # a stubborn trainer never enters
    await rig.scheduler.state(lambda s: not s.routable, wait=WAIT)
    await rig.ask(p.StopCell())
    assert await entering == p.Failed(detail="cell 0 is stopping")
    with pytest.raises(TrainerError):
        await rig.end(running)


async def test_a_trainer_that_does_not_enter_is_an_answer_and_the_cell_can_return(rig: Rig) -> None:
    await rig.up(trainer="stubborn.py", sched="enter_timeout = 1.0")
    reply = await rig.ask(p.EnterTraining())
    assert isinstance(reply, p.Failed)
    assert "was ordered 'training' and is 'idle'" in reply.detail
    assert rig.agent.engine.released
    assert rig.agent.trainer.want == "idle"
    assert isinstance(await rig.ask(p.EnterRollout(version=0, manifest=b"")), p.Done)
    since = len(rig.scheduler.messages)
    assert (await rig.scheduler.state(lambda s: True, since, wait=WAIT)).routable


async def test_being_cancelled_ends_everything(rig: Rig) -> None:
    running = await rig.up()
    assert not rig.nothing_left()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rig.end(running)
    assert rig.nothing_left()


async def test_an_engine_that_cannot_start_ends_the_agent_and_the_trainer(rig: Rig) -> None:
    rig.faults("dies")
    with pytest.raises(EngineStartError, match=r"(?s)cell-0 ended with exit code 3.*does not fit"):
        await rig.end(rig.start())
    assert rig.nothing_left()


async def test_a_trainer_that_ends_before_it_reports_is_told_with_its_log(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_CODE", "3")
    with pytest.raises(TrainerError, match=r"(?s)trainer of cell 0 ended with exit code 3.*ends early"):
        await rig.end(rig.start())
    assert rig.nothing_left()


async def test_no_run_without_the_cores_trainer(rig: Rig) -> None:
    running = await rig.up(engine="attempts = 0")
    assert rig.agent.trainer.pid is not None
    psutil.Process(rig.agent.trainer.pid).kill()
    with pytest.raises(TrainerError, match="given up"):
        await rig.end(running)


async def test_a_satellite_without_a_trainer_stays_in_rollout(rig: Rig) -> None:
    running = await rig.up(cell=1, engine="attempts = 0")
    assert rig.agent.trainer.pid is not None
    psutil.Process(rig.agent.trainer.pid).kill()
    lost = await rig.scheduler.state(lambda s: not s.trainer_alive, wait=WAIT)
    assert lost.routable
    reply = await rig.ask(p.EnterTraining())
    assert isinstance(reply, p.Failed)
    assert "exit code -9" in reply.detail
    assert not rig.agent.engine.released
    assert not running.done()


async def test_no_run_without_the_cores_engine(rig: Rig) -> None:
    running = await rig.up(engine="attempts = 0")
    rig.kill_engine()
    with pytest.raises(EngineError, match="engine cell-0 was given up: it ended with exit code 137"):
        await rig.end(running)
    assert rig.nothing_left()


async def test_a_satellite_whose_engine_is_given_up_says_so_and_is_not_started_by_an_order(rig: Rig) -> None:
    running = await rig.up(cell=1, engine="attempts = 0")
    rig.kill_engine()
    lost = await rig.scheduler.state(lambda s: not s.engine_alive, wait=WAIT)
    assert not lost.routable
    assert "exit code 137" in lost.detail
    reply = await rig.ask(p.EnterRollout(version=0, manifest=b""))
    assert isinstance(reply, p.Failed)
    assert "was given up" in reply.detail
    assert rig.agent.engine.pid is None
    assert not running.done()


@pytest.mark.parametrize("sched", ["cells = 1\nstandalone = 1", 'cells = 2\nschedule = "async"\ntrainers = 1'])
async def test_a_cell_that_only_samples_has_no_trainer_and_says_so(rig: Rig, sched: str) -> None:
    running = await rig.up(cell=1, sched=sched)
    assert rig.agent.trainer.pid is None
    state = await rig.scheduler.state(lambda s: True, wait=WAIT)
    assert (state.routable, state.trainer_alive) == (True, False)
    reply = await rig.ask(p.EnterTraining())
    assert isinstance(reply, p.Failed)
    assert "does not train" in reply.detail
    assert not rig.agent.engine.released
    assert isinstance(await rig.ask(p.EnterRollout(version=0, manifest=b"")), p.Done)
    assert isinstance(await rig.ask(p.StopCell()), p.Done)
    await rig.end(running)


async def test_reports_of_another_cells_trainer_are_refused(rig: Rig) -> None:
    await rig.up()
    with pytest.raises(Exception, match="trainer of cell 4 reports to the agent of cell 0"):
        await rig.ask(p.TrainerReport(cell=4, state="idle"))
    with pytest.raises(Exception, match="trainer state"):
        await rig.ask(p.TrainerReport(cell=0, state="asleep"))


async def test_what_an_ended_trainer_had_under_way_is_not_its_successors(rig: Rig) -> None:
    await rig.up()
    with pytest.raises(Exception, match="got one of 'ended'"):
        await rig.ask(p.TrainerReport(cell=0, state="training", instance="ended"))
    assert rig.agent.trainer.state == "idle"


def test_the_trainers_command() -> None:
    config = Path("run") / "config.toml"
    told = ["--config", "run/config.toml", "--cell", "1"]
    assert trainer_command(SchedConfig(), config, 1) == [sys.executable, "-m", "gyre_train.cli", "replica", *told]
    assert trainer_command(SchedConfig(trainer=("mine",)), config, 1) == ["mine", *told]


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang: uv sync --group engine")
async def test_a_port_in_use_ends_the_command_with_one_error(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        config = rig.write(engine=f"port = {port}")
        argv = [sys.executable, "-m", "gyre_sched.cli", "agent", "--config", str(config), "--cell", "0"]
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "engine.port = 0" in done.stderr
    assert "Traceback" not in done.stderr


async def test_sigterm_ends_the_command_cleanly(rig: Rig) -> None:
    """Even while its engine is starting."""
    config = rig.write(engine="attempts = 1")
    argv = [sys.executable, "-m", "gyre_sched.cli", "agent", "--config", str(config), "--cell", "0"]
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    agent = psutil.Process(process.pid)
    end = time.monotonic() + WAIT
    while not agent.children():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    process.terminate()
    async with asyncio.timeout(WAIT):
        _, told = await process.communicate()
    assert process.returncode == 0, told
