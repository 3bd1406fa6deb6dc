"""The terminal's view: text made from a picture, and the whole screen against a picture of it."""

from pathlib import Path

import pytest

from gyre_launch.cli import main as gyre
from gyre_sched.cli import main
from gyre_sched.face import terminal
from gyre_sched.face.chronicle import Cell, Level, Span
from gyre_sched.face.follow import Follower
from gyre_sched.face.top import Top

RUN = Path(__file__).parents[1] / "fixtures" / "sched" / "run"


@pytest.fixture
def picture():
    return Follower(RUN).look()


def test_a_strip_shows_the_role_each_stretch_ended_in(picture):
    picture.began, picture.at = 0.0, 10.0
    spans = [Span("starting", 0.0, 1.0), Span("rollout", 1.0, 5.0), Span("draining", 5.0, 6.0), Span("training", 6.0)]
    assert terminal.strip(Cell(cell=0, spans=spans), picture, 10).plain == "RRRR~TTTTT"
    assert terminal.strip(Cell(cell=0, spans=spans), picture, 20).plain == "·RRRRRRRR~~TTTTTTTTT"
    assert terminal.strip(Cell(cell=0, spans=[]), picture, 3).plain == "···"
    assert terminal.strip(Cell(cell=0, spans=spans), picture, 0).plain == ""


def test_water_is_as_high_as_its_highest(picture):
    picture.began, picture.at = 0.0, 4.0
    picture.levels = [Level(0.0, 0, 8, 0, 0), Level(1.5, 8, 8, 0, 0), Level(1.9, 1, 8, 0, 0), Level(3.5, 0, 8, 0, 0)]
    assert terminal.levels(picture, 4).plain == " █▁▁"


@pytest.mark.parametrize("command", [main, gyre])
def test_without_a_terminal_it_is_refused(capsys, command):
    assert command(["top", str(RUN)]) == 1
    assert "needs a terminal" in capsys.readouterr().err


def test_elapsed():
    assert [terminal.elapsed(s) for s in (-1, 59.9, 61, 3661)] == ["00:00", "00:59", "01:01", "1:01:01"]


def test_the_screen(snap_compare):
    assert snap_compare(Top(RUN), terminal_size=(140, 40))


def test_the_screen_with_failures_only(snap_compare):
    assert snap_compare(Top(RUN), terminal_size=(100, 30), press=["f"])
