"""The command line, and what `doctor` finds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gyre_transport import doctor
from gyre_transport.cli import main
from gyre_transport.errors import Unreachable


def test_help_imports_nothing_heavy():
    code = """
import sys
from gyre_transport.cli import main
try:
    main(["--help"])
except SystemExit as e:
    assert e.code == 0
assert not {"numpy", "zmq", "torch", "msgspec"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def test_doctor_tries_what_is_needed(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {f["backend"]: f for f in json.loads(capsys.readouterr().out)}
    assert {b for b, f in found.items() if f["works"]} - {"verbs"} == {"shm", "process", "tcp"}
    assert "transport.listen" in found["tcp"]["detail"]
    parts = ("RDMA device", "rdma-core", "pyverbs") if not found["verbs"]["works"] else ("read 1 MiB",)
    assert all(part in found["verbs"]["detail"] for part in (*parts, "GPU memory"))
    assert main(["doctor"]) == 0
    assert "process_vm_readv" in capsys.readouterr().out


def test_doctor_says_why_not_and_fails(capsys, monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise Unreachable("the kernel refuses; do this")

    monkeypatch.setattr(doctor, "read", refused)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.count("the kernel refuses; do this") == 3


def test_doctor_notices_a_second_process_that_cannot_run(monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert "did not answer" in doctor.examine()[0].detail


def test_doctor_notices_wrong_bytes(monkeypatch):
    monkeypatch.setattr(doctor, "read", lambda *_, **__: None)
    assert not any(f.works for f in doctor.examine())


def test_unknown_commands():
    with pytest.raises(SystemExit) as error:
        main(["explode"])
    assert error.value.code == 2


def test_the_names_of_the_package():
    import gyre_transport

    for name in gyre_transport.__all__:
        assert getattr(gyre_transport, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = gyre_transport.nothing
