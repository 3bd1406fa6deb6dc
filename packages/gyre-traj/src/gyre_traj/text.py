"""Token ids to text, for eyes only: nothing that is trained on is ever decoded and encoded again.

Needs the `tokenizers` library (`pip install 'gyre-traj[text]'`), imported when the first decoder is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gyre_traj.errors import NoTokenizer

_LONGEST = 8  # tokens that a character may be spread over; longer, and they are no text


class Decoder:
    """A tokenizer, read from a Hugging Face folder or a tokenizer.json. Raises `NoTokenizer`."""

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import Tokenizer, decoders
        except ImportError as error:
            raise NoTokenizer(
                "text needs the tokenizers library, which is not installed; pip install 'gyre-traj[text]'"
            ) from error
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise NoTokenizer(
                f"no tokenizer at {str(path)!r}: expected a tokenizer.json or a Hugging Face folder that holds one"
            )
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise NoTokenizer(f"tokenizer {str(file)!r} cannot be read: {error}; expected a tokenizer.json") from error
        self._stream: Any = decoders.DecodeStream
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(int(i) for i, token in added.items() if token.special)
        self._size = self._tokenizer.get_vocab_size()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Text of each id, in its context: joined they are the text of all.

        Where several tokens make one character, the last of them has it and the others are empty. An id the tokenizer
        does not know becomes U+FFFD.
        """
        pieces: list[str] = []
        pending: list[int] = []  # ids that make no whole character yet
        stream = self._stream(skip_special_tokens=False)
        for token in map(int, ids):
            known = token < self._size or self._tokenizer.id_to_token(token) is not None
            piece = self._step(stream, token) if known else "\N{REPLACEMENT CHARACTER}"
            pending.append(token)
            if piece is None and len(pending) < _LONGEST:
                pieces.append("")
                continue
            if piece is None or not known:
                piece = self._tokenizer.decode(pending, skip_special_tokens=False) if known else piece
                stream = self._stream(skip_special_tokens=False)
            pieces.append(piece or "")
            pending = []
        if pending:
            pieces[-1] = self._tokenizer.decode(pending, skip_special_tokens=False)
        return pieces

    def _step(self, stream: Any, token: int) -> str | None:
        try:
            return stream.step(self._tokenizer, token)  # type: ignore[no-any-return]
        except Exception:  # it lost its place after bytes that are no text
            return None
