"""The log: whole records survive anything; damage is never silent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gyre_traj import Call, Delivered, Header, Log, LogWriter, Record, Span, pack_ids, read_log
from gyre_traj.errors import BrokenCall, CorruptLog, LogError, NotALog, UnknownCall
from gyre_traj.log import encode_frame

RECORDS: list[Record] = [
    Header(execution="e", model="tiny"),
    Call(call="a", execution="e", prompt=pack_ids([1, 2]), output=pack_ids([3]), versions=(Span(0, 0, 1),)),
    Delivered(call="a"),
    Call(call="b", execution="e", parent="a", prefix=3, prompt=pack_ids([4]), output=pack_ids([5, 6])),
    Delivered(call="b", ok=False),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "e.gtraj"
    with LogWriter(path) as writer:
        for record in RECORDS:
            writer.append(record)
    return path


def test_what_is_written_is_read(path: Path) -> None:
    log = read_log(path)
    assert [log.header, *log.calls] == [RECORDS[0], RECORDS[1], RECORDS[3]]
    assert log.delivered == {"a": True, "b": False}
    assert (log.torn, log.skipped) == (0, 0)
    assert log.full_prompt("b").tolist() == [1, 2, 3, 4]
    assert log.full_ids("b").tolist() == [1, 2, 3, 4, 5, 6]
    assert log.full_ids("b").dtype == np.uint32


@pytest.mark.parametrize("byte", range(8))
@pytest.mark.parametrize("frame", range(4))
def test_a_length_that_lies_is_damage_and_loses_nothing(path: Path, frame: int, byte: int) -> None:
    """It reaches beyond the end of the file, as a torn tail does; the whole records behind it tell them apart."""
    data = bytearray(path.read_bytes())
    data[8 + sum(len(encode_frame(record)) for record in RECORDS[:frame]) + byte] ^= 0x41
    path.write_bytes(data)
    with pytest.raises(CorruptLog, match="others follow"):
        read_log(path)
    with pytest.raises(CorruptLog, match="others follow"):
        LogWriter(path)
    assert path.read_bytes() == data


def test_ids_that_are_not_all_there_are_not_resolved() -> None:
    rootless = Log(calls=[Call(call="a", execution="e", prefix=5, prompt=pack_ids([1]))])
    with pytest.raises(BrokenCall, match="prefix 5 and no parent"):
        rootless.full_prompt("a")
    part = Log(calls=[Call(call="a", execution="e", prompt=b"abc")])
    with pytest.raises(BrokenCall, match="4 bytes each"):
        part.full_prompt("a")


def test_a_log_is_private(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_cut_at_any_byte_keeps_every_whole_record(path: Path) -> None:
    data = path.read_bytes()
    boundaries = [8]
    for record in RECORDS:
        boundaries.append(boundaries[-1] + len(encode_frame(record)))
    assert boundaries[-1] == len(data)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = sum(boundary <= size for boundary in boundaries[1:])
        torn = size - max([b for b in boundaries if b <= size], default=0)
        log = read_log(path)
        kept = (log.header is not None) + len(log.calls) + len(log.delivered)
        assert (kept, log.torn) == (whole, torn if size >= 8 else 0)
        with LogWriter(path) as writer:
            assert writer.torn == torn
            for record in RECORDS[whole:]:
                writer.append(record)
        assert path.read_bytes() == data


def test_blocks_the_disk_never_received_are_a_torn_tail(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size + 4096)
    assert read_log(path).torn == 4096
    with LogWriter(path) as writer:
        assert writer.torn == 4096
    assert path.stat().st_size == size


def test_damage_inside_is_an_error_and_nothing_is_cut(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptLog, match="damaged at byte 8"):
        read_log(path)
    with pytest.raises(CorruptLog):
        LogWriter(path)
    assert path.read_bytes() == data


def test_a_half_written_frame_is_taken_back_when_the_disk_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    with LogWriter(path) as writer:
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(LogError, match="free disk space"):
            writer.append(RECORDS[1])
        monkeypatch.undo()
        assert path.read_bytes() == before
        writer.append(RECORDS[2])
    assert read_log(path).torn == 0


def test_a_half_written_frame_that_cannot_be_taken_back_closes_the_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError("no")

    before, write = path.read_bytes(), os.write
    with LogWriter(path) as writer:
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        monkeypatch.setattr(os, "ftruncate", refuse)
        with pytest.raises(LogError, match="open the log again"):
            writer.append(RECORDS[1])
        monkeypatch.undo()
        with pytest.raises(LogError, match="closed"):
            writer.append(RECORDS[1])
    with LogWriter(path) as writer:
        assert writer.torn == 10
    assert path.read_bytes() == before


def test_readable_while_written(tmp_path: Path) -> None:
    path = tmp_path / "e.gtraj"
    with LogWriter(path) as writer:
        assert read_log(path).header is None
        for record in RECORDS[:2]:
            writer.append(record)
        assert [call.call for call in read_log(path).calls] == ["a"]
        writer.append(RECORDS[3])
        writer.sync()
        assert [call.call for call in read_log(path).calls] == ["a", "b"]


def test_killed_writer_leaves_what_it_appended(tmp_path: Path) -> None:
    path = tmp_path / "e.gtraj"
    program = """
        import sys
        from gyre_traj import Delivered, Header, LogWriter
        writer = LogWriter(sys.argv[1])
        writer.append(Header(execution="e"))
        number = 0
        while True:
            writer.append(Delivered(call=str(number)))
            print(number, flush=True)
            number += 1
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 100:
            break
    writer.send_signal(signal.SIGKILL)
    writer.wait(30)
    writer.stdout.close()
    assert len(read_log(path).delivered) >= 101


