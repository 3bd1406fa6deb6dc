"""The life of an engine process that misbehaves: a scripted one, over the real wire and the real process guard."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio

from gyre_sched.engine import launch
from gyre_sched.engine import pages as engine_pages
from gyre_sched.engine.client import EngineClient
from gyre_sched.engine.config import EngineConfig
from gyre_sched.engine.host import EngineHost
from gyre_sched.engine.pages import Pages
from gyre_sched.errors import (
    EngineError,
    EngineRefused,
    EngineStartError,
    EngineUnreachable,
    RefreshError,
    WeightsUnknown,
)
from gyre_transport.bus import Server
from gyre_transport.kv import protocol as kv
from gyre_transport.kv.config import LinkerConfig
from gyre_transport.snapshot import SnapshotSource

PARTS = Path(__file__).parent / "parts"
TENSOR = ("F32", (4,), np.arange(4, dtype="f4"))
WAIT = 120.0  # seconds until a test gives up


class Rig:
    """A host of a scripted engine, and a source of snapshots for it."""

    def __init__(self, folder: Path, source: SnapshotSource) -> None:
        self.faults_file = folder / "faults"
        self.model = folder / "model"
        self.log = folder / "engine.log"
        self.scratch = folder / "scratch"
        self.source = source
        self.host: EngineHost
        self.watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def make(self, pages: Pages | None = None, **config: Any) -> EngineHost:
        settings = {"health_interval": 0.05, "health_failures": 2, "stop_timeout": 5.0, **config}
        self.host = EngineHost(
            "cell-7",
            EngineConfig(scratch=str(self.scratch), **settings),
            self.model,
            self.log,
            self._changed.set,
            pages,
        )
        return self.host

    async def up(self, **config: Any) -> EngineHost:
        host = self.make(**config)
        await host.start()
        self.watching = asyncio.create_task(host.watch())
        return host

    def faults(self, *names: str) -> None:
        self.faults_file.write_text("\n".join(names))

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT):
            while not true():
                await self._changed.wait()
                self._changed.clear()

    def publish(self, version: int) -> bytes:
        return msgspec.msgpack.encode(self.source.publish(version, {"w": TENSOR}))

    async def calls(self) -> list[str]:
        paths: list[str] = await self.host.client._call("GET", "/calls")
        return paths

    def program(self) -> int:
        """Pid of the engine itself, below its guard."""
        assert self.host.pid is not None
        return psutil.Process(self.host.pid).children()[0].pid


@pytest_asyncio.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    with SnapshotSource("m") as source:
        made = Rig(tmp_path, source)
        made.model.mkdir()
        made.scratch.mkdir()
        (made.model / "config.json").write_text("{}")
        header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
        (made.model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        argv = [sys.executable, str(PARTS / "engine.py")]
        monkeypatch.setattr(
            launch,
            "command",
            lambda c, m, port, cuda, kv: ([*argv, str(port), str(made.faults_file)], dict(os.environ)),
        )
        monkeypatch.setattr(launch, "check", lambda c, m, moves: None)
        yield made
        if made.watching:
            made.watching.cancel()
            await asyncio.gather(made.watching, return_exceptions=True)
        await made.host.stop()
        assert not list(made.scratch.iterdir()), "weights were left behind"


@pytest.fixture
def calls(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, bool]]:
    """What the host asks its engine from now on: path, body, and whether the engine counted as alive meanwhile."""
    made: list[tuple[str, Any, bool]] = []
    call = EngineClient._call

    async def recorded(client: EngineClient, method: str, path: str, body: Any = None, **more: Any) -> Any:
        answer = await call(client, method, path, body, **more)
        made.append((path, body, rig.host.alive))
        return answer

    monkeypatch.setattr(EngineClient, "_call", recorded)
    return made


# --- start ----------------------------------------------------------------------------------------------------------


async def test_a_start_warms_the_engine_up(rig: Rig) -> None:
    host = await rig.up()
    assert host.alive
    assert host.version == 0
    assert await rig.calls() == ["/generate", "/freeze_gc"]


async def test_an_engine_that_ends_while_starting_is_told_with_its_log(rig: Rig) -> None:
    rig.faults("dies")
    with pytest.raises(EngineStartError, match=r"(?s)cell-7 ended with exit code 3 while starting.*does not fit"):
        await rig.make().start()
    assert rig.host.pid is None


async def test_an_engine_that_is_never_healthy_is_stopped(rig: Rig) -> None:
    rig.faults("never_healthy")
    with pytest.raises(EngineStartError, match=r"(?s)cell-7 was not healthy in 1 s.*engine\.log"):
        await rig.make(start_timeout=1.0).start()
    async with EngineClient("cell-7", rig.host.url) as client:
        with pytest.raises(EngineUnreachable, match="cannot be reached"):
            await client.health()
    with pytest.raises(EngineUnreachable, match="was stopped"):
        await client.health()


# --- role switch ----------------------------------------------------------------------------------------------------


async def test_release_and_return_in_order(rig: Rig) -> None:
    host, pid = await rig.up(), rig.host.pid
    await host.release()
    await host.release()  # once more changes nothing: a second release would end the engine
    assert host.released
    await host.come_back(1, rig.publish(1), deadline=WAIT)
    await host.come_back(1, b"", deadline=WAIT)
    assert (host.version, host.released, host.pid) == (1, False, pid)
    paths = [p.lstrip("/") for p in await rig.calls()]
    assert paths[2:5] == ["pause_generation", "flush_cache", "release_memory_occupation"]
    assert paths[5:] == [
        *["resume_memory_occupation", "pause_generation", "update_weights_from_disk", "model_info"],
        *["continue_generation", "continue_generation", "generate"],
        *["continue_generation", "generate"],
    ]


async def test_pages_are_held_before_the_cache_is_flushed(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('k')}/kv"
    before: list[str] = []

    async def handle(request: kv.Request) -> kv.Done:
        assert request == kv.Hold(seconds=7.0)
        before.extend(await rig.calls())
        return kv.Done()

    async with Server(address, kv.Request, handle):
        await rig.make(pages=Pages(LinkerConfig(model="m", addresses=(address,)), hold=7.0)).start()
        await rig.host.release()
    assert before == ["/generate", "/freeze_gc"]
    assert rig.host.released


async def test_a_cell_is_released_without_its_kv_service(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pages, "_ANSWER", 0.1)
    await rig.make(pages=Pages(LinkerConfig(model="m", addresses=("ipc:///nowhere/at-all",)), hold=7.0)).start()
    await rig.host.release()
    assert rig.host.released


async def test_a_busy_engine_is_not_released(rig: Rig) -> None:
    host = await rig.up()
    rig.faults("busy")
    with pytest.raises(EngineRefused, match="flush_cache"):
        await host.release()
    assert not host.released
    assert "/release_memory_occupation" not in await rig.calls()
    rig.faults()
    await host.come_back(0, b"", deadline=WAIT)
    assert (await rig.calls())[-2:] == ["/continue_generation", "/generate"]


async def test_weights_that_cannot_be_had_change_nothing(rig: Rig) -> None:
    host = await rig.up()
    old = rig.publish(1)
    rig.publish(2)
    with pytest.raises(RefreshError, match=r"version 1: StaleVersion"):
        await host.refresh(1, old, deadline=WAIT)
    with pytest.raises(RefreshError, match="without a manifest"):
        await host.refresh(3, b"", deadline=WAIT)
    assert host.alive
    assert host.version == 0
    assert "/pause_generation" not in await rig.calls()


@pytest.mark.parametrize(
    ("how", "way", "pause"),
    [
        ("refresh", "disk", "retract"),
        ("refresh", "disk", "in_place"),
        ("refresh", "tensor", "retract"),
        ("refresh", "tensor", "in_place"),
        ("return", "disk", "retract"),
        ("restart", "disk", "in_place"),
    ],
)
async def test_new_weights_abort_nothing_and_leave_no_cache_of_old_ones(
    rig: Rig, calls: list[tuple[str, Any, bool]], how: str, way: str, pause: str
) -> None:
    """SGLang aborts whatever runs unless told otherwise. In place, pages are kept apart by weights: `namespaces`."""
    host = await rig.up(dtype="bfloat16", refresh=way, refresh_pause=pause)
    if how == "return":
        await host.release()
    elif how == "restart":
        await host.refresh(1, rig.publish(1), deadline=WAIT)
    calls.clear()
    if how == "refresh":
        await host.refresh(1, rig.publish(1), deadline=WAIT)
    elif how == "return":
        await host.come_back(1, rig.publish(1), deadline=WAIT)
    else:
        os.kill(rig.program(), signal.SIGKILL)
        await rig.until(lambda: not host.alive)
        await rig.until(lambda: host.alive)
    assert host.version == 1
    assert [body["mode"] for path, body, _ in calls if path == "/pause_generation"] == [pause]
    updates = [body for path, body, _ in calls if path == f"/update_weights_from_{way}"]
    assert updates
    assert [body["abort_all_requests"] for body in updates] == [False] * len(updates)
    assert updates[-1]["flush_cache"] == (pause == "retract")
    assert "/abort_request" not in [path for path, _, _ in calls]


# --- an engine's end ------------------------------------------------------------------------------------------------


async def test_a_killed_engine_comes_back_with_the_last_weights(rig: Rig) -> None:
    host, states = await rig.up(), []
    url, pid = host.url, host.pid
    await host.refresh(3, rig.publish(3), deadline=WAIT)
    os.kill(rig.program(), signal.SIGKILL)
    await rig.until(lambda: not host.alive)
    states.append(host.detail)
    await rig.until(lambda: host.alive)
    assert host.version == 3
    assert host.url == url
    assert host.pid != pid
    assert "exit code 137" in states[0]
    assert "/update_weights_from_disk" in await rig.calls()


async def test_an_engine_that_is_back_counts_as_alive_once_it_has_answered_with_its_weights(
    rig: Rig, calls: list[tuple[str, Any, bool]]
) -> None:
    """Until then whoever asks the host, at any moment, is told that nothing may be sent to it."""
    host = await rig.up()
    await host.refresh(3, rig.publish(3), deadline=WAIT)
    os.kill(rig.program(), signal.SIGKILL)
    await rig.until(lambda: not host.alive)
    await rig.until(lambda: host.alive)
    made = [(path, alive) for path, _, alive in calls if path != "/health"]
    up = max(i for i, (path, _) in enumerate(made) if path == "/freeze_gc")  # with the weights of the model folder
    assert [path for path, _ in made[up + 1 :]] == [
        *["/pause_generation", "/update_weights_from_disk", "/model_info"],
        *["/continue_generation", "/continue_generation", "/generate"],
    ]
    assert not any(alive for _, alive in made[up:])


async def test_an_engine_that_is_back_and_answers_with_other_weights_is_not_alive(rig: Rig) -> None:
    """It takes the weights and says so, but samples with those of the model folder."""
    host = await rig.up(attempts=1)
    await host.refresh(3, rig.publish(3), deadline=WAIT)
    rig.faults("samples_with_old")
    os.kill(rig.program(), signal.SIGKILL)
    assert rig.watching is not None
    with pytest.raises(EngineError, match=r"was probed: expected '3-[0-9a-f]{8}', it sampled with '0'"):
        await asyncio.wait_for(asyncio.shield(rig.watching), WAIT)
    assert not host.alive
    assert host.pid is None


async def test_an_engine_that_does_not_answer_is_restarted(rig: Rig) -> None:
    host, pid = await rig.up(call_timeout=0.3), rig.host.pid
    rig.faults("hangs")
    await rig.until(lambda: not host.alive)
    assert "health checks" in host.detail
    rig.faults()
    await rig.until(lambda: host.alive)
    assert host.pid != pid


async def test_an_engine_that_is_back_without_the_replaced_weights_says_so(rig: Rig) -> None:
    host = await rig.up()
    await host.refresh(1, rig.publish(1), deadline=WAIT)
    newer = rig.publish(2)  # not told to this host
    os.kill(rig.program(), signal.SIGKILL)
    await rig.until(lambda: not host.alive)
    await rig.until(lambda: host.alive)
    assert host.version == 0, "whoever routes to it sees that it is behind"
    await host.come_back(2, newer, deadline=WAIT)
    assert host.version == 2


@pytest.mark.parametrize("pause", ["retract", "in_place"])
async def test_the_checksum_of_new_weights_is_asked_for(rig: Rig, pause: str) -> None:
    host = await rig.up(dtype="float32", refresh_pause=pause)
    await host.refresh(1, rig.publish(1), deadline=WAIT)
    paths = await rig.calls()
    assert (
        paths.index("/update_weights_from_disk") < paths.index("/weights_checker") < paths.index("/continue_generation")
    ), "nothing is sampled before they are verified"


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        *(("disk", fault) for fault in ("update_fails", "update_dies", "wrong_version", "wrong_weights")),
        *(("tensor", fault) for fault in ("update_fails", "update_dies", "wrong_version")),
    ],
)
async def test_an_engine_with_unknown_weights_never_serves_again(rig: Rig, way: str, fault: str) -> None:
    dtype = "float32" if way == "disk" else "bfloat16"  # the scripted engine loads no tensors, whose checksums differ
    host, pid = await rig.up(dtype=dtype, refresh=way), rig.host.pid
    rig.faults(fault)
    with pytest.raises(WeightsUnknown, match=r"to 1-[0-9a-f]{8} failed"):
        await host.refresh(1, rig.publish(1), deadline=WAIT)
    rig.faults()
    await rig.until(lambda: not host.alive)
    await rig.until(lambda: host.alive)
    assert host.pid != pid
    assert host.version == 1


async def test_an_engine_that_keeps_ending_is_given_up(rig: Rig) -> None:
    host = await rig.up(attempts=2)
    rig.faults("dies")
    os.kill(rig.program(), signal.SIGKILL)
    await rig.until(lambda: host.detail.startswith("given up after 3 ends"))
    assert not host.alive
    assert rig.watching is not None
    with pytest.raises(EngineError, match="was given up"):
        await asyncio.wait_for(asyncio.shield(rig.watching), WAIT)
    rig.faults()
    with pytest.raises(EngineError, match="was given up"):
        await host.come_back(0, b"", deadline=WAIT)


async def test_an_engine_that_ends_after_every_restart_is_given_up(rig: Rig) -> None:
    """Each restart succeeds: it is the ends that are counted."""
    host = await rig.up(attempts=2)
    for _ in range(2):
        os.kill(rig.program(), signal.SIGKILL)
        await rig.until(lambda: not host.alive)
        await rig.until(lambda: host.alive)
    os.kill(rig.program(), signal.SIGKILL)
    assert rig.watching is not None
    with pytest.raises(EngineError, match="was given up: it ended with exit code 137"):
        await asyncio.wait_for(asyncio.shield(rig.watching), WAIT)
    assert not host.alive
    assert host.pid is None


async def test_an_engine_that_ends_in_every_training_phase_is_given_up(rig: Rig) -> None:
    """It is started by its return only, which succeeds each time."""
    host = await rig.up(attempts=2)
    for _ in range(2):
        await host.release()
        os.kill(rig.program(), signal.SIGKILL)
        await rig.until(lambda: not host.alive)
        await host.come_back(0, b"", deadline=WAIT)
        assert host.alive
    await host.release()
    os.kill(rig.program(), signal.SIGKILL)
    assert rig.watching is not None
    with pytest.raises(EngineError, match="was given up"):
        await asyncio.wait_for(asyncio.shield(rig.watching), WAIT)
    with pytest.raises(EngineError, match="was given up"):
        await host.come_back(0, b"", deadline=WAIT)


async def test_an_engine_that_takes_no_weights_is_given_up(rig: Rig) -> None:
    host = await rig.up(attempts=2)
    rig.faults("update_fails")
    with pytest.raises(WeightsUnknown):
        await host.refresh(1, rig.publish(1), deadline=WAIT)
    assert rig.watching is not None
    with pytest.raises(EngineError, match="was given up: given up after 3 ends"):
        await asyncio.wait_for(asyncio.shield(rig.watching), WAIT)
    assert not host.alive
    assert host.pid is None


async def test_an_engine_that_ends_while_released_waits_for_its_return(rig: Rig) -> None:
    host = await rig.up()
    await host.release()
    os.kill(rig.program(), signal.SIGKILL)
    await rig.until(lambda: not host.alive)
    await host.release()  # the trainer may enter
    await host.come_back(4, rig.publish(4), deadline=WAIT)
    assert host.alive
    assert host.version == 4
    os.kill(rig.program(), signal.SIGKILL)  # and the new one is watched
    await rig.until(lambda: not host.alive)
    await rig.until(lambda: host.alive)
