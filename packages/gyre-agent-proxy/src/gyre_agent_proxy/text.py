"""Text of a growing list of token ids, decoded piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_agent_proxy.vocabulary import Vocabulary


class GrowingText:
    """`text` is the decoded prefix that later tokens cannot change; the cost of `feed` is that of the new tokens."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Sequence[int] = ()) -> None:
        """stop_ids: ids that end a turn and are not part of its text."""
        self._stop_ids = stop_ids
        self._decode = vocabulary.decode
        self._start = 0  # context begins here: decoders treat the first token of a piece differently
        self._read = 0  # ids up to here are in `text`
        self.text = ""

    def feed(self, ids: Sequence[int]) -> str:
        """Take the whole list as it is now; returns `text`."""
        end = len(ids) - (len(ids) > 0 and ids[-1] in self._stop_ids)
        if self._read >= end:
            return self.text  # nothing new, or cut back by a stop string
        before = self._decode(ids[self._start : self._read])
        after = self._decode(ids[self._start : end])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self.text += after[len(before) :]
            self._start, self._read = self._read, end
        return self.text
