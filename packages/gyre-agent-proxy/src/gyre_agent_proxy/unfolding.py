"""A sampled turn as it unfolds: text in, piece by piece; out, what is sure to be reasoning and what is sure to be text.

The generic grammar is the one most open models share: `<think>…</think>` first, and calls as JSON objects with `name`
and `arguments` inside `<tool_call>…</tool_call>`. A call that does not parse stays text.

    opening ─ <think> ─▶ thinking ─ </think> ─▶ after ─ other than a new line ─▶ speaking ─ <tool_call> ─▶ calling
       └───────────────────── anything else ──────────────────────────────────────▶  ▲ └───── </tool_call> ─────┘

Held back is what the next piece may make into something else: a beginning of markup or of a stop string, a call until
it ends, white space that is left out where reasoning ends or after the last text of a turn with calls. What was given
out is never taken back, and however a turn is cut into pieces, they add up to the same. A piece costs what it is long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

_THINK, _THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"


class Said(NamedTuple):
    """A piece of a turn; its reasoning comes before its text."""

    reasoning: str = ""
    text: str = ""


class Unfolding:
    """The state of one turn: `feed` all of it, then `end` it once; `calls` and `thought` are then those of the turn."""

    def __init__(self, *, tools: bool, stops: Sequence[str] = (), thinking: bool = False) -> None:
        """tools: whether tools were offered; without, a call is text. thinking: the prompt opened the reasoning.

        stops: the turn ends before the first of these strings.
        """
        self.calls: list[tuple[str, str]] = []  # (name, arguments as JSON text), in order
        self.thought = thinking  # there is reasoning, if an empty one
        self._tools = tools
        self._stops = stops
        self._stopped = False
        self._raw = ""  # may begin a stop string, or does
        self._rest = ""  # may begin the markup that the phase looks for
        self._blank: list[str] = []  # white space before anything else
        self._call: list[str] = []  # the call that is being written
        self._reasoning = _Trimmed("\n")
        self._text = _Trimmed(None if tools else "")
        self._phase: Callable[[], bool] = self._thinking if thinking else self._opening

    def feed(self, text: str) -> Said:
        """Take more of the turn's text; return what is sure now and was not before."""
        if not self._stopped:
            raw = self._raw + text
            at, stop = _seek(raw, self._stops)
            self._raw, self._stopped = raw[at:], bool(stop)
            self._take(raw[:at])
        return Said(self._reasoning.take(), self._text.take())

    def end(self) -> Said:
        """The turn ends here: return what was held back and is part of it."""
        self._take(cut_at_stop(self._raw, self._stops)[0])
        if self._phase == self._thinking:
            self._reasoning.add(self._rest)
        else:
            call = [_CALL, *self._call] if self._phase == self._calling else []
            self._text.add("".join([*self._blank, *call, self._rest]))
        if not self.calls:
            self._text.release()
        return Said(self._reasoning.take(), self._text.take())

    def _take(self, text: str) -> None:
        """Take text that belongs to the turn whatever follows."""
        self._rest += text
        while self._rest and self._phase():
            pass

    # A phase uses up what it can of `_rest`; true where another one takes over.

    def _opening(self) -> bool:
        found = self._rest.lstrip()
        self._blank.append(self._rest[: len(self._rest) - len(found)])
        if found.startswith(_THINK):
            self._rest, self.thought, self._phase = found[len(_THINK) :], True, self._thinking
        elif _THINK.startswith(found):
            self._rest = found
            return False
        else:
            self._rest, self._phase = "".join(self._blank) + found, self._speaking
        self._blank.clear()
        return True

    def _thinking(self) -> bool:
        inner, ended = self._until(_THOUGHT)
        self._reasoning.add(inner if self._reasoning.begun else inner.lstrip("\n"))
        if ended:
            self._phase = self._after
        return ended

    def _after(self) -> bool:
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._phase = self._speaking
        return bool(self._rest)

    def _speaking(self) -> bool:
        said, ended = self._until(_CALL) if self._tools else self._until()
        self._text.add(said)
        if ended:
            self._phase = self._calling
        return ended

    def _calling(self) -> bool:
        inner, ended = self._until(_CALLED)
        self._call.append(inner)
        if ended:
            written, self._phase = "".join(self._call), self._speaking
            self._call.clear()
            if (call := _read_call(written)) is not None:
                self.calls.append(call)
            else:
                self._text.add(_CALL + written + _CALLED)
        return ended

    def _until(self, *mark: str) -> tuple[str, bool]:
        """What of `_rest` comes before `mark`, as far as that is sure, and whether `mark` is there; both are used."""
        at, found = _seek(self._rest, mark)
        before, self._rest = self._rest[:at], self._rest[at + len(found) :]
        return before, bool(found)


class _Trimmed:
    """Text whose last blanks count only if something else follows them."""

    def __init__(self, blanks: str | None) -> None:
        """blanks: as `str.rstrip` takes them."""
        self.begun = False
        self._blanks = blanks
        self._ready: list[str] = []
        self._held: list[str] = []

    def add(self, text: str) -> None:
        kept = text.rstrip(self._blanks)
        if kept:
            self.begun = True
            self.release()
            self._ready.append(kept)
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def release(self) -> None:
        """The blanks count."""
        self._ready += self._held
        self._held.clear()

    def take(self) -> str:
        text = "".join(self._ready)
        self._ready.clear()
        return text


def _seek(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """(where in `text` the first of `marks` stands or may begin, that mark: "" where it may only begin, or is not)."""
    first = (len(text), "")
    for mark in marks:
        if (at := text.find(mark)) >= 0:
            first = min(first, (at, mark))
        for n in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:n]):
                first = min(first, (len(text) - n, ""))
                break
    return first


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return `text` up to the earliest stop string, and that string (None where there is none)."""
    found = [(at, s) for s in stops if (at := text.find(s)) >= 0]
    if not found:
        return text, None
    at, stop = min(found)
    return text[:at], stop


def _read_call(written: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call; None where it is none."""
    try:
        value = json.loads(written.strip())
        name, arguments = value["name"], value.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    text = arguments if isinstance(arguments, str) else as_json(arguments)
    return (name, text) if isinstance(name, str) and _is_text(name + text) else None


def as_json(value: object) -> str:
    """`value` as JSON text; half of a surrogate pair, which is no text, stays the escape that the model wrote."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(value)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
