"""A model's tokenizer, used so that only a template can produce special tokens, never the text it is filled with.

`protect` puts an invisible mark into every added token that a text quotes; `encode` takes the marks out again after it
has looked for added tokens. What a user quotes is therefore encoded as ordinary text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gyre_agent_proxy.errors import ModelError

MARK = "\U0010fffd"  # the last private-use code points: never in a rendered prompt
SENTINEL = "\U0010fffc"  # stands for a turn's sampled text where a template is rendered around it
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_RESERVED = re.compile(f"[{MARK}{SENTINEL}\ud800-\udfff]")  # half a surrogate pair is no text


class Vocabulary:
    """Encode and decode for one `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        """Load `path`/tokenizer.json. Raises `ModelError`."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json"
        try:
            raw = file.read_text()
            data: dict[str, Any] = json.loads(raw)
            added: list[dict[str, Any]] = data.get("added_tokens") or []
            data["added_tokens"], data["post_processor"] = [], None
            self._plain = Tokenizer.from_str(json.dumps(data))  # knows no added token: cannot produce one
            self._whole = Tokenizer.from_str(raw)
        except OSError as e:
            raise ModelError(f"cannot read {str(file)!r}: {e.strerror}; the model folder needs a tokenizer.json") from e
        except Exception as e:  # tokenizers raises bare Exception
            raise ModelError(f"{str(file)!r} is not a tokenizer: {e}") from e
        self.hash = hashlib.sha256(raw.encode()).hexdigest()[:16]
        self.special = {str(t["content"]): int(t["id"]) for t in added}
        stripping = {str(t["content"]): (bool(t.get("lstrip")), bool(t.get("rstrip"))) for t in added}
        self._stripping = {t: s for t, s in stripping.items() if any(s)}
        # Longest first: <|im_start|> before a token that is a part of it.
        names = sorted(self.special, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, names))) if names else None

    def protect(self, text: str) -> str:
        """Return `text` with every quoted added token marked as text."""
        text = _RESERVED.sub("\N{REPLACEMENT CHARACTER}", text)
        if self._find is None:
            return text
        # Marking a match can leave another one that overlapped it; repeat until none is left.
        while self._find.search(text):
            text = self._find.sub(lambda m: m[0][0] + MARK + m[0][1:] if len(m[0]) > 1 else m[0] + MARK, text)
            if any(len(t) == 1 for t in self.special):  # a one-character token cannot be broken up
                break
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text: added tokens where the template wrote them, plain text elsewhere."""
        ids: list[int] = []
        at = 0
        if self._find is not None:
            for match in self._find.finditer(text):
                if text.startswith(MARK, match.end()) and len(match[0]) == 1:
                    continue
                before, at = text[at : match.start()], match.end()
                left, right = self._stripping.get(match[0], (False, False))
                ids += self._text(before.rstrip() if left else before)
                ids.append(self.special[match[0]])
                if right:
                    at += len(text[at:]) - len(text[at:].lstrip())
        return ids + self._text(text[at:])

    def _text(self, text: str) -> list[int]:
        if not text:
            return []
        # A batch of one: the only call that does not work out offsets, which nobody reads.
        (found,) = self._plain.encode_batch_fast([text.replace(MARK, "")], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, added tokens included as they are written."""
        text: str = self._whole.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def id(self, token: str) -> int | None:
        """The id of an added token, or None."""
        return self.special.get(token)

    def first_special(self, text: str) -> int | None:
        """The id of the first added token in `text`."""
        match = self._find.search(text) if self._find else None
        return self.special[match[0]] if match else None

    def is_byte(self, token: int) -> bool:
        """Whether `token` is one byte of a tokenizer that spells by bytes what it has no token for."""
        return _BYTE.fullmatch(self.piece(token) or "") is not None

    def piece(self, token: int) -> str | None:
        """The vocabulary entry of any id, or None for an id the tokenizer does not know."""
        found: str | None = self._whole.id_to_token(token)
        return found
