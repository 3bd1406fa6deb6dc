"""The content of a message: one text, whatever parts a dialect cuts it into.

None, "" and [] are the same; text parts are joined, of whatever type. What a text model cannot read (images, audio,
files, parts of a type that is not known here) is refused, or replaced by a note to the model and counted, as
`Defaults.media` says.
"""

from __future__ import annotations

from typing import Any

from gyre_agent_proxy.errors import BadRequest

_TEXT = {"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"}
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}


class Parts:
    """Reads the contents of one request."""

    def __init__(self, media: str) -> None:
        """media: "note" or "refuse"."""
        self._refuse = media == "refuse"
        self.omitted = 0  # parts replaced by a note

    def text(self, content: Any, where: str) -> str:
        """The text of a content field. Raises `BadRequest` naming `where`."""
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise BadRequest(f"{where}: expected a string or a list of parts, got {content!r:.80}", where)
        return "".join(self.part(part, f"{where}[{i}]") for i, part in enumerate(content))

    def part(self, part: Any, where: str) -> str:
        """The text of one part. Raises `BadRequest`."""
        if isinstance(part, str):
            return part
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            return self.note(_MEDIA[kind], where)
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if isinstance(text, str) and isinstance(kind, str | None):
            return text
        if isinstance(kind, str) and kind not in _TEXT:  # newer than this module
            return self.note(kind[:64], where)
        raise BadRequest(f"{where}: expected a text part, got {part!r:.80}", where)

    def note(self, what: str, where: str) -> str:
        """What stands for a part that the model cannot read. Raises `BadRequest` where those are refused."""
        if self._refuse:
            raise BadRequest(f"{where}: this model reads text only, got a part with {what}", where)
        self.omitted += 1
        return f"[{what} omitted: this model reads text only]"
