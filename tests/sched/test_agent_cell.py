"""A cell over the real bus: a real agent process with a real engine, a scripted trainer and a scripted scheduler.

Its engine takes new weights from memory and leaves requests in place; test_engine_moves has the other way.

One cell serves the whole module; every test finds it in rollout. Weights of version v shift what is sampled first by v
(see parts/publisher.py), so what an engine says it serves is checked against what it answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import pytest_asyncio

from gyre_sched import protocol as p
from gyre_sched.engine.client import EngineClient
from gyre_transport.bus import Client, Server
from gyre_transport.process import Child

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang: uv sync --group engine"),
]

PARTS = Path(__file__).parent / "parts"
WAIT = 300.0  # seconds until a test gives up
PROMPT = list(range(10, 40))
VOCABULARY = 1024


def number(label: str) -> int:
    """The version in an engine's name for its weights."""
    return int(label.partition("-")[0])


class Publisher:
    """Publishes from another process; versions go up by one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.version = 0
        self.manifest = b""

    async def next(self) -> tuple[int, bytes]:
        assert self._process.stdin
        assert self._process.stdout
        self.version += 1
        self._process.stdin.write(f"{self.version}\n".encode())
        self.manifest = bytes.fromhex((await self._process.stdout.readline()).decode())
        return self.version, self.manifest


class Cell:
    def __init__(self, child: Child, scheduler: Any, publisher: Publisher, agent: Client, hello: p.CellHello) -> None:
        self.child = child
        self.scheduler = scheduler
        self.publisher = publisher
        self.hello = hello
        self.engine = EngineClient("cell-0", hello.engine_url)
        self.first = -1  # what version 0 samples first after PROMPT
        self._agent = agent

    async def ask(self, request: p.AgentRequest) -> p.AgentReply:
        if isinstance(request, p.EnterTraining | p.EnterRollout | p.Refresh):
            request = msgspec.structs.replace(request, term=1, registration=1)
        reply: p.AgentReply = await self._agent.call(request, deadline=WAIT)
        return reply

    async def to_rollout(self) -> p.Done:
        done = await self.ask(p.EnterRollout(version=self.publisher.version, manifest=self.publisher.manifest))
        assert isinstance(done, p.Done), done
        return done

    async def sampled_first(self) -> int:
        answer = await self.engine.generate(PROMPT, max_new_tokens=1, deadline=60)
        first: int = answer["output_ids"][0]
        return first

    async def serves(self, version: int) -> bool:
        """Whether the engine says it serves `version`, and samples as that version does."""
        labelled = number(await self.engine.weight_version()) == version
        return labelled and await self.sampled_first() == (self.first + version) % VOCABULARY

    def pids(self) -> set[int]:
        """Every process of the cell: agent, guard, engine's processes, trainer; torch's helper, which removes what
        was shared when the agent is gone, aside."""
        agent = psutil.Process(self.child.pid)
        return {agent.pid, *(c.pid for c in agent.children(recursive=True) if "torch_shm_m" not in c.name())}

    async def long_generation(self, tokens: int) -> tuple[asyncio.Task[dict[str, Any]], asyncio.Event]:
        """A generation in the background; the event is set when it has produced something."""
        begun = asyncio.Event()

        async def stream() -> dict[str, Any]:
            sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "stream": True}
            last: dict[str, Any] = {}
            async with (
                aiohttp.ClientSession(read_bufsize=1 << 24) as http,
                http.post(f"{self.hello.engine_url}/generate", json=body) as response,
            ):
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        last = json.loads(line[6:])
                        begun.set()
            return last

        task = asyncio.create_task(stream())
        async with asyncio.timeout(60):
            await begun.wait()
        return task, begun


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(heard: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cell]:
    folder = tmp_path_factory.mktemp("cell")
    scratch = folder / "scratch"
    scratch.mkdir()
    config = folder / "config.toml"
    with tempfile.TemporaryDirectory(prefix="gyre-") as bus:  # short: the path of a socket is limited
        config.write_text(f"""
