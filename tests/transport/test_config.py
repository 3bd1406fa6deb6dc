"""The config file, its overrides and its sections."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gyre_transport.config import load, only, section
from gyre_transport.errors import ConfigError
from gyre_transport.run import BatchConfig, BusConfig, Context, RunConfig, RunDir


class Nested(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    depth: int = 1


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    capacity: int = 32
    model: str = ""
    lenient: bool = False
    rates: list[float] = []
    nested: Nested = Nested()


@pytest.fixture
def write(tmp_path):
    def put(text: str | bytes) -> Path:
        path = tmp_path / "run.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return put


def test_a_section_becomes_its_struct(write):
    data = load(write("[engine]\ncapacity = 8\nrates = [1, 2.5]\n[engine.nested]\ndepth = 3\n"))
    assert section(data, "engine", Engine) == Engine(capacity=8, rates=[1.0, 2.5], nested=Nested(3))
    assert section(data, "absent", Engine) == Engine()
    assert load(str(write("[engine]\ncapacity = 8\n"))) == {"engine": {"capacity": 8}}  # a path may be text


def test_overrides(write):
    data = load(
        write("[engine]\ncapacity = 8\n"),
        [
            "engine.capacity=9",
            "--engine.model=some/path with spaces",
            "engine.lenient=true",
            "engine.rates=[0.5]",
            "engine.nested.depth = 4",
        ],
    )
    expected = Engine(capacity=9, model="some/path with spaces", lenient=True, rates=[0.5], nested=Nested(4))
    assert section(data, "engine", Engine) == expected
    assert load(write(""), ['a.b="7"', "a.c=7", "a.d=", "a.e=1\nf = 2", "a.g=x=y"])["a"] == {
        "b": "7",
        "c": 7,
        "d": "",
        "e": "1\nf = 2",
        "g": "x=y",
    }


@pytest.mark.parametrize("override", ["engine.capacity", "=3", "engine.=3", ".capacity=3", "capacity=3", ""])
def test_an_override_that_is_none(write, override):
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load(write(""), [override])


def test_an_override_below_a_value(write):
    with pytest.raises(ConfigError, match="'capacity' is a value"):
        load(write("[engine]\ncapacity = 8\n"), ["engine.capacity.x=1"])


def test_an_unknown_key_is_refused_with_the_nearest_known_one(write):
    with pytest.raises(ConfigError, match=r"\[engine\].*`capacty`.*did you mean 'capacity'.*known keys"):
        section(load(write("[engine]\ncapacty = 8\n")), "engine", Engine)
    with pytest.raises(ConfigError) as error:
        section(load(write("[engine]\nxyzzy = 8\n")), "engine", Engine)
    assert "did you mean" not in str(error.value)
    with pytest.raises(ConfigError) as error:  # in a nested table: the outer keys would mislead
        section(load(write("[engine.nested]\ncapacity = 8\n")), "engine", Engine)
    assert "known keys" not in str(error.value)


@pytest.mark.parametrize(
    "text", ['capacity = "8"', "capacity = 8.5", "model = 3", "lenient = 1", "rates = 1", "nested = 1"]
)
def test_a_value_of_the_wrong_type(write, text):
    with pytest.raises(ConfigError, match=rf"\[engine\].*{text.split()[0]}"):
        section(load(write(f"[engine]\n{text}\n")), "engine", Engine)


def test_a_section_that_is_a_value(write):
    with pytest.raises(ConfigError, match=r"\[engine\]"):
        section(load(write("engine = 3\n")), "engine", Engine)


def test_sections_nobody_owns(write):
    data = load(write("[engnie]\n"))
    with pytest.raises(ConfigError, match=r"\[engnie\] \(did you mean 'engine'\?\)"):
        only(data, {"engine", "run"})
    only(data, {"engnie"})


@pytest.mark.parametrize("text", ["[engine", "a = ", b"\xff\xfe", "a = 1\na = 2\n"])
def test_a_file_that_is_not_toml(write, text):
    with pytest.raises(ConfigError, match=r"run\.toml' is not TOML"):
        load(write(text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="check the path"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="check the path"):
        load(tmp_path)


def test_what_a_process_reads_of_a_run(write):
    path = write('[run]\ndir = "/r"\nsteps = 6\n[batch]\ngroups = 3\n[bus]\ndir = "/b"\n[sched]\nanything = 1\n')
    context = Context(path)
    assert context.run == RunConfig(dir="/r", steps=6)
    assert (context.batch.executions, context.batch.burst) == (24, 48)
    assert context.bus.address("feed.intake") == "ipc:///b/feed.intake"
    assert context.dir.log("e1") == Path("/r/calls/e1.gtraj")
    assert context.config_path == path
    with pytest.raises(ConfigError, match="dir"):
        Context(write("[run]\n"))


def test_bus_addresses():
    assert BusConfig(kind="tcp", ports={"feed": 7}).address("feed") == "tcp://127.0.0.1:7"
    with pytest.raises(ConfigError, match="no port for 'scheduler'"):
        BusConfig(kind="tcp", ports={"feed": 7}).address("scheduler")
    with pytest.raises(ConfigError, match=r"bus\.dir is empty"):
        BusConfig().address("feed")


def test_everything_of_a_run_lies_in_its_folder():
    paths = list(vars(RunDir("/r")).values())
    assert all(p.is_relative_to("/r") for p in paths)
    assert len(set(paths)) == len(paths)
    assert BatchConfig().burst == 64