def test_one_writer_at_a_time(path: Path) -> None:
    with LogWriter(path), pytest.raises(LogError, match="another writer"):
        LogWriter(path)
    LogWriter(path).close()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Delivered(call="a"), None, "first record"),
        (Header(execution="e"), Header(execution="f"), "first record, and no other"),
    ],
)
def test_a_log_begins_with_its_only_header(tmp_path: Path, first: Record, second: Record | None, message: str) -> None:
    with LogWriter(tmp_path / "e.gtraj") as writer:
        assert writer.empty
        if second is not None:
            writer.append(first)
        with pytest.raises(LogError, match=message):
            writer.append(second or first)


def test_a_newer_writer_can_be_read(path: Path) -> None:
    """Fields and kinds of records that this release does not know do not stop it, and are there for who knows them."""

    class Call2(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
        call: str
        execution: str
        future: dict[str, int]

    class Novelty(msgspec.Struct, frozen=True, kw_only=True, tag="novelty"):
        x: int

    with path.open("ab") as file:
        file.write(encode_frame(Call2(call="c", execution="e", future={"x": 1})))  # type: ignore[arg-type]
        file.write(encode_frame(Novelty(x=1)))  # type: ignore[arg-type]
        file.write(encode_frame(Delivered(call="c")))
    log = read_log(path)
    assert [call.call for call in log.calls] == ["a", "b", "c"]
    assert log.delivered["c"]
    assert log.extra == {"c": {"future": {"x": 1}}}
    assert log.foreign == [{"type": "novelty", "x": 1}]
    assert log.skipped == 1


def test_a_whole_record_that_is_none_is_damage(path: Path) -> None:
    with path.open("ab") as file:
        file.write(encode_frame([1, 2]))  # type: ignore[arg-type]
        file.write(encode_frame(Delivered(call="a")))
    with pytest.raises(CorruptLog, match="not a record"):
        read_log(path)


@pytest.mark.parametrize(
    ("data", "message"), [(b"PK\x03\x04 something else", "not a call log"), (b"GTRAJ\n\x07\x00", "log format 7")]
)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(NotALog, match=message):
        read_log(path)
    with pytest.raises(NotALog, match=message):
        LogWriter(path)
    assert path.read_bytes() == data


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=re.escape(str(tmp_path / "no"))):
        read_log(tmp_path / "no")
    with pytest.raises(LogError, match="cannot be opened"):
        LogWriter(tmp_path / "no" / "e.gtraj")


def test_closed_log_is_closed(path: Path) -> None:
    writer = LogWriter(path)
    writer.close()
    writer.close()
    with pytest.raises(LogError, match="closed"):
        writer.append(RECORDS[2])


def test_delivered_once_is_delivered(path: Path) -> None:
    with LogWriter(path) as writer:
        writer.append(Delivered(call="b", ok=True))
        writer.append(Delivered(call="b", ok=False))
    assert read_log(path).delivered["b"]


def test_broken_ancestry_is_named(path: Path) -> None:
    with LogWriter(path) as writer:
        writer.append(Call(call="c", execution="e", parent="b", prefix=7))
        writer.append(Call(call="d", execution="e", parent="gone", prefix=1))
        writer.append(Call(call="o", execution="e", parent="o"))
    log = read_log(path)
    with pytest.raises(BrokenCall, match="prefix 7, its parent 'b' has 6"):
        log.full_prompt("c")
    with pytest.raises(UnknownCall, match="'gone'"):
        log.full_ids("d")
    with pytest.raises(BrokenCall, match="own ancestor"):
        log.full_ids("o")


def test_a_million_tokens_take_a_few_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "e.gtraj"
    with LogWriter(path) as writer:
        writer.append(Header(execution="e"))
        for i in range(400):
            writer.append(
                Call(
                    call=str(i),
                    execution="e",
                    parent=str(i - 1) if i else None,
                    prefix=i * 2500,
                    prompt=pack_ids(np.full(2000, i)),
                    output=pack_ids(np.full(500, i)),
                    logprobs=bytes(2000),
                )
            )
    assert len(read_log(path).full_ids("399")) == 1_000_000
    assert path.stat().st_size < 5_000_000
