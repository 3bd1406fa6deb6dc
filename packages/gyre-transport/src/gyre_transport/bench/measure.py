"""Times, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

from gyre_transport.errors import ChecksumMismatch

Times = dict[str, list[float]]  # path -> seconds, one a round


def rounds(
    paths: Mapping[str, Callable[[], None]],
    count: int,
    check: Callable[[], bool] | None = None,
    *,
    after: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda path: None,
) -> Times:
    """Seconds of each path, `count` times in turn, after one round to warm up.

    check: whether the right bytes came, asked once a path. after: done after each, not measured. progress: told the
    path that begins. Raises `ChecksumMismatch` when other bytes came, and what the paths raise.
    """
    times: Times = {name: [] for name in paths}
    for number in range(count + 1):
        for name, path in paths.items():
            progress(name)
            began = perf_counter()
            path()
            took = perf_counter() - began
            after()
            if number:
                times[name].append(took)
            elif check is not None and not check():
                raise ChecksumMismatch(f"{name} brought other bytes than the owner has; report this")
    return times


def ratio(times: Times, name: str, base: str) -> float:
    """Speed relative to `base`: the median over rounds of the two measured beside each other."""
    return median(b / t for b, t in zip(times[base], times[name], strict=True))


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown that reads well as it is, the first column to the left."""
    wide = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    rule = ["-" * wide[0], *("-" * (w - 1) + ":" for w in wide[1:])]
    padded = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, wide, strict=True))]
        for row in [head, rule, *rows]
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in padded)
