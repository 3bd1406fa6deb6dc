"""The command line on real logs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gyre_traj import Attempt, Delivered, Header, LogWriter, Span, pack_logprobs
from gyre_traj.cli import main


@pytest.fixture
def log(story, tmp_path: Path) -> Path:
    story.call("a", "sys task", "one two three")
    story.call("b", "result", "done", parent="a", version=1)
    story.call("c", "failure", "else", parent="a", version=1)
    story.call("s", "summarise", "short", parent="b", role="main-summary", version=1)
    story.call("r", "compacted task", "x", role="main", version=2)
    story.call("f", "sys task one drift", "y", role="main")
    story.call("g", "sys task one two three other", "z", role="sub-agent", logprobs=[])
    story.call("p", "sys plan", "p p", role="sub-agent")
    story.call("n", "nothing", "", parent="p")
    path = tmp_path / "e.gtraj"
    with LogWriter(path) as writer:
        writer.append(Header(execution="e"))
        for call in story.calls:
            writer.append(call)
            writer.append(Delivered(call=call.call, ok=call.call != "c"))
    return path


def test_inspect_draws_the_tree_and_says_why_leaves_exist(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(log)]) == 0
    out = capsys.readouterr().out
    assert "9: 1 undelivered, 1 empty, 2 not trainable" in out
    assert "35 total, 21 unique, 9 trainable" in out
    for line in (
        "s                main-summary  3      9       5          0, 1      first",
        "c (undelivered)  main          2      7       3          0, 1      continues a otherwise than b",
    ):
        assert line.split() in [given.split() for given in out.splitlines()], line
    assert "sampled" in out
    assert "output of a, 1 of 3 tokens in: prompt departs inside it" in out
    assert "prompt departs from that of a at token 1" in out
    assert "a context of its own" in out
    assert "not trainable: g: no log-probabilities" in out
    assert "not trainable: c: never delivered, and nothing continues it" in out


def test_inspect_json_says_the_same(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(log), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["calls"], report["undelivered"], report["versions"]) == (9, 1, [0, 1, 2])
    assert {role["role"]: role["calls"] for role in report["roles"]} == {"main": 6, "main-summary": 1, "sub-agent": 2}
    assert [leaf["call"] for leaf in report["leaves"]] == ["s", "c", "g", "f", "p", "r"]
    assert sum(leaf["tokens"] for leaf in report["leaves"]) == report["tokens_total"]


def test_siblings_are_called_so(story, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.gtraj"
    with LogWriter(path) as writer:
        writer.append(Header(execution="e"))
        writer.append(story.call("a", "sys task", "x"))
        writer.append(story.call("b", "sys task", "y"))
    main(["inspect", str(path)])
    assert "sampled again from the prompt of a" in capsys.readouterr().out


def test_long_call_ids_are_cut_where_they_differ(story, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.gtraj"
    with LogWriter(path) as writer:
        writer.append(Header(execution="e"))
        writer.append(story.call("0123456789abcdef", "sys task", "x"))
        writer.append(story.call("0123456789xyzuvw", "sys task", "y"))
    main(["inspect", str(path)])
    out = capsys.readouterr().out
    assert "sampled again from the prompt of 0123456789a\n" in out
    assert "abcdef" not in out
    main(["inspect", str(path), "--json"])
    assert "0123456789abcdef" in capsys.readouterr().out


def test_check_passes_a_sound_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(log)]) == 0
    out = capsys.readouterr().out
    assert "9 calls, 0 errors" in out
    assert "note: g: not trainable: no log-probabilities" in out


BAD = {
    "prefix": ({"prefix": 4}, "prefix 4"),
    "parent": ({"parent": "gone"}, "names parent 'gone'"),
    "log-probabilities": ({"logprobs": pack_logprobs([-1])}, "1 log-probabilities"),
    "gap in spans": ({"versions": (Span(0, 0, 1), Span(1, 2, 3))}, "starts at token 2, expected 1"),
    "short spans": ({"versions": (Span(0, 0, 2),)}, "end at token 2, the output at 3"),
    "inserted": ({"inserted": ((0, 9),)}, "inserted spans"),
    "attempts": ({"attempts": (Attempt(engine="x", rid="r", tokens=2, end="stop"),)}, "attempts say 2 tokens"),
    "not finite": ({"logprobs": pack_logprobs([-1, -1, float("nan")])}, "not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_check_finds(story, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    changes, message = BAD[case]
    path = tmp_path / "e.gtraj"
    with LogWriter(path) as writer:
        writer.append(Header(execution="e"))
        writer.append(story.call("a", "sys task", "x"))
        writer.append(msgspec.structs.replace(story.call("b", "result", "one two three", parent="a"), **changes))
    assert main(["check", str(path), "--json"]) == 1
    (findings,) = json.loads(capsys.readouterr().out).values()
    errors = [finding for finding in findings if finding["level"] == "error"]
    assert [finding["call"] for finding in errors] == ["b"]
    assert message in errors[0]["text"]


def test_check_reports_the_log_itself(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LogWriter(log) as writer:
        writer.append(Delivered(call="ghost"))
    with log.open("ab") as file:
        file.write(b"torn")
    assert main(["check", str(log)]) == 1
    out = capsys.readouterr().out
    assert "4 bytes at the end" in out
    assert "ghost: delivered, but never recorded" in out


def test_a_placeholder_zero_is_noticed(story, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.gtraj"
    with LogWriter(path) as writer:
        writer.append(Header(execution="e"))
        writer.append(story.call("a", "sys", " ".join("abcdefgh"), logprobs=[0.0] * 8))
    assert main(["check", str(path)]) == 0
    assert "exactly 0" in capsys.readouterr().out


def test_errors_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "check"):
        assert main([command, str(tmp_path / "none")]) == 2
        said = capsys.readouterr()
        assert not said.out
        assert said.err.startswith("gyre-traj: log")
    (tmp_path / "empty").touch()
    assert main(["inspect", str(tmp_path / "empty")]) == 2
    with pytest.raises(SystemExit):
        main([])
