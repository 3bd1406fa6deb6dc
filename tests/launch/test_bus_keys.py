"""A run whose bus others can reach: the launcher makes its keys, every process uses them, nobody else gets in."""

from __future__ import annotations

import socket
import stat
import sys
from pathlib import Path

import pytest

from gyre_launch import preflight
from gyre_launch.config import resolve
from gyre_launch.run import prepare
from gyre_sched.protocol import Ack, GetStatus, Reply
from gyre_transport import keys
from gyre_transport.bus import Client
from gyre_transport.errors import AccessDenied, ConfigError, DeadlineExceeded
from gyre_transport.process import Child
from gyre_transport.run import Context

SCHEDULER = """
import asyncio, sys
from pathlib import Path
from gyre_sched.protocol import Ack, Request
from gyre_transport.bus import Server
from gyre_transport.process import follow_parent, ready
from gyre_transport.run import Context
async def main():
    async def handle(request): return Ack()
    async with Server(Context(Path(sys.argv[1])).bus.address("scheduler"), Request, handle):
        ready()
        await asyncio.Event().wait()
follow_parent()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch):
    monkeypatch.setattr(preflight, "check", lambda _: None)
    yield
    keys.use(None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("overrides", "made"),
    [
        (["bus.kind=ipc"], None),
        (["bus.kind=tcp"], None),
        (["bus.kind=tcp", "bus.host=192.0.2.1"], "out/bus.keys"),
        (["bus.kind=tcp", "bus.host=node-1"], "out/bus.keys"),
        (["bus.kind=tcp", "bus.keys=mine"], "mine"),
        (["bus.kind=tcp", "bus.host=192.0.2.1", "bus.keys=mine"], "mine"),
    ],
)
def test_keys_are_made_where_others_can_connect(run_toml: Path, tmp_path: Path, overrides, made) -> None:
    resolved = resolve(run_toml, [f"run.dir={tmp_path}/out", f"bus.dir={tmp_path}/bus", *overrides])
    assert resolved.bus.keys == ("" if made is None else str(tmp_path / made))
    prepare(resolved)
    if made is None:
        assert keys.used() is None
        return
    assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o600
    used = keys.used()
    assert used == keys.load(tmp_path / made)
    written = (tmp_path / "out" / "config.toml").read_text()
    assert not any(secret in written for secret in (used.server_secret, used.client_secret, used.client_public))


def test_keys_that_are_there_are_kept(run_toml: Path, tmp_path: Path) -> None:
    made = keys.make(tmp_path / "mine")
    prepare(resolve(run_toml, [f"run.dir={tmp_path}/out", "bus.kind=tcp", "bus.keys=mine"]))
    assert keys.used() == made


async def test_processes_of_the_run_talk_and_others_are_refused(run_toml: Path, tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}/out", "bus.kind=tcp", "bus.keys=mine", f"bus.ports.scheduler={_free_port()}"]
    context = prepare(resolve(run_toml, overrides))
    argv = [sys.executable, "-c", SCHEDULER, str(context.config_path)]
    log = context.dir.logs / "scheduler.log"
    child = await Child.start("scheduler", argv, log=log)
    try:
        async with Client(context.bus.address("scheduler"), Reply) as client:
            assert await client.call(GetStatus(), deadline=60.0) == Ack()
        async with Client(context.bus.address("scheduler"), Reply, keys=keys.generate()) as stranger:
            for deadline in (1.0, 5.0, 60.0):  # it is known once the handshake has ended
                with pytest.raises(DeadlineExceeded) as refused:
                    await stranger.call(GetStatus(), deadline=deadline)
                if refused.type is AccessDenied:
                    break
            assert refused.type is AccessDenied
    finally:
        await child.stop()
    used = keys.used()
    assert not any(secret in log.read_text() for secret in (used.server_secret, used.client_secret))


def test_a_process_without_the_file_says_so(run_toml: Path, tmp_path: Path) -> None:
    context = prepare(resolve(run_toml, [f"run.dir={tmp_path}/out", "bus.kind=tcp", "bus.host=192.0.2.1"]))
    context.dir.bus_keys.unlink()
    with pytest.raises(ConfigError, match=r"bus\.keys.*copy the file"):
        Context(context.config_path)


@pytest.mark.parametrize(("host", "made"), [("127.0.0.1", False), ("192.0.2.1", True)])
def test_engines_that_others_can_reach_get_a_token(run_toml: Path, tmp_path: Path, host: str, made: bool) -> None:
    resolved = resolve(run_toml, [f"run.dir={tmp_path}/out", f"bus.dir={tmp_path}/bus", f"engine.host={host}"])
    context = prepare(resolved)
    assert context.dir.engine_key.exists() is made
    if made:
        assert resolved.engine.key == str(context.dir.engine_key)
        assert stat.S_IMODE(context.dir.engine_key.stat().st_mode) == 0o600
        assert keys.load_token(context.dir.engine_key, "engine.key") not in context.dir.config.read_text()
