"""The command line, and what `doctor` finds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gyre_transport import doctor
from gyre_transport.bench.measure import rounds
from gyre_transport.bench.owner import Owner
from gyre_transport.cli import main
from gyre_transport.errors import ChecksumMismatch, ProcessError, Unreachable


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


@pytest.mark.parametrize("command", [["doctor"], ["bench"], ["snapshot"], ["snapshot", "serve"], ["snapshot", "pull"]])
def test_a_command_says_in_its_help_what_it_does(command, capsys):
    with pytest.raises(SystemExit):
        main([*command[:-1], "--help"])
    listed = capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        main([*command, "--help"])
    assert error.value.code == 0
    said = capsys.readouterr().out.split("\n\n")[1]
    assert said.endswith(".")
    assert " ".join(said.split()).lower()[:-1] in " ".join(listed.split()).lower()


def test_doctor_tries_what_is_needed(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {f["backend"]: f for f in json.loads(capsys.readouterr().out)}
    assert {b for b, f in found.items() if f["works"]} >= {"shm", "process", "tcp", "bus"}
    assert "transport.listen" in found["tcp"]["detail"]
    assert all(f["works"] or f["remedy"] for f in found.values())
    assert not any(f["works"] and f["remedy"] for f in found.values())


def test_doctor_is_readable(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "ok      process  between processes of this machine" in said
    assert "process_vm_readv" in said
    assert "All that Gyre needs is here. It will use process on this machine" in said
    assert max(map(len, said.splitlines())) < 130


def test_doctor_without_an_rdma_device_says_what_one_is(monkeypatch):
    monkeypatch.setattr(doctor, "_devices", list)
    monkeypatch.setattr(doctor, "_try", lambda how, via: "no RDMA device" if via == "verbs" else None)
    verbs = next(f for f in doctor.examine() if f.backend == "verbs")
    assert not verbs.works
    assert "a network card that can do RDMA" in verbs.remedy
    assert "Without it tcp is used" in verbs.remedy


def test_doctor_without_pyverbs_passes_its_remedy_on(monkeypatch):
    def absent() -> None:
        raise Unreachable("pyverbs is missing; install gyre-transport[rdma]")

    monkeypatch.setattr(doctor, "_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(doctor.library, "load", absent)
    monkeypatch.setattr(doctor, "_try", lambda how, via: "no pyverbs" if via == "verbs" else None)
    verbs = next(f for f in doctor.examine() if f.backend == "verbs")
    assert "gyre-transport[rdma]" in verbs.remedy
    assert "network card" not in verbs.remedy


def test_doctor_says_why_not_and_fails(capsys, monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise Unreachable("the kernel refuses; do this")

    monkeypatch.setattr(doctor, "read", refused)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.count("the kernel refuses; do this") >= 3
    assert "MISSING process" in said
    assert "Gyre cannot run here: no way works. Make one of process, shm, tcp work." in said


def test_bench_measures_every_way_that_works(capsys):
    assert main(["bench", "--size", "2", "--count", "3", "--rounds", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    large, small = ({r["path"]: r for r in report[k]} for k in ("large_read", "small_reads"))
    assert {"memcpy", "gyre shm", "gyre shm, registered", "gyre tcp", "raw sockets", "zmq"} <= set(large)
    assert {"memcpy", "gyre shm, read", "gyre tcp, read_many", "raw sockets", "zmq"} <= set(small)
    for name, result in (large | small).items():
        assert len(result["seconds"]) == 2
        assert all(s > 0 for s in result["seconds"])
        assert result["base"] == ("memcpy" if name == "memcpy" or "shm" in name else "raw sockets")
    assert large["memcpy"]["relative"] == small["raw sockets"]["relative"] == 1.0
    assert err == ""


def test_bench_prints_tables_and_refuses_what_does_not_fit(capsys):
    assert main(["bench", "--size", "1", "--count", "1", "--rounds", "1"]) == 0
    assert "| 1 MiB at once" in capsys.readouterr().out
    assert main(["bench", "--size", "1000000"]) == 1
    assert "give a smaller --size" in capsys.readouterr().err
    assert main(["bench", "--count", "0"]) == 1


def test_bench_notices_other_bytes():
    with pytest.raises(ChecksumMismatch, match="gyre shm brought other bytes"):
        rounds({"gyre shm": lambda: None}, 1, lambda: False)


def test_bench_notices_an_owner_that_cannot_start():
    with pytest.raises(ProcessError, match="ended or said nothing"):
        Owner(1 << 20, ["/bin/false"])


def test_doctor_notices_a_second_process_that_cannot_run(monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    process = doctor.examine()[0]
    assert "did not answer" in process.detail
    assert "run the doctor again" in process.remedy
    assert "ptrace" not in process.remedy  # nothing is known of the kernel: it was not asked


def test_doctor_notices_wrong_bytes(monkeypatch):
    monkeypatch.setattr(doctor, "read", lambda *_, **__: None)
    assert not any(f.works for f in doctor.examine() if f.backend != "bus")


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
