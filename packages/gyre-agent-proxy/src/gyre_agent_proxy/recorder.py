"""Call logs: one `gyre_traj` log an execution, written before an answer counts as delivered."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from gyre_agent_proxy.errors import RecordError
from gyre_agent_proxy.metrics import Metrics
from gyre_traj.errors import LogError
from gyre_traj.log import Log, LogWriter, read_log
from gyre_traj.records import Header, Record

log = logging.getLogger(__name__)


class Recorder:
    """Opens and holds the logs in one folder."""

    def __init__(
        self, folder: Path, *, model: str = "", tokenizer_hash: str = "", metrics: Metrics | None = None
    ) -> None:
        self.folder = folder
        self._metrics = metrics or Metrics()
        self._model, self._hash = model, tokenizer_hash
        self._writers: dict[str, LogWriter] = {}

    def path(self, execution: str) -> Path:
        """The log of an execution."""
        return self.folder / f"{execution}.gtraj"

    def open(self, execution: str) -> Log | None:
        """Open the execution's log for appending; returns what an earlier proxy wrote in it. Raises `RecordError`."""
        path = self.path(execution)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writer = self._writers[execution] = LogWriter(path)
            if writer.torn:
                self._metrics.add("logs_cut")
                log.warning(
                    "%s: its call log ended in %d bytes of a record that was never whole; they were cut off",
                    execution,
                    writer.torn,
                )
            before = read_log(path)
            if before.header is None:
                writer.append(
                    Header(
                        execution=execution, model=self._model, tokenizer_hash=self._hash, created=round(time.time(), 3)
                    )
                )
                return None
        except (LogError, OSError) as e:
            self.close(execution)
            raise RecordError(f"the call log of {execution!r} cannot be used: {e}") from e
        return before

    def append(self, execution: str, record: Record) -> None:
        """Append a record; it then survives the death of this process. Raises `RecordError`."""
        try:
            self._writers[execution].append(record)
        except KeyError:
            raise RecordError(f"the call log of {execution!r} is not open") from None
        except (LogError, OSError) as e:
            raise RecordError(f"a call of {execution!r} cannot be recorded, so its answer is held back: {e}") from e

    def count(self, execution: str) -> int:
        """Calls in the execution's log; 0 if there is none. Raises `RecordError`."""
        try:
            return len(read_log(self.path(execution)).calls) if self.path(execution).is_file() else 0
        except LogError as e:
            raise RecordError(str(e)) from e

    def close(self, execution: str) -> None:
        """Force the log to disk and close it."""
        writer = self._writers.pop(execution, None)
        if writer is not None:
            try:
                writer.sync()
            except LogError as e:
                raise RecordError(str(e)) from e
            finally:
                writer.close()

    def close_all(self) -> None:
        """Close every log."""
        for execution in list(self._writers):
            self.close(execution)