[run]
dir = "{folder}"
[bus]
dir = "{bus}"
[model]
path = "{tiny_model}"
[sched]
heartbeat = 0.5
capacity = 5
trainer = ["{sys.executable}", "{PARTS / "trainer.py"}"]
[engine]
context_length = 4096
max_tokens = 16384
scratch = "{scratch}"
refresh = "tensor"
refresh_pause = "in_place"
""")
        scheduler = heard()
        publisher = await asyncio.create_subprocess_exec(
            sys.executable,
            PARTS / "publisher.py",
            tiny_model,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        argv = [sys.executable, "-m", "gyre_sched.cli", "agent", "--config", str(config), "--cell", "0"]
        async with (
            Server(f"ipc://{bus}/scheduler", p.Request, scheduler.handle),
            Client(f"ipc://{bus}/agent-0", p.AgentReply) as agent,
        ):
            child = await Child.start("agent", argv, log=folder / "agent.log", ready_within=450)
            try:
                hello = scheduler.hello()
                cell = Cell(child, scheduler, Publisher(publisher), agent, hello)
                cell.first = await cell.sampled_first()
                yield cell
                assert not list(scratch.iterdir()), "weights were left behind"
            finally:
                await child.stop(60)
                publisher.terminate()
                await publisher.wait()
        await cell.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def cell(running: Cell) -> Cell:
    """The cell in rollout with the newest version published so far."""
    await running.to_rollout()
    return running


async def test_it_says_hello_once_both_processes_are_up(cell: Cell) -> None:
    assert isinstance(cell.scheduler.messages[0], p.CellHello), "before any state"
    assert (cell.hello.cell, cell.hello.engine, cell.hello.capacity, cell.hello.version) == (0, "cell-0", 5, 0)
    assert cell.child.info["engine_url"] == cell.hello.engine_url
    state = await cell.scheduler.state(lambda s: True, since=len(cell.scheduler.messages))
    assert (state.engine_alive, state.trainer_alive, state.trainer, state.routable) == (True, True, "idle", True)


async def test_generation_with_log_probabilities(cell: Cell) -> None:
    answer = await cell.engine.generate(PROMPT, max_new_tokens=6, deadline=60, return_logprob=True)
    found = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in found] == answer["output_ids"]
    assert len(found) == 6
    assert all(-20 < logprob < 0 for logprob, _, _ in found)


async def test_a_role_switch_there_and_back_with_the_same_processes(cell: Cell) -> None:
    before, since = cell.pids(), len(cell.scheduler.messages)
    done = await cell.ask(p.EnterTraining())
    assert isinstance(done, p.Done)
    assert done.seconds > 0
    training = await cell.scheduler.state(lambda s: s.trainer == "training", since)
    assert training.engine_alive
    assert not training.routable
    assert isinstance(await cell.ask(p.EnterTraining()), p.Done), "asked again"
    held = asyncio.create_task(cell.sampled_first())  # a stray request waits, it is not refused

    version, _ = await cell.publisher.next()
    assert (await cell.to_rollout()).version == version
    back = await cell.scheduler.state(lambda s: s.routable and s.version == version, since)
    assert back.trainer == "idle"
    assert await held == (cell.first + version) % VOCABULARY
    assert await cell.serves(version)
    assert cell.pids() == before


async def test_return_without_new_weights_keeps_them(cell: Cell) -> None:
    version = cell.publisher.version
    assert isinstance(await cell.ask(p.EnterTraining()), p.Done)
    assert (await cell.to_rollout()).version == version
    assert await cell.serves(version)


async def test_what_is_in_flight_is_cut_short_before_training(cell: Cell) -> None:
    task, _ = await cell.long_generation(3500)
    assert isinstance(await cell.ask(p.EnterTraining()), p.Done)
    answer = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 3500
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


async def test_a_refresh_keeps_what_is_in_flight_in_place(cell: Cell) -> None:
    old = cell.publisher.version
    assert await cell.serves(old)
    task, _ = await cell.long_generation(1500)
    version, manifest = await cell.publisher.next()
    done = await cell.ask(p.Refresh(version=version, manifest=manifest))
    assert isinstance(done, p.Done)
    assert done.version == version
    meta = (await task)["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 1500}
    spans = [(number(s["version"]), s["start"], s["end"]) for s in meta["weight_versions"]]
    middle = spans[0][2]
    assert 0 < middle < 1500
    assert spans == [(old, 0, middle), (version, middle, 1500)]
    assert not meta["num_retractions"]
    answer = await cell.engine.generate(PROMPT, max_new_tokens=1, deadline=60)
    assert answer["meta_info"]["cached_tokens"] == 0, "its prompt was cached, under other weights"
    answer = await cell.engine.generate(PROMPT, max_new_tokens=1, deadline=60)
    assert answer["meta_info"]["cached_tokens"] > 0
    assert await cell.serves(version)


async def test_weights_that_were_replaced_are_an_answer_not_a_change(cell: Cell) -> None:
    version = cell.publisher.version
    stale, manifest = await cell.publisher.next()
    await cell.publisher.next()
    reply = await cell.ask(p.Refresh(version=stale, manifest=manifest))
    assert isinstance(reply, p.Failed)
    assert "StaleVersion" in reply.detail
    assert await cell.serves(version)


async def test_a_killed_engine_is_refreshed_before_it_is_routable(cell: Cell) -> None:
    version, since, before = cell.publisher.version, len(cell.scheduler.messages), cell.pids()
    guard = psutil.Process(cell.child.info["engine_pid"])
    server = guard.children()[0]
    os.kill(server.pid, signal.SIGKILL)
    lost = await cell.scheduler.state(lambda s: not s.engine_alive, since)
    assert not lost.routable
    assert lost.trainer_alive
    back = await cell.scheduler.state(lambda s: s.routable, cell.scheduler.messages.index(lost, since))
    assert back.version == version
    assert await cell.serves(version)
    assert not psutil.pid_exists(server.pid)
    assert len(cell.pids()) == len(before), "nothing of the old engine is left"


async def test_a_killed_trainer_is_started_again_and_the_engine_is_not(cell: Cell) -> None:
    since = len(cell.scheduler.messages)
    trainer = next(c for c in psutil.Process(cell.child.pid).children() if "trainer.py" in " ".join(c.cmdline()))
    others = cell.pids() - {trainer.pid}
    trainer.kill()
    lost = await cell.scheduler.state(lambda s: not s.trainer_alive, since)
    assert "exit code -9" in lost.detail
    await cell.scheduler.state(lambda s: s.trainer_alive, cell.scheduler.messages.index(lost, since))
    assert others < cell.pids()
    assert isinstance(await cell.ask(p.EnterTraining()), p.Done)
