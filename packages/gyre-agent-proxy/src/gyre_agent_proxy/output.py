"""What one call has sampled so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from gyre_traj.records import Attempt, Span


@dataclass(slots=True)
class Output:
    """What was sampled so far; grows only, but for what `truncate` is for: see `generate`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)  # None: some were missing, the call is not trainable
    versions: list[Span] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    finish: str = ""  # stop | length | abort | error
    matched: int | str | None = None
    cached: int = 0  # prompt tokens the first engine had cached
    told: int = 0  # tokens whose text a client may have been sent

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        gone = len(self.ids) - length
        del self.ids[length:]
        if self.logprobs is not None:
            del self.logprobs[length:]
        self.versions = [Span(s.version, s.start, min(s.end, length)) for s in self.versions if s.start < length]
        if self.attempts and gone:
            last = self.attempts[-1]
            self.attempts[-1] = msgspec.structs.replace(last, tokens=last.tokens - gone)
