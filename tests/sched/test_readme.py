"""The README's examples, as written."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "gyre-sched" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
SAYS = ("Answer(reply=Granted(burst=0, capacity=32, order=()))", "elastic-2 ")  # how their last lines begin


@pytest.mark.parametrize(("number", "last"), enumerate(SAYS))
def test_example(number: int, last: str) -> None:
    run = subprocess.run([sys.executable, "-c", EXAMPLES[number]], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith(last)


@pytest.mark.engine
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang: uv sync --group engine")
def test_an_engine_by_hand(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a-hugging-face-folder").symlink_to(tiny_model)
    run = subprocess.run([sys.executable, "-c", EXAMPLES[2]], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("http://127.0.0.1:")


def test_no_example_is_left_out() -> None:
    assert len(EXAMPLES) == len(SAYS) + 1
