"""The README's examples, as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "gyre-transport" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
READ = """
assert (local == 1).all() and (dtype, shape, data.nbytes) == ("F32", (4, 8), 128)
"""
PAGES = """
import asyncio
from gyre_transport.bus import Server

async def check():
    async def handle(request):
        assert (request.source, request.tokens) == ("ipc://b", b"\\1\\0\\0\\0\\2\\0\\0\\0")
        return kv.Pulled(tokens=2)

    async with Server("tcp://127.0.0.1:0", kv.Request, handle) as server:
        assert await asyncio.to_thread(fetch, server.address, "ipc://b", [1, 2]) == 2

asyncio.run(check())
"""


@pytest.mark.parametrize(("number", "check"), enumerate((READ, "", PAGES, "", "")))
def test_example(number, check):
    subprocess.run([sys.executable, "-c", EXAMPLES[number] + check], check=True, timeout=60)


def test_no_example_is_left_out():
    assert len(EXAMPLES) == 5
