"""Text of a growing list of token ids, decoded piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_agent_proxy.vocabulary import Vocabulary


class GrowingText:
    """Gives out decoded text that later tokens cannot change; the cost of `feed` is that of the new tokens."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Sequence[int] = ()) -> None:
        """stop_ids: ids that end a turn and are not part of its text."""
        self._stop_ids = stop_ids
        self._vocabulary = vocabulary
        self._start = 0  # context begins here: decoders treat the first token of a piece differently
        self._read = 0  # the text of ids up to here was given out

    def feed(self, ids: Sequence[int]) -> str:
        """Take the whole list as it is now; return the text it has gained."""
        end = len(ids) - (len(ids) > 0 and ids[-1] in self._stop_ids)
        if self._read >= end or self._vocabulary.is_byte(ids[end - 1]):
            return ""  # nothing new, cut back by a stop string, or among bytes that make up characters together
        decode = self._vocabulary.decode
        before = decode(ids[self._start : self._read])
        after = decode(ids[self._start : end])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, end
        return after[len(before) :]
