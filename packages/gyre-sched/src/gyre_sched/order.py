"""In which order the groups of a burst start. A group starts as a whole: no member is of use without the rest."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_sched.predict import Durations, TaskLengths


def longest_first(tasks: Sequence[str], lengths: TaskLengths, durations: Durations) -> tuple[int, ...]:
    """Indices of `tasks`, the longest predicted first: what starts last should not be what lasts longest.

    A task that was not seen lately counts as a median one; equals keep the order planned. Empty when nothing is known,
    so that the order planned stands.
    """
    middle = durations.quantile(0.5)
    known = [lengths[task] for task in tasks]
    if middle is None or all(k is None for k in known):
        return ()
    predicted = [middle if k is None else k for k in known]
    return tuple(sorted(range(len(tasks)), key=lambda i: -predicted[i]))
