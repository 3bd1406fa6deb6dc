"""The README's examples, as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "gyre-transport" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_example(number):
    check = (
        '\nassert (local == 1).all() and (dtype, shape, data.nbytes) == ("F32", (4, 8), 128)\n' if number == 0 else ""
    )
    subprocess.run([sys.executable, "-c", EXAMPLES[number] + check], check=True, timeout=60)


def test_no_example_is_left_out():
    assert len(EXAMPLES) == 2
