"""Group refill: which executions are replaced by another one of their group.

    judged ─ aborted, or no score after every try ─▶ refills left in its group? ─▶ dispatched anew, as <execution>-r<n>
                                                              │ none                  │ the scheduler declines
                                                              └──── the group goes on with the members it has ◀┘

An execution is replaced while it is judged and not yet submitted, so the feed learns both at once: that this one is
excluded, and which one to wait for. The ledger enters the replacement before anybody is told, in one transaction; it is
then told to the scheduler and to the feed, as often as restarts make necessary.
"""

from __future__ import annotations

import re

from gyre_traj.intake import Ending

STOPPED = "stopped"  # how the harness of an execution ended that the runner's own end stopped

_SUCCESSOR = re.compile(r"(.*)-r([1-9][0-9]*)")


def replaceable(ending: Ending | None) -> bool:
    """Whether the execution has no result, through no fault of its own."""
    return ending in (Ending.ABORTED, Ending.EVALUATOR_FAILED)


def successor(execution: str) -> str:
    """The name of the execution dispatched in place of `execution`: b0-g00-e3, b0-g00-e3-r1, b0-g00-e3-r2 …"""
    found = _SUCCESSOR.fullmatch(execution)
    return f"{found[1]}-r{int(found[2]) + 1}" if found else f"{execution}-r1"


def obstacle(why: str, used: int, limit: int) -> str:
    """Why an execution that ended by `why` is not replaced, empty if it is.

    used: executions of its group that were replaced because they failed; limit: how many may be, 0 replaces none. An
    operator's stop is no failure: what it ended is replaced when the run goes on, whatever failed before.
    """
    if not limit:
        return "runner.refills is 0"
    return "" if why == STOPPED or used < limit else f"its group has used its {limit} refills"
