"""How an engine's linkers are started, and where they listen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_sched.engine import launch
from gyre_sched.engine.config import EngineConfig
from gyre_sched.engine.pages import addresses, make_pages
from gyre_sched.errors import EngineStartError
from gyre_transport.config import section
from gyre_transport.errors import ConfigError
from gyre_transport.kv.config import KvConfig, linker_config
from gyre_transport.run import BusConfig, Context


@pytest.fixture
def context(tmp_path: Path) -> Context:
    config = tmp_path / "config.toml"
    config.write_text(f"""
[run]
dir = "{tmp_path / "run"}"
[bus]
dir = "{tmp_path / "bus"}"
[transport]
backends = ["tcp"]
""")
    return Context(config)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_an_engine_is_started_with_its_linker(context: Context, model: Path) -> None:
    engine = EngineConfig(refresh_pause="in_place")
    pages = make_pages(KvConfig(page_size=32), engine, model, context, cell=3)
    assert pages is not None
    argv, _ = launch.command(engine, model, 4000, cuda=False, kv=pages.linker, environ={})
    assert argv[argv.index("--page-size") + 1] == "32"
    given = json.loads(argv[argv.index("--unified-cache-external-linker-config") + 1])
    linker = linker_config(given["linker_extra_config"])
    assert linker.addresses == pages.addresses == (f"ipc://{context.bus.dir}/kv-3-0",)
    assert linker.transport.backends == ("tcp",)
    assert linker.namespaces, "weights change under running requests"
    assert Path(linker.counts).parent.is_dir()
    plain = make_pages(KvConfig(), EngineConfig(), model, context, cell=3)
    assert plain is not None
    assert not plain.linker.namespaces


def test_pages_that_do_not_move(context: Context, model: Path) -> None:
    assert make_pages(KvConfig(moves=False), EngineConfig(), model, context, cell=0) is None
    argv, _ = launch.command(EngineConfig(), model, 4000, cuda=False, environ={})
    assert "--page-size" not in argv


def test_weights_do_not_change_in_place_without_namespaces(model: Path) -> None:
    with pytest.raises(EngineStartError, match=r"in_place.*needs kv\.moves"):
        launch.check(EngineConfig(refresh_pause="in_place"), model, moves=False)
    launch.check(EngineConfig(refresh_pause="in_place"), model, moves=True)


def test_every_rank_has_an_address_of_its_own() -> None:
    engine = EngineConfig(tensor_parallel=3)
    assert addresses(BusConfig(dir="/run/b"), engine, 1) == tuple(f"ipc:///run/b/kv-1-{rank}" for rank in range(3))
    found = addresses(BusConfig(kind="tcp"), engine, 1)
    assert len(set(found)) == 3
    assert all(address.startswith("tcp://127.0.0.1:") for address in found)


def test_a_model_that_cannot_be_read_is_named(context: Context, tmp_path: Path) -> None:
    model = tmp_path / "odd"
    (model / "config.json").mkdir(parents=True)
    with pytest.raises(EngineStartError, match=r"odd.*kv\.moves = false"):
        make_pages(KvConfig(), EngineConfig(), model, context, cell=0)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"page_size": 0}, "page_size"),
        ({"store_bytes": 0}, "store_bytes"),
        ({"hold": 0}, "hold"),
        ({"lease": -1}, "lease"),
    ],
)
def test_wrong_config(config: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        section({"kv": config}, "kv", KvConfig)
