"""Clean-up: what a dead runner of the same run left, at the start; workspaces, when their executions are done.

at the start   processes with this run's label are ended; homes and verifiers' folders are removed; workspaces of
               executions that the feed has, as keep_workspaces says
later          the workspace of an execution that was submitted, likewise
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from gyre_agent_proxy.runner import owner
from gyre_agent_proxy.runner.errors import RunnerError
from gyre_agent_proxy.runner.ledger import UNFINISHED, Row
from gyre_traj.intake import Ending
from gyre_transport.run import RunDir

log = logging.getLogger(__name__)

GRACE = 15.0  # seconds; longer than a guard takes to end its tree

Keep = Literal["all", "failed", "none"]


def homes(folders: RunDir) -> Path:
    """Where private homes of executions are."""
    return folders.path / "homes"


def scoring(folders: RunDir) -> Path:
    """Where verifiers work."""
    return folders.path / "scoring"


def keeps(keep: Keep, ending: Ending | None) -> bool:
    """Whether the workspace of an execution that ended so is kept; one without a score counts as failed."""
    return keep == "all" or (keep == "failed" and ending is not Ending.SCORED)


async def clean(folders: RunDir, name: str, rows: Iterable[Row], keep: Keep, grace: float = GRACE) -> None:
    """End and remove what the runner before this one left. name: the run's owner name; rows: of its ledger.

    Raises `RunnerError` when a process does not end: it would go on in a workspace that is scored.
    """
    found, left = await owner.end_processes(name, grace)
    if left:
        raise RunnerError(
            f"processes that an earlier runner of this run left do not end: "
            f"{', '.join(f'{p.pid} (of {p.execution})' for p in left)}; end them, then start again"
        )
    if found:
        counts = Counter(p.execution for p in found)
        log.warning(
            "ended %d processes that an earlier runner of this run left: %s",
            len(found),
            ", ".join(f"{n} of {execution}" for execution, n in sorted(counts.items())),
        )
    done = {row.id: row for row in rows if row.state not in UNFINISHED}
    gone = [folder for parent in (homes(folders), scoring(folders)) for folder in owner.marked(parent, name)]
    gone += [
        folder
        for folder, execution in owner.marked(folders.workspaces, name).items()
        if execution in done and not keeps(keep, done[execution].ending)
    ]
    removed = [await removal(folder) for folder in gone]
    if any(removed):
        log.warning("removed %d folders that an earlier runner of this run left", sum(removed))


async def removal(folder: Path) -> bool:
    """Remove a folder of an execution; returns whether it is gone, and says so if not."""
    gone = await asyncio.to_thread(owner.remove, folder)
    if not gone:
        log.warning("%s could not be removed whole; remove it by hand", folder)
    return gone
