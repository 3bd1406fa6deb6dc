"""The journal: what is written is read, up to the byte where it was torn."""

import errno

import msgspec
import pytest

from gyre_sched import cli
from gyre_sched.actions import Received, Record, Tick
from gyre_sched.errors import JournalError
from gyre_sched.journal import Journal, decode, durations, encode, read_journal
from gyre_sched.protocol import Event, Published

RECORDS = [
    Record(1.0, "cell_hello", 0, {"engine": "cell-0", "url": "http://h:1", "C_e": 32, "version": 0}),
    Record(2.0, "role", 0, {"from": "starting", "to": "rollout", "seconds": 1.5, "epoch": 1}),
    Record(3.5, "role", 0, {"from": "rollout", "to": "draining", "seconds": 1.25, "epoch": 7}),
    Record(3.5, "transfer", 0, {"w": 3, "C_R": 64, "C_e": 32, "note": 'quote " back \\ newline \n é', "none": None}),
    Record(5.0, "role", 1, {"from": "starting", "to": "rollout", "seconds": 4.0, "epoch": 6}),
]


def write(path, records=RECORDS):
    """Each record follows from an input of its own; returns the events."""
    journal = Journal(path)
    events = [event for r in records for event in journal.append(Tick(r.at), [r])]
    journal.close()
    return events


def test_what_was_written_is_read(tmp_path):
    events = write(tmp_path / "sched" / "journal")
    reading = read_journal(tmp_path / "sched" / "journal")
    assert list(reading.events) == events
    assert [e.seq for e in events] == [0, 1, 2, 3, 4]
    assert [(e.at, e.kind, e.cell, e.numbers) for e in events] == [(r.at, r.kind, r.cell, r.numbers) for r in RECORDS]
    assert (reading.torn, reading.more) == (0, False)
    assert [(s.input.at, len(s.events)) for s in reading.steps] == [(r.at, 1) for r in RECORDS]
    lines = [msgspec.json.decode(line) for line in (tmp_path / "sched" / "journal").read_bytes().splitlines()]
    assert [sorted(line) for line in lines] == [["crc", "input", "then"], ["crc", "event"]] * 5


def test_a_step_is_written_as_it_was_taken(tmp_path):
    steps = [
        (Received(1.5, Published(version=3, manifest=bytes(range(256)))), RECORDS[:3]),
        (Tick(2.0, 40.0), []),
        (Tick(3.0), RECORDS[3:]),
    ]
    journal = Journal(tmp_path / "journal")
    for told, records in steps:
        journal.append(told, records)
    journal.close()
    reading = read_journal(tmp_path / "journal")
    assert [(s.input, [(e.kind, e.numbers) for e in s.events]) for s in reading.steps] == [
        (told, [(r.kind, r.numbers) for r in records]) for told, records in steps
    ]
    assert [e.seq for e in reading.events] == [0, 1, 2, 3, 4]


def test_torn_at_any_byte_it_reads_whole_steps_and_a_writer_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)  # a thousand journals; no machine crashes here
    path = tmp_path / "journal"
    journal = Journal(path)
    events, ends = [], [0]
    for records in (RECORDS[:2], [], RECORDS[2:3], RECORDS[3:]):
        events.append(journal.append(Tick(9.0), records))
        ends.append(path.stat().st_size)
    journal.close()
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        steps = sum(e <= size for e in ends) - 1
        kept = [event for step in events[:steps] for event in step]
        reading = read_journal(path)
        assert list(reading.events) == kept
        assert len(reading.steps) == steps
        assert reading.torn == size - ends[steps]
        assert bool(reading.damage) == bool(reading.torn)
        assert not reading.more
        journal = Journal(path)
        assert journal.torn == reading.torn
        journal.append(Tick(9.0), [Record(9.0, "next", None, {})])
        journal.close()
        after = read_journal(path)
        assert [*kept, Event(seq=len(kept), at=9.0, kind="next")] == list(after.events)
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
    path.write_bytes(b"".join(lines[:3]) + lines[3].replace(b"rollout", b"rollauf") + b"".join(lines[4:]))
    reading = read_journal(path)
    assert len(reading.events) == 1
    assert reading.more
    before = path.read_bytes()
    with pytest.raises(JournalError, match="damaged after byte"):
        Journal(path)
    assert path.read_bytes() == before


def test_a_missing_line_is_damage(tmp_path):
    path = tmp_path / "journal"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for missing, said in (([0], "follows from no input"), ([1], "1 more events"), ([2, 3], "expected seq 1, got 2")):
        path.write_bytes(b"".join(line for i, line in enumerate(lines) if i not in missing))
        assert said in read_journal(path).damage


def test_numbers_go_on_in_a_second_writer(tmp_path):
    path = tmp_path / "journal"
    write(path)
    journal = Journal(path)
    assert [event for step in journal.before for event in step.events] == list(read_journal(path).events)
    journal.append(Tick(6.0), [])
    assert [e.seq for e in journal.append(Tick(6.0), [Record(6.0, "x", None, {}), Record(6.0, "y", None, {})])] == [
        5,
        6,
    ]
    journal.close()
    journal = Journal(path)
    assert journal.append(Tick(7.0), [Record(7.0, "z", None, {})])[0].seq == 7
    journal.close()


def test_one_writer_at_a_time(tmp_path):
    journal = Journal(tmp_path / "journal")
    with pytest.raises(JournalError, match="another scheduler"):
        Journal(tmp_path / "journal")
    journal.close()
    Journal(tmp_path / "journal").close()


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(Tick(1.0), [RECORDS[0]])
    real = journal._file

    class Full:
        def write(self, line):
            real.write(line[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name):
            return getattr(real, name)

    journal._file = Full()
    with pytest.raises(JournalError, match="No space left on device"):
        journal.append(Tick(1.0), [RECORDS[1]])
    journal._file = real
    journal.append(Tick(1.0), [RECORDS[2]])
    journal.close()
    assert [e.kind for e in read_journal(path).events] == ["cell_hello", "role"]


def test_a_journal_that_cannot_be_opened_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot write"):
        Journal(tmp_path / "file" / "journal")
    with pytest.raises(JournalError, match="cannot read"):
        read_journal(tmp_path / "absent")


@pytest.mark.parametrize("line", [b"", b"{}\n", b"null\n", b'{"crc":1,"event":{}}\n', b'{"crc":0}\n', b"\xff\xfe\n"])
def test_other_bytes_are_no_line(line):
    with pytest.raises(JournalError):
        decode(line)


def test_durations_and_the_readable_list(tmp_path, capsys):
    path = tmp_path / "journal"
    events = write(path)
    told = {0: {"starting": 1.5, "rollout": 1.25, "draining": 1.5}, 1: {"starting": 4.0, "rollout": 0.0}}
    assert durations(events) == told, "the last role of each until the last event"
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
    path.write_bytes(b"no journal\n")
    assert cli.main(["journal", str(path)]) == 1
    assert "expected a journal, got" in capsys.readouterr().err


def test_a_line_is_one_line():
    event = Event(seq=0, at=0.0, kind="x", numbers={"detail": "two\nlines\r\n"})
    assert encode(event).count(b"\n") == 1
    assert decode(encode(event)) == event
