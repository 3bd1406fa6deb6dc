"""Follow a run by its files, live or ended: the journal as it grows, and what others leave in `metrics/`.

Nobody is asked anything: whoever watches a run cannot disturb it, and a run that has ended looks as it did at its end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gyre_sched.errors import JournalError
from gyre_sched.face.chronicle import Chronicle
from gyre_sched.face.picture import Picture, picture
from gyre_sched.face.readings import read_counters, read_steps
from gyre_sched.journal import decode
from gyre_sched.protocol import Event
from gyre_transport.config import load, section
from gyre_transport.errors import ConfigError
from gyre_transport.run import RunConfig, RunDir

_CHUNK = 4 << 20  # bytes of the journal folded at one look; the next look goes on


class Follower:
    """Looks at a run directory again and again. Not shared between threads."""

    def __init__(self, run_dir: Path) -> None:
        """Raises `JournalError` when it is no run directory."""
        self._dir = RunDir(run_dir)
        if not self._dir.config.is_file() and not self._dir.journal.is_file():
            raise JournalError(f"{str(run_dir)!r} holds neither config.toml nor sched/journal; name a run directory")
        self.name, self.steps_total = _names(self._dir)
        self._chronicle = Chronicle()
        self._offset = 0
        self._file = 0  # inode of the journal read so far
        self._damage = ""
        self._steps: list[dict[str, Any]] = []
        self._seen: tuple[int, int] = (0, 0)

    def look(self) -> Picture:
        """Read what is new and return the picture. Raises `JournalError` when a file cannot be read."""
        while self._fold():
            pass
        self._read_steps()
        return picture(
            self._chronicle,
            name=self.name,
            steps_total=self.steps_total,
            steps=self._steps,
            proxy=read_counters(self._dir.metrics / "proxy.json"),
            runner=read_counters(self._dir.metrics / "runner.json"),
            damage=self._damage,
        )

    def _fold(self) -> bool:
        """Fold the next whole lines; whether there may be more."""
        try:
            with self._dir.journal.open("rb") as f:
                stat = os.fstat(f.fileno())
                if stat.st_ino != self._file or stat.st_size < self._offset:  # another journal, or a torn tail was cut
                    self._file, self._offset, self._damage, self._chronicle = stat.st_ino, 0, "", Chronicle()
                f.seek(self._offset)
                data = f.read(_CHUNK)
        except FileNotFoundError:
            return False
        except OSError as e:
            raise JournalError(f"cannot read the journal {str(self._dir.journal)!r}: {e.strerror}") from e
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            try:
                item = decode(line)
            except JournalError as e:
                self._damage = f"at byte {self._offset}: {e}"
                return False  # a torn tail that its next writer cuts, or damage: nothing after it can be trusted
            self._damage = ""
            if isinstance(item, Event):
                self._chronicle.take(item)
            self._offset += len(line)
        return len(data) == _CHUNK and bool(whole)

    def _read_steps(self) -> None:
        path = self._dir.metrics / "steps.jsonl"
        try:
            stat = path.stat()
        except OSError:
            return
        if (seen := (stat.st_size, stat.st_mtime_ns)) != self._seen:
            self._seen, self._steps = seen, read_steps(path)


def _names(run_dir: RunDir) -> tuple[str, int]:
    """The run's name and its optimizer steps, as far as its config tells."""
    try:
        run = section(load(run_dir.config), "run", RunConfig)
    except ConfigError:
        return run_dir.path.resolve().name, 0
    return run_dir.path.resolve().name if run.name == "run" else run.name, run.steps
