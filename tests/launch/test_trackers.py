"""Trackers get every step; one that fails is told of and is nobody else's trouble."""

import sys
from types import ModuleType

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from gyre_launch import trackers
from gyre_launch.trackers import MetricsConfig, Trackers, scalars
from gyre_transport.config import section
from gyre_transport.errors import ConfigError

STEP = {
    "step": 3,
    "mean_score": 0.5,
    "executions": 32,
    "checkpoint": "",
    "loss": None,
    "groups": ["a"],
    "micro_steps": {"0": 2, "1": 1},
    "means": {"kl": 0.25},
    "fine": True,
}


def events(folder):
    """The scalars in a folder's event files, by name; every record's checksums are checked."""
    seen = {}
    for path in folder.glob("events.*"):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            body = data[12 : 12 + length]
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            assert int.from_bytes(data[12 + length : 16 + length], "little") == masked_crc32c(body)
            event = Event.FromString(body)
            seen |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
            data = data[16 + length :]
    return seen


def test_numbers_of_a_step_by_path():
    assert dict(scalars(STEP)) == {
        "step/mean_score": 0.5,
        "step/executions": 32.0,
        "step/micro_steps/0": 2.0,
        "step/micro_steps/1": 1.0,
        "step/means/kl": 0.25,
    }


def test_tensorboard_files_hold_the_steps(tmp_path):
    said = []
    made = Trackers(MetricsConfig(), tmp_path, "run", said.append)
    made.step(STEP)
    made.step({**STEP, "step": 4, "mean_score": 0.75})
    made.close()
    assert said == []
    assert events(tmp_path / "tensorboard") == {
        "step/mean_score": (4, 0.75),
        "step/executions": (4, 32.0),
        "step/micro_steps/0": (4, 2.0),
        "step/micro_steps/1": (4, 1.0),
        "step/means/kl": (4, 0.25),
    }


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_hosted_tracker_gets_its_runs_steps(tmp_path, monkeypatch, kind):
    told = []
    module = ModuleType(kind)
    module.init = lambda **about: told.append(("init", about))
    module.log = lambda values, step: told.append(("log", step, values["step/mean_score"]))
    module.finish = lambda: told.append(("finish",))
    monkeypatch.setitem(sys.modules, kind, module)
    made = Trackers(MetricsConfig(trackers=(kind,), project="p"), tmp_path, "run", told.append)
    made.step(STEP)
    made.close()
    about = {"project": "p", "name": "run"} | ({"dir": str(tmp_path)} if kind == "wandb" else {})
    assert told == [("init", about), ("log", 3, 0.5), ("finish",)]


def test_one_that_is_not_installed_is_told_of_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = []
    made = Trackers(MetricsConfig(trackers=("wandb", "tensorboard")), tmp_path, "run", said.append)
    made.step(STEP)
    made.close()
    assert len(said) == 1
    assert "gyre-launch[wandb]" in said[0]
    assert "step/mean_score" in events(tmp_path / "tensorboard")


def test_one_that_fails_is_told_of_once(tmp_path, monkeypatch):
    class Broken:
        def __init__(self, folder):
            pass

        def log(self, step, values):
            raise OSError(28, "No space left on device")

        def close(self):
            raise AssertionError("closed although it failed")

    monkeypatch.setattr(trackers, "TensorBoard", Broken)
    said = []
    made = Trackers(MetricsConfig(), tmp_path, "run", said.append)
    made.step(STEP)
    made.step(STEP)
    made.close()
    assert len(said) == 1
    assert "No space left" in said[0]


def test_config():
    assert section({"metrics": {"trackers": []}}, "metrics", MetricsConfig).trackers == ()
    with pytest.raises(ConfigError, match="trackers"):
        section({"metrics": {"trackers": ["excel"]}}, "metrics", MetricsConfig)
