"""What whoever adopts the package gets: its requirements, its public face, its import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import gyre_traj

PACKAGE = Path(__file__).parents[2] / "packages" / "gyre-traj"


def test_requires_msgspec_and_numpy_only() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0].split("=")[0].strip() for requirement in project["dependencies"]}
    assert names == {"msgspec", "numpy"}
    assert project["version"] == gyre_traj.__version__


def imported_by(program: str) -> set[str]:
    program += "\nimport json, sys; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_import_brings_nothing_heavy() -> None:
    """numpy waits for the first name; torch for `gyre_traj.torch`."""
    assert not imported_by("import gyre_traj") & {"numpy", "msgspec", "torch"}
    everything = imported_by("from gyre_traj import *; import gyre_traj.cli, gyre_traj.report, gyre_traj.check")
    assert {"numpy", "msgspec"} <= everything
    assert not everything & {"torch", "zmq", "aiohttp", "transformers"}


def test_help_imports_neither_numpy_nor_torch() -> None:
    loaded = imported_by(
        "import sys, gyre_traj.cli\ntry: gyre_traj.cli.main(['--help'])\nexcept SystemExit as e: assert e.code == 0"
    )
    assert not loaded & {"numpy", "msgspec", "torch"}


def test_every_public_name_is_there() -> None:
    for name in gyre_traj.__all__:
        assert getattr(gyre_traj, name) is not None
    assert not hasattr(gyre_traj, "nonsense")
    assert set(gyre_traj._HOME) == set(gyre_traj.__all__)


def test_no_module_is_long() -> None:
    for path in (PACKAGE / "src").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path


def test_the_readme_runs_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        run = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )
        assert run.returncode == 0, run.stderr
    for command in ("inspect", "check"):
        subprocess.run(
            [sys.executable, "-m", "gyre_traj.cli", command, "run-1.gtraj"], cwd=tmp_path, check=True, timeout=60
        )
