"""RDMA, for real: reliable connections between processes and between hosts, over soft-RoCE in virtual machines.

What runs in them is this checkout, in this environment. A machine that says nothing is a failure, with its console.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from gyre_transport import keys

pytestmark = pytest.mark.timeout(900)
CONFORMANCE = "tests/transport/test_conformance.py"
LONG = 800.0  # seconds


def passed(junit: Path) -> set[str]:
    """Names of the tests that ran and did not fail."""
    cases = ElementTree.parse(junit).iter("testcase")  # noqa: S314  (our own pytest wrote it)
    bad = {"failure", "error", "skipped"}
    return {c.attrib["name"] for c in cases if not bad & {part.tag for part in c}}


def test_the_conformance_suite_on_one_host(machine, run_pytest):
    job = "rdma -j resource show >before; export GYRE_TEST_LARGE=12582912\n"
    # torch alone would take the guest two minutes to import
    job += run_pytest(CONFORMANCE, "tests/transport/verbs/device.py", "-k", "verbs and not sums_of_tensors")
    job += 'code=$?; cd "$out"; rdma -j resource show >after\n'
    job += "cmp before after && exit $code\n"  # nothing stays registered, no queue pair, no device open
    one = machine("host", job)
    print(one.wait(LONG))
    names = passed(one.out / "junit.xml")
    assert len(names) > 35
    needed = ("wrong_key", "dead_owner", "restarted_owner", "in_the_middle", "without_goodbye", "cancelled", "forked")
    assert not [part for part in needed if not any(part in name for name in names)]


def test_a_snapshot_from_one_host_to_another(machine, vm, run_pytest, run_python, tmp_path):
    keys.make(tmp_path / "keys")
    both = f"export GYRE_KEYS='{tmp_path / 'keys'}' GYRE_SOURCE=tcp://10.9.0.1:7400\n"
    first, second = vm.linked()
    doomed, successor = (run_python("source.py", "10.9.0.1", "7400", version) for version in ("1", "2"))
    job = f"{both}{doomed}[ $? = 137 ] || exit 1\n{successor}"  # 137: killed
    source = machine("source", job, address="10.9.0.1", link=first, cpus=1)
    job = both + run_pytest("tests/transport/verbs/reader.py", "-s")
    reader = machine("reader", job, address="10.9.0.2", link=second, cpus=1)
    print(reader.wait(LONG))
    source.wait(LONG)
    assert len(passed(reader.out / "junit.xml")) == 4
