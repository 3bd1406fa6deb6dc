"""The call log: append-only, framed, checksummed; one file an execution."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gyre_traj.records import Call, Header, Record


class LogWriter:
    """Appends records to a log; the first one of a new log is a `Header`. One writer a file, guarded by a lock.

    `torn`: bytes of a torn tail that opening cut off. Raises `LogError`, `NotALog`, `CorruptLog`.
    """

    torn: int

    def __init__(self, path: str | Path) -> None:
        raise NotImplementedError

    def append(self, record: Record) -> None:
        """Hand one whole frame to the operating system; it survives the death of this process."""
        raise NotImplementedError

    def sync(self) -> None:
        """Force what was appended to disk; it survives the death of the machine."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file; idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Log:
    """A log as read."""

    header: Header | None  # None: no whole header yet
    calls: list[Call]  # in the order written
    delivered: dict[str, bool]  # call id -> True if any answer of it reached the harness whole
    torn: int  # bytes after the last whole record
    skipped: int  # records of kinds this package does not know

    def full_prompt(self, call: str) -> NDArray[np.uint32]:
        """Whole prompt ids of a call. Raises `UnknownCall`, `BrokenCall`."""
        raise NotImplementedError

    def full_ids(self, call: str) -> NDArray[np.uint32]:
        """Whole prompt + output ids of a call. Raises `UnknownCall`, `BrokenCall`."""
        raise NotImplementedError


def read_log(path: str | Path) -> Log:
    """Read a log, also while it is being written. Raises `LogError`, `NotALog`, `CorruptLog`."""
    raise NotImplementedError
