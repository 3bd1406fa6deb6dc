"""Rows for other RL stacks, and logs from elsewhere. Each module imports its stack only where a function needs it.

    trl        TRL's GRPOTrainer: a `rollout_func`'s answer, or whole batches in which weights are kept
    verl       verl's DataProto, and AgentLoopOutput for its agent loops
    slime      slime's Sample as plain dicts
    datasets   Parquet files, one row a trajectory, for Hugging Face datasets and back
    openai     logs of OpenAI-style requests and messages -> call records

All of them speak of an `Example`: a row and what the other stack wants to know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre_traj import Row
from gyre_traj.errors import BadRow
from gyre_traj.selection import Selection
from gyre_traj.tree import Tree
from gyre_traj.weights import Aggregation, Counting, weigh


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A row and where it comes from."""

    row: Row
    group: str = ""
    reward: float | None = None  # of its execution; None: not scored
    call: str = ""  # whose output ends the trajectory
    finish: str = "stop"  # how that call finished: stop | length | abort | error

    @property
    def versions(self) -> tuple[int, ...]:
        """Weights that sampled the row's targets, as far as known, ascending."""
        found = np.unique(self.row.version[self.row.target])
        return tuple(int(version) for version in found if version >= 0)


class Split(NamedTuple):
    """A row as a prompt and a response: r tokens from its first target to its last one, m of them targets.

    What comes after the last target is gone: no loss depends on it.
    """

    prompt: NDArray[np.uint32]  # [p], p >= 1
    response: NDArray[np.uint32]  # [r]
    mask: NDArray[np.bool_]  # [r] targets; the rest was not sampled by the policy, or counts elsewhere
    logprobs: NDArray[np.float32]  # [r] behaviour log-probability at targets, else 0


def examples(
    selection: Selection,
    *,
    advantage: float,
    group: str = "",
    reward: float | None = None,
    tree: Tree | None = None,
    first_trajectory: int = 0,
    counting: Counting | str = Counting.EXECUTION,
    aggregation: Aggregation | str = Aggregation.TWO_LEVEL,
    norm: float = 1.0,
) -> tuple[list[Example], float]:
    """Weigh one execution's selection (see `weigh`): its examples, and the units it adds to the batch's denominator.

    `tree` tells how calls finished. Raises `BadChoice`.
    """
    weighted = weigh(
        selection,
        advantage=advantage,
        first_trajectory=first_trajectory,
        counting=counting,
        aggregation=aggregation,
        norm=norm,
    )
    made = []
    for row in weighted.rows:
        drawn = selection.trajectories[row.trajectory - first_trajectory]
        made.append(
            Example(
                row=row,
                group=group,
                reward=reward,
                call=drawn.call,
                finish=tree.calls[drawn.call].finish if tree is not None else "stop",
            )
        )
    return made, weighted.units


def split(row: Row) -> Split:
    """Cut a row into prompt and response. Raises `BadRow` without a target, or when the first token is one."""
    ids, target = row.ids, row.target
    places = np.flatnonzero(target)
    if not len(places) or places[0] == 0:
        raise BadRow(
            f"row {row.trajectory} of {row.execution!r}: expected a target after the first token, "
            f"got {len(places)} targets{', the first token among them' if len(places) else ''}; leave such rows out"
        )
    first, end = int(places[0]), int(places[-1]) + 1
    mask = target[first:end]
    logprobs = np.where(mask, row.logprobs[first:end], np.float32(0))
    return Split(ids[:first], ids[first:end], mask, logprobs)


def one_temperature(rows: Sequence[Row]) -> float:
    """The temperature that all targets were sampled at; 1 without rows. Raises `BadRow` for several."""
    found = {1.0}
    for i, row in enumerate(rows):
        here = {float(temperature) for temperature in np.unique(row.temperature[row.target])}
        found = here if i == 0 else found | here
    if len(found) > 1:
        raise BadRow(
            f"expected one sampling temperature, got {sorted(found)}; this stack divides all logits by the same: "
            "pass `temperature` to say which it shall be, or export the temperatures apart"
        )
    return found.pop() if found else 1.0


def pad(
    pieces: Sequence[NDArray[Any]], dtype: type[np.generic], *, width: int, left: bool = False, fill: float = 0
) -> NDArray[Any]:
    """Lay arrays of at most `width` elements into one [len(pieces), width]. Raises `BadRow` for a longer one."""
    padded = np.full((len(pieces), width), fill, dtype=dtype)
    for line, piece in zip(padded, pieces, strict=True):
        if len(piece) > width:
            raise BadRow(f"expected at most {width} tokens, got a row of {len(piece)}; raise the width")
        if left:
            line[width - len(piece) :] = piece
        else:
            line[: len(piece)] = piece
    return padded
