"""The stand-ins for compiled packages where CUDA is absent, in a process that imports them as an engine does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gyre_sched.engine import launch

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

CPU = Path(launch.__file__).parent / "cpu"
SCRIPT = """
import json, torch
from sgl_kernel import assign_extend_cache_locs_cpu, assign_req_to_token_pool_cpu, silu_and_mul
from torch_memory_saver import configure_subprocess, torch_memory_saver as saver

found = {}
rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 1])
table, locations = torch.zeros(3, 4, dtype=torch.int32), torch.tensor([7, 8, 9])
assign_req_to_token_pool_cpu(rows, table, starts, ends, locations, 4)
found["table"] = table.tolist()
gathered = torch.zeros(3, dtype=torch.int64)
assign_extend_cache_locs_cpu(rows, table, starts, ends, gathered, 4)
found["gathered"] = gathered.tolist()
try:
    silu_and_mul(1)
except NotImplementedError as e:
    found["absent"] = str(e)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

SIZE = 1 << 28
with configure_subprocess(), saver.region(tag="weights", enable_cpu_backup=True):
    weights = torch.ones(1000)
with saver.region("kv_cache"):
    pool = torch.zeros(SIZE, dtype=torch.uint8)
    small = torch.zeros(3)
start = resident()
pool.fill_(1), small.fill_(1)
full = resident()
saver.pause("weights"), saver.pause("kv_cache")
released = resident()
saver.resume("kv_cache"), saver.resume("weights")
found["grown"], found["given_back"] = (full - start) / SIZE, (full - released) / SIZE
found["after"] = [int(pool[4096:-4096].max()), int(weights.min())]  # whole pages
pool.fill_(2)
found["used"] = int(pool.min())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    env = {**os.environ, "PYTHONPATH": str(CPU), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=240)
    assert not out.returncode, out.stderr
    return json.loads(out.stdout)


def test_locations_are_written_and_read_by_request(found: Any) -> None:
    assert found["table"] == [[9, 0, 0, 0], [0, 0, 0, 0], [0, 7, 8, 0]]
    assert found["gathered"] == [7, 8, 9]


def test_what_is_absent_says_so_when_it_is_called(found: Any) -> None:
    assert "sgl_kernel.silu_and_mul has no CPU stand-in" in found["absent"]


def test_a_kv_pool_costs_memory_as_it_fills_and_none_when_released(found: Any) -> None:
    assert found["grown"] == pytest.approx(1, abs=0.05)
    assert found["given_back"] == pytest.approx(1, abs=0.05)


def test_a_released_pool_reads_zeros_and_can_be_used_again_while_weights_stay(found: Any) -> None:
    assert found["after"] == [0, 1]
    assert found["used"] == 2
