"""The command line on real logs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
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


@pytest.mark.parametrize("command", ["inspect", "check", "select"])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_a_log_says_neither_steers_a_terminal_nor_needs_its_letters(
    story, tmp_path: Path, command: str, as_json: bool
) -> None:
    path = tmp_path / "\u00e9.gtraj"
    with LogWriter(path) as writer:
        writer.append(Header(execution="e"))
        writer.append(story.call("\x1b[2J\x9b\u6f22\U0001f600", "sys", "one", role="\x07main"))
        writer.append(Delivered(call=story.calls[0].call))
    given = [sys.executable, "-m", "gyre_traj.cli", command, str(path), *(["--json"] if as_json else [])]
    for encoding in ("ascii", "utf-8"):
        done = subprocess.run(given, env={"PYTHONIOENCODING": encoding}, capture_output=True, check=True)
        shown = done.stdout.decode(encoding)
        assert shown.replace("\n", "").isprintable()
        if as_json:
            json.loads(shown)


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


# select


def test_select_prints_what_is_drawn_and_left_out(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", str(log), "--j-max", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "execution e: 2 of 9 trainable tokens",
        "  f  main  2 targets of 5 tokens",
        "  left out: main 4, main-summary 1, sub-agent 2",
    ]


def test_select_json_is_an_object_a_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", str(log), str(log), "--j-max", "none", "--json"]) == 0
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert one == two
    assert one["left_out"] == {}
    assert sum(t["targets"] for t in one["trajectories"]) == one["targets"] == one["trainable"] == 9


def test_select_by_a_role_table(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "roles.toml"
    table.write_text('[roles]\npriority = ["sub-agent"]\nexclude = ["main"]\n')
    assert main(["select", str(log), "--roles", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trajectories"][0]["role"] == "sub-agent"
    assert "main" in found["left_out"]
    assert main(["select", str(log), "--roles", "claude-code", "--json"]) == 0


# view


def test_view_writes_a_page_beside_the_log(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(log)]) == 0
    page = log.with_suffix(".html")
    assert "9 calls" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert main(["view", str(log), "-o", str(page)]) == 0  # again, over it
    assert main(["view", str(log), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert main(["view", str(log), "--tokenizer", str(tmp_path / "none")]) == 2


# export


@pytest.fixture
def batch(new_story: Callable, tmp_path: Path) -> tuple[list[str], Path]:
    """Logs of a group of five, and their outcomes; e3's evaluator failed, e4 left nothing, e5's log is not there."""
    logs = []
    for i in range(1, 5):
        story = new_story(f"e{i}")
        story.call("a", "sys task", "one two three")
        story.call("b", "result", "done", parent="a", version=1)
        story.call("c", "failure", "or else", parent="a", version=2)
        path = tmp_path / f"e{i}.gtraj"
        with LogWriter(path) as writer:
            writer.append(Header(execution=f"e{i}"))
            for call in story.calls:
                writer.append(call)
                writer.append(Delivered(call=call.call))
        logs.append(str(path))
    outcomes = tmp_path / "outcomes.jsonl"
    lines = [
        {"execution": "e1", "group": "g", "score": 1.0},
        {"execution": "e2", "group": "g", "score": 0.0},
        {"execution": "e3", "group": "g", "ending": "evaluator_failed", "detail": "no GPU"},
        {"execution": "e4", "group": "g", "ending": "nothing_to_score"},
        {"execution": "e5", "group": "g", "score": 1.0},
    ]
    outcomes.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return logs, outcomes


def test_export_says_what_it_wrote_and_what_not(
    batch: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs, outcomes = batch
    out = tmp_path / "rows.jsonl"
    extra = ["--outcomes", str(outcomes), "--j-max", "1"]
    assert main(["export", *logs, "--to", "jsonl", "-o", str(out), *extra]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{out} (jsonl): 2 rows of 2 executions"
    assert "divided by 3" in said[1]  # e1, e2, and the placeholder
    assert "  1 placeholders, nothing to score: counted, without rows" in said
    assert "  1 scored executions have no log here: in the baseline alone" in said
    assert "  excluded: e3: evaluator failed: no GPU" in said
    assert any(line.startswith("  left out, trainable tokens: main ") for line in said)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["execution"] for row in rows] == ["e1", "e2"]
    assert [row["advantage"] for row in rows] == [0.5, -0.5]  # the baseline: 1, 0, 0 and 1
    assert {row["units"] for row in rows} == {3}
    for row in rows:
        assert sum(row["target"]) * row["weight"] == pytest.approx(1)
        assert len(row["ids"]) == len(row["target"]) == len(row["logprobs"]) == len(row["temperature"])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


KINDS = ("jsonl", "parquet", "slime", "trl", "verl")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_holds_the_same_rows(
    batch: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    logs, outcomes = batch
    out = tmp_path / "out"
    command = ["export", *logs, "--to", kind, "-o", str(out), "--outcomes", str(outcomes), "--json"]
    assert main(command) == 0
    totals = json.loads(capsys.readouterr().out)
    assert (totals["rows"], totals["targets"], totals["units"]) == (4, 12, 3)
    assert totals["excluded"] == {"e3": "evaluator failed: no GPU"}
    if kind == "parquet":
        from gyre_traj.adapters import datasets

        made = list(datasets.read_parquet(out))
        assert sum(int(example.row.target.sum()) for example in made) == 12
        assert datasets.read_note(out)["units"] == 3
    elif kind == "verl":
        from gyre_traj.adapters import verl

        given = verl.load(out)
        assert given.batch["response_mask"].sum() == 12
        assert given.batch["rollout_is_weights"].sum() == pytest.approx(2 / 3)  # two of three executions have rows
        assert given.non_tensor_batch["execution"].tolist() == ["e1", "e1", "e2", "e2"]
        assert given.batch["rm_scores"].sum(axis=1).tolist() == [1, 1, 0, 0]
        assert given.meta_info["units"] == 3
    else:
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        mask = {"jsonl": "target", "slime": "loss_mask", "trl": "env_mask"}[kind]
        assert sum(sum(line[mask]) for line in lines) == 12


def test_verl_rows_come_in_pieces(
    batch: tuple[list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gyre_traj import writers
    from gyre_traj.adapters import verl

    logs, _ = batch
    main(["export", *logs, "--to", "verl", "-o", str(tmp_path / "whole")])
    monkeypatch.setattr(writers, "_PADDED", 30)  # 3 rows
    main(["export", *logs, "--to", "verl", "-o", str(tmp_path / "pieces")])
    whole, pieces = verl.load(tmp_path / "whole"), verl.load(tmp_path / "pieces")
    assert "every advantage is 1" in capsys.readouterr().out
    for name, array in whole.batch.items():
        np.testing.assert_array_equal(array, pieces.batch[name])
    assert whole.meta_info == pieces.meta_info
    assert {len(array) for array in pieces.batch.values()} == {8}
    with pytest.raises(Exception, match="holds no batch"):
        verl.load(tmp_path)


BAD_EXPORTS = {
    "missing log": (["nowhere.gtraj"], [], "cannot be read"),
    "not a log": (["outcomes.jsonl"], [], "is not a call log"),
    "a log twice": (["e1.gtraj", "e1.gtraj"], [], "give each log once"),
    "unknown table": (["e1.gtraj"], ["--roles", "vim"], "no role table 'vim'"),
    "unknown aggregation": (["e1.gtraj"], ["--aggregation", "mean"], "unknown aggregation 'mean'"),
    "unknown counting": (["e1.gtraj"], ["--counting", "twice"], "unknown counting 'twice'"),
    "missing outcomes": (["e1.gtraj"], ["--outcomes", "none.jsonl"], "cannot be read"),
    "score out of range": (["e1.gtraj"], ["--outcomes", "high.jsonl"], "line 1: a scored outcome needs a score in"),
    "no score": (["e1.gtraj"], ["--outcomes", "empty.jsonl"], "needs a score in"),
    "unknown ending": (["e1.gtraj"], ["--outcomes", "ending.jsonl"], "Invalid enum value 'lost'"),
    "no JSON": (["e1.gtraj"], ["--outcomes", "text.jsonl"], "line 1: not JSON"),
    "twice": (["e1.gtraj"], ["--outcomes", "twice.jsonl"], "line 2: a second outcome"),
    "nobody scored": (["e1.gtraj"], ["--outcomes", "other.jsonl"], "e1: no outcome"),
    "no such folder": (["e1.gtraj"], ["-o", "no/rows"], "cannot be written"),
    "exists": (["e1.gtraj"], ["-o", "outcomes.jsonl"], "exists; remove it"),
}


@pytest.mark.parametrize("case", BAD_EXPORTS)
@pytest.mark.parametrize("kind", ["jsonl", "verl"])
def test_bad_exports_leave_nothing(
    batch: tuple[list[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "high": '{"execution": "e1", "group": "g", "score": 1.5}',
        "empty": '{"execution": "e1", "group": "g"}',
        "ending": '{"execution": "e1", "group": "g", "ending": "lost"}',
        "text": "text",
        "twice": '{"execution": "e1", "group": "g", "score": 1}\n{"execution": "e1", "group": "g", "score": 0}',
        "other": '{"execution": "x", "group": "g", "score": 1}',
    }.items():
        Path(f"{name}.jsonl").write_text(text)
    before = sorted(tmp_path.iterdir())
    given, options, message = BAD_EXPORTS[case]
    assert main(["export", *given, "--to", kind, "-o", "rows", *options]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not said.out
    assert sorted(tmp_path.iterdir()) == before


def test_a_log_that_grows_meanwhile_is_noticed(
    batch: tuple[list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gyre_traj import writers

    logs, _ = batch
    write = writers.WRITERS["jsonl"]

    def grow(*arguments: object) -> None:
        with LogWriter(logs[0]) as writer:
            writer.append(Delivered(call="b", ok=False))
            writer.append(msgspec.structs.replace(read(logs[0])[-1], call="d"))
            writer.append(Delivered(call="d"))
        write(*arguments)

    def read(path: str) -> list:
        from gyre_traj import read_log

        return read_log(path).calls

    monkeypatch.setitem(writers.WRITERS, "jsonl", grow)
    assert main(["export", *logs, "--to", "jsonl", "-o", str(tmp_path / "rows")]) == 2
    assert "changed while they were exported" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_nothing(batch: tuple[list[str], Path], tmp_path: Path, kind: str) -> None:
    """A limit on the size of files stands in for the disk."""
    logs, _ = batch
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
        f"from gyre_traj.cli import main; sys.exit(main(['export', *{logs!r}, '--to', {kind!r}, '-o', 'out']))"
    )
    before = sorted(tmp_path.iterdir())
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (run.returncode, run.stdout) == (2, "")
    (said,) = run.stderr.splitlines()
    assert said.startswith("gyre-traj: 'out' cannot be written: ")
    assert said.endswith("File too large")
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupt_leaves_nothing(
    batch: tuple[list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gyre_traj import writers

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for kind in ("jsonl", "verl"):
        before = sorted(tmp_path.iterdir())
        monkeypatch.setitem(writers.WRITERS, kind, interrupted)
        assert main(["export", *batch[0], "--to", kind, "-o", str(tmp_path / "out")]) == 130
        assert sorted(tmp_path.iterdir()) == before


def test_bad_numbers_are_refused_by_the_parser(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("0", "-1", "many"):
        with pytest.raises(SystemExit) as stop:
            main(["select", str(log), "--j-max", value])
        assert stop.value.code == 2
        assert "from 1, or none" in capsys.readouterr().err


def test_progress_goes_to_stderr(
    batch: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gyre_traj.commands._EVERY", 0.0)
    main(["check", *batch[0], "--json"])
    said = capsys.readouterr()
    json.loads(said.out)
    assert "checked: 4 of 4 logs" in said.err


@pytest.mark.parametrize(
    "command", ["", "inspect", "check", "view", "select", "export", "import", "import openai"], ids=str
)
def test_help_imports_nothing_heavy(command: str) -> None:
    program = (
        "import sys, gyre_traj.cli\n"
        f"try: gyre_traj.cli.main([*{command.split()!r}, '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'numpy', 'msgspec', 'torch', 'pyarrow', 'transformers'} & set(sys.modules), sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "usage: gyre-traj" in run.stdout
