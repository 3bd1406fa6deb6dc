"""Which batch belongs to which version: the steps the core has taken, as the feed was told.

Batches are numbered like the versions they are trained on: batch k turns version k into k + 1. (A batch that excludes
everybody may close without a step; the numbers then drift apart, which is why both are kept.)
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_train.errors import FeedError


@dataclass(frozen=True, slots=True)
class Closed:
    """A batch that became an optimizer step."""

    index: int
    version: int  # it was trained on
    new_version: int  # it made


class History:
    """size: groups a batch is made of. The first batch ever opened takes groups [0, size)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.closed: list[Closed] = []
        self._base: int | None = None  # index of the first batch ever opened

    @property
    def head(self) -> Closed | None:
        """The last closed batch."""
        return self.closed[-1] if self.closed else None

    def index(self, version: int) -> int:
        """The batch that is trained on `version`: the next one, or a closed one to be replayed. Raises `FeedError`."""
        if self._base is None:
            return version
        if self.head is not None and version == self.head.new_version:
            return self.head.index + 1
        for closed in self.closed:
            if closed.version == version and closed.new_version > version:
                return closed.index
        at = f"at version {self.head.new_version}" if self.head else "in its first batch"
        raise FeedError(
            f"no batch can be opened on version {version!r}: the feed is {at} and could replay "
            f"from {[c.version for c in self.closed]!r}; did the core restore another run's checkpoint?"
        )

    def open(self, index: int) -> int:
        """Batch `index` is opened; returns how many closed batches are given up by it, to be replayed."""
        if self._base is None:
            self._base = index
        kept = [c for c in self.closed if c.index < index]
        given_up = len(self.closed) - len(kept)
        self.closed = kept
        return given_up

    def close(self, closed: Closed) -> None:
        """The next batch was closed."""
        self.closed.append(closed)

    def first_group(self, index: int) -> int:
        """Number of the first group of batch `index`."""
        return (index - (index if self._base is None else self._base)) * self.size

    @property
    def next_group(self) -> int:
        """Number of the first group that is in no closed batch."""
        return self.first_group(self.head.index + 1) if self.head is not None else 0
