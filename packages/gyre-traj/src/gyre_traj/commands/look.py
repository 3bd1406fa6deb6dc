"""inspect, check, view: what is in a log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gyre_traj.commands import Progress, say, say_json


def inspect(path: str, *, as_json: bool) -> int:
    """Print numbers, tree and leaves of one execution."""
    from gyre_traj.log import read_log
    from gyre_traj.report import describe, render
    from gyre_traj.tree import Tree

    log = read_log(path)
    tree = Tree.from_log(log)
    if as_json:
        say_json(describe(tree))
        return 0
    say(render(tree))
    if log.torn or log.skipped:
        say(f"  {log.torn} bytes of a torn tail, {log.skipped} records of unknown kinds")
    return 0


def check(paths: Sequence[str], *, as_json: bool) -> int:
    """Check logs; 1 when one has an error."""
    from gyre_traj.check import check_log
    from gyre_traj.log import read_log

    progress = Progress(len(paths), "checked")
    found = {}
    failed = False
    for done, path in enumerate(paths, 1):
        log = read_log(path)
        findings = check_log(log)
        errors = sum(finding.level == "error" for finding in findings)
        failed |= errors > 0
        if as_json:
            found[path] = findings
        else:
            say(f"{path}: {len(log.calls)} calls, {errors} errors, {len(findings) - errors} notes")
            for finding in findings:
                say(f"  {finding.level}: {f'{finding.call}: ' if finding.call else ''}{finding.text}")
        progress(done)
    if as_json:
        say_json(found)
    return int(failed)


def view(path: str, out: str | None, *, tokenizer: str | None, j_max: int | None, seed: int, show: bool) -> int:
    """Write the page of an execution, over an older one; open it in a browser if asked."""
    from gyre_traj.log import read_log
    from gyre_traj.page import write_page

    target = Path(out) if out is not None else Path(path).with_suffix(".html")
    page = write_page(read_log(path), target, tokenizer=Path(tokenizer) if tokenizer else None, j_max=j_max, seed=seed)
    say(f"{page.path}: {page.calls} calls, {page.size / 1e6:.1f} MB" + (f", {page.cut} texts cut" if page.cut else ""))
    if show:
        import webbrowser

        webbrowser.open(target.resolve().as_uri())
    return 0
