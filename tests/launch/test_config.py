"""The resolved config: what is validated, what is filled in, what is refused."""

import socket
import tomllib
from pathlib import Path

import pytest

from gyre_launch.config import SECTIONS, resolve
from gyre_transport.errors import ConfigError
from gyre_transport.run import Context


def test_every_section_is_written_with_its_defaults(run_toml: Path, tmp_path: Path) -> None:
    resolved = resolve(run_toml, [f"run.dir={tmp_path}/out", "batch.groups=2"])
    data = tomllib.loads(resolved.toml())
    assert set(data) == set(SECTIONS)
    assert data["batch"] == {"groups": 2, "group_size": 8, "per_burst": 2}
    assert data["model"]["path"] == str(tmp_path / "model")
    assert data["runner"]["tasks"] == str(tmp_path / "tasks")
    assert data["proxy"]["port"] > 0
    assert len(data["bus"]["dir"]) < 80


def test_the_written_file_is_what_processes_read(run_toml: Path, tmp_path: Path) -> None:
    resolved = resolve(run_toml, [f"run.dir={tmp_path}/out"])
    resolved.write(tmp_path / "config.toml")
    context = Context(tmp_path / "config.toml")
    assert context.run == resolved.run
    assert context.batch == resolved.batch
    assert context.bus.address("scheduler") == f"ipc://{resolved.bus.dir}/scheduler"
    again = resolve(tmp_path / "config.toml", [])
    assert again.train == resolved.train
    assert again.feed == resolved.feed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.group_sise=4", "did you mean 'group_size'"),
        ("trian.lr=1", "unknown config section"),
        ("batch.groups=many", "Expected `int`"),
        ("run.steps=5", "try 6"),
        ("model.source=nowhere", "config.json"),
        ("sched.cells=0", "at least 1"),
        ("batch", "section.key=value"),
    ],
)
def test_bad_settings_name_the_thing_and_the_remedy(run_toml: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(run_toml, [override])


def test_a_missing_file_and_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        resolve(tmp_path / "none.toml", [])
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        resolve(tmp_path / "broken.toml", [])


def test_a_proxy_port_in_use_is_refused_before_anything_starts(run_toml: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*free port"):
            resolve(run_toml, [f"proxy.port={port}"])
