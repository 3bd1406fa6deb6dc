"""The command line, as a user meets it: one clear error, exit code not 0, nothing half-written."""

import json
import shutil
from pathlib import Path

import pytest

from gyre_launch import preflight
from gyre_launch.cli import main


def test_dry_run_prints_config_and_plan_and_creates_nothing(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(run_toml), f"run.dir={tmp_path}/out", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "[batch]" in out
    assert (
        out.index("gyre_sched.cli serve") < out.index("--cell 0") < out.index("--cell 1") < out.index("runner --config")
    )
    assert not (tmp_path / "out").exists()


def test_dry_run_as_json(run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(run_toml), f"run.dir={tmp_path}/out", "sched.cells=3", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in plan["processes"]] == [
        "scheduler",
        "feed",
        "proxy",
        "cell-0",
        "cell-1",
        "cell-2",
        "runner",
    ]
    assert plan["config"]["sched"]["cells"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch.groups=0.5"], "Expected `int`"),
        (["model.source=nowhere"], "nowhere"),
        (["engine.prot=1"], "did you mean 'port'"),
    ],
)
def test_bad_input_is_one_message(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["run", str(run_toml), f"run.dir={tmp_path}/out", *arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith("gyre run: ")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_task_without_verifier_is_refused_at_once(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks" / "one" / "tests" / "verify.py").unlink()
    assert main(["run", str(run_toml), f"run.dir={tmp_path}/out"]) == 1
    err = capsys.readouterr().err
    assert "task 'one' has no verifier" in err
    assert not (tmp_path / "out").exists()


def test_a_harness_that_cannot_start_is_refused_at_once(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(run_toml), f"run.dir={tmp_path}/out", "runner.harness=['no-such-program']"]
    assert main(command) == 1
    assert "'no-such-program' is not on PATH" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_used_run_directory_is_refused(run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "something").touch()
    assert main(["run", str(run_toml), f"run.dir={tmp_path}/out"]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_a_full_disk_is_refused(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    assert main(["run", str(run_toml), f"run.dir={tmp_path}/out"]) == 1
    err = capsys.readouterr().err
    assert "GiB free" in err
    assert "keep_checkpoints" in err
    assert not (tmp_path / "out").exists()


def test_status_and_summary_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(tmp_path)]) == 1
    assert "holds no config.toml" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 1
    assert "check the path" in capsys.readouterr().err


def test_doctor_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"cores", "memory_gib", "sglang", "megatron-core"} <= facts.keys()
