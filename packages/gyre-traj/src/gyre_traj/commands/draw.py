"""select: which trajectories would be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre_traj.commands import Progress, say, say_json


def select(paths: Sequence[str], *, j_max: int | None, seed: int, roles: str | None, as_json: bool) -> int:
    """Print the trajectories drawn from each log and what was left out; as JSON, an object a line and log."""
    from gyre_traj.log import read_log
    from gyre_traj.roles import DEFAULT_PRIORITY, resolve
    from gyre_traj.selection import select as draw
    from gyre_traj.tree import Tree

    priority = resolve(roles) if roles is not None else DEFAULT_PRIORITY
    progress = Progress(len(paths), "selected from")
    for done, path in enumerate(paths, 1):
        tree = Tree.from_log(read_log(path))
        selection = draw(tree, j_max, seed, priority)
        drawn: list[dict[str, Any]] = [
            {
                "call": t.call,
                "role": t.role,
                "tokens": len(t),
                "targets": t.targets,
                "trainable": int(t.trainable.sum()),
            }
            for t in selection.trajectories
        ]
        if as_json:
            say_json(
                {
                    "log": path,
                    "execution": selection.execution,
                    "trajectories": drawn,
                    "targets": selection.targets,
                    "trainable": tree.trainable,
                    "left_out": selection.left_out,
                }
            )
        else:
            say(f"execution {selection.execution}: {selection.targets:,} of {tree.trainable:,} trainable tokens")
            for t in drawn:
                again = t["trainable"] - t["targets"]
                shared = f", {again:,} more are targets above" if again else ""
                say(f"  {t['call']}  {t['role']}  {t['targets']:,} targets of {t['tokens']:,} tokens{shared}")
            if selection.left_out:
                say("  left out: " + ", ".join(f"{role} {count:,}" for role, count in selection.left_out.items()))
        progress(done)
    return 0
