"""Stop strings that an engine cannot find, because it looks for them in its own output only."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def stop_across(
    ids: Sequence[int], cut: int, stops: Sequence[str], decode: Callable[[Sequence[int]], str], looked: int = 0
) -> tuple[int, str] | None:
    """(length, stop) where a stop string begins before token `cut` and ends after it; None if there is none.

    looked: of how many tokens it is known already that they hold none.
    """
    if not stops or cut == 0:
        return None
    reach = _reach(stops)
    start, end = max(0, cut - reach), min(len(ids), cut + 2 * reach)
    if looked >= end or not _first(decode(ids[start:end]), stops):
        return None
    for length in range(cut, end + 1):
        if (stop := _first(decode(ids[start:length]), stops)) is not None:
            return length, stop
    return None


def stop_at_end(ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> str | None:
    """A stop string near the end of `ids`; None if there is none."""
    return _first(decode(ids[-_reach(stops) :]), stops) if stops and ids else None


def _reach(stops: Sequence[str]) -> int:
    """Tokens that the longest takes at most: every token is at least one byte, special ones aside."""
    return max(len(s.encode()) for s in stops)


def _first(text: str, stops: Sequence[str]) -> str | None:
    return next((s for s in stops if s in text), None)
