"""The journal: what is written is read, up to the byte where it was torn."""

import errno

import msgspec
import pytest

from gyre_sched import cli
from gyre_sched.actions import Record
from gyre_sched.errors import JournalError
from gyre_sched.journal import Journal, decode, durations, encode, read_journal
from gyre_sched.protocol import Event

RECORDS = [
    Record(1.0, "cell_hello", 0, {"engine": "cell-0", "url": "http://h:1", "C_e": 32, "version": 0}),
    Record(2.0, "role", 0, {"from": "starting", "to": "rollout", "seconds": 1.5, "epoch": 1}),
    Record(3.5, "role", 0, {"from": "rollout", "to": "draining", "seconds": 1.25, "epoch": 7}),
    Record(3.5, "transfer", 0, {"w": 3, "C_R": 64, "C_e": 32, "note": 'quote " back \\ newline \n é', "none": None}),
    Record(5.0, "role", 1, {"from": "starting", "to": "rollout", "seconds": 4.0, "epoch": 6}),
]


def write(path, records=RECORDS):
    journal = Journal(path)
    events = [journal.append(r) for r in records]
    journal.close()
    return events


def test_what_was_written_is_read(tmp_path):
    events = write(tmp_path / "sched" / "journal")
    reading = read_journal(tmp_path / "sched" / "journal")
    assert list(reading.events) == events
    assert [e.seq for e in events] == [0, 1, 2, 3, 4]
    assert [(e.at, e.kind, e.cell, e.numbers) for e in events] == [(r.at, r.kind, r.cell, r.numbers) for r in RECORDS]
    assert (reading.torn, reading.more) == (0, False)
    for line in (tmp_path / "sched" / "journal").read_bytes().splitlines():
        assert msgspec.json.decode(line)["event"]["kind"]


def test_torn_at_any_byte_it_reads_whole_lines_and_a_writer_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)  # a thousand journals; no machine crashes here
    path = tmp_path / "journal"
    events = write(path)
    whole = path.read_bytes()
    ends = [i + 1 for i, b in enumerate(whole) if b == 0x0A]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        lines = sum(e <= size for e in ends)
        reading = read_journal(path)
        assert list(reading.events) == events[:lines]
        assert reading.torn == size - ([0, *ends][lines])
        assert bool(reading.damage) == bool(reading.torn)
        assert not reading.more
        journal = Journal(path)
        assert journal.torn == reading.torn
        journal.append(Record(9.0, "next", None, {}))
        journal.close()
        after = read_journal(path)
        assert [*events[:lines], Event(seq=lines, at=9.0, kind="next")] == list(after.events)
        assert after.torn == 0


def test_any_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "journal"
    events = write(path, RECORDS[:3])
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        reading = read_journal(path)
        assert len(reading.events) < 3 or list(reading.events) == events
        assert list(reading.events) == events[: len(reading.events)]


def test_damage_within_is_not_repaired(tmp_path):
    path = tmp_path / "journal"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"rollout", b"rollauf") + b"".join(lines[2:]))
    reading = read_journal(path)
    assert len(reading.events) == 1
    assert reading.more
    before = path.read_bytes()
    with pytest.raises(JournalError, match="damaged at byte"):
        Journal(path)
    assert path.read_bytes() == before


def test_a_missing_line_is_damage(tmp_path):
    path = tmp_path / "journal"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"".join(lines[2:]))
    assert "expected seq 1, got 2" in read_journal(path).damage


def test_numbers_and_epoch_go_on_in_a_second_writer(tmp_path):
    path = tmp_path / "journal"
    write(path)
    journal = Journal(path)
    assert journal.epoch == 7
    assert journal.append(Record(6.0, "x", None, {})).seq == 5
    journal.close()
    assert len(read_journal(path).events) == 6


def test_one_writer_at_a_time(tmp_path):
    journal = Journal(tmp_path / "journal")
    with pytest.raises(JournalError, match="another scheduler"):
        Journal(tmp_path / "journal")
    journal.close()
    Journal(tmp_path / "journal").close()


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(RECORDS[0])
    real = journal._file

    class Full:
        def write(self, line):
            real.write(line[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name):
            return getattr(real, name)

    journal._file = Full()
    with pytest.raises(JournalError, match="No space left on device"):
        journal.append(RECORDS[1])
    journal._file = real
    journal.append(RECORDS[2])
    journal.close()
    assert [e.kind for e in read_journal(path).events] == ["cell_hello", "role"]


def test_a_journal_that_cannot_be_opened_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot write"):
        Journal(tmp_path / "file" / "journal")
    with pytest.raises(JournalError, match="cannot read"):
        read_journal(tmp_path / "absent")


@pytest.mark.parametrize("line", [b"", b"{}\n", b"null\n", b'{"crc":1,"event":{}}\n', b"\xff\xfe\n"])
def test_other_bytes_are_no_line(line):
    with pytest.raises(JournalError):
        decode(line)


def test_durations_and_the_readable_list(tmp_path, capsys):
    path = tmp_path / "journal"
    events = write(path)
    assert durations(events) == {0: {"starting": 1.5, "rollout": 1.25}, 1: {"starting": 4.0}}
    assert cli.main(["journal", str(path)]) == 0
    out = capsys.readouterr().out
    assert "transfer" in out
    assert "w=3" in out
    assert "cell 0: starting 1.5 s, rollout 1.2 s" in out
    assert cli.main(["journal", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [msgspec.json.decode(line, type=Event) for line in lines] == events
    path.write_bytes(path.read_bytes()[:-3])
    assert cli.main(["journal", str(path)]) == 0
    assert "were not read" in capsys.readouterr().out
    assert cli.main(["journal", str(tmp_path / "absent")]) == 1
    assert "cannot read the journal" in capsys.readouterr().err


def test_a_line_is_one_line():
    event = Event(seq=0, at=0.0, kind="x", numbers={"detail": "two\nlines\r\n"})
    assert encode(event).count(b"\n") == 1
    assert decode(encode(event)) == event
