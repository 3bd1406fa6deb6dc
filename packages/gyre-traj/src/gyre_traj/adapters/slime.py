"""slime's Sample, as plain dicts that `Sample.from_dict` reads.

    from gyre_traj.adapters import examples, slime
    made, _ = examples(selection, advantage=0.5, group="task-1", reward=1.0)
    dicts = list(slime.to_samples(made))                       # or stream them, execution by execution
    samples = [Sample.from_dict(d) for d in dicts]             # from slime.utils.types import Sample
    # run slime with --disable-rewards-normalization: `reward` is the advantage already

All rows of an execution carry one `rollout_id`, over which slime takes the mean of a step's loss, and a step is
`global_batch_size` rollouts: Gyre's two-level mean exactly, in whatever micro-batches. It is the only aggregation that
samples can say, so rows weighed otherwise are refused. (slime's `--calculate-per-token-loss` is Gyre's token-mean: the
samples are the same, so weigh two-level and let slime divide.)

Lost: an execution without rows (a placeholder) is no rollout there, so it is not in the denominator. slime's own
normalisation of rewards reshapes rows into groups of equal size, which branches break; hence the advantage as reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from gyre_traj.adapters import Example, split
from gyre_traj.errors import BadChoice

_REWARDS = ("advantage", "reward")


def to_samples(
    examples: Iterable[Example], *, reward: str = "advantage", first_index: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a dict a row. The rows of an execution come one after another; executions and groups are numbered as met.

    `reward`: what slime's `reward` is, the advantage or the execution's reward. Raises `BadChoice`, `BadRow`.
    """
    if reward not in _REWARDS:
        raise BadChoice(f"unknown reward {reward!r}; choose one of {list(_REWARDS)}")
    groups: dict[str, int] = {}
    rollouts: dict[str, int] = {}
    index = first_index
    for execution, members in groupby(examples, key=lambda example: example.row.execution):
        rows = list(members)
        if execution in rollouts:
            raise BadChoice(f"rows of {execution!r} come in two places; sort examples by execution")
        weight = sum(example.row.weight * int(np.count_nonzero(example.row.target)) for example in rows)
        if abs(weight - 1) > 1e-6 or len({example.row.weight for example in rows}) > 1:
            raise BadChoice(
                f"target weights of {execution!r} sum to {weight:.6g}; slime takes the mean over an execution's "
                "targets, so weigh with aggregation 'two-level'"
            )
        rollout = rollouts.setdefault(execution, len(rollouts))
        for example in rows:
            group = groups.setdefault(example.group, len(groups))
            yield _sample(example, index, group, rollout, reward)
            index += 1


def _sample(example: Example, index: int, group: int, rollout: int, reward: str) -> dict[str, Any]:
    part = split(example.row)
    value = example.row.advantage if reward == "advantage" else example.reward
    if value is None:
        raise BadChoice(f"execution {example.row.execution!r} has no reward; pass reward='advantage', or leave it out")
    metadata: dict[str, Any] = {
        "execution": example.row.execution,
        "group": example.group,
        "trajectory": example.row.trajectory,
        "role": example.row.role,
    }
    if example.reward is not None:
        metadata["raw_reward"] = example.reward  # what slime logs as such
    return {
        "group_index": group,
        "index": index,
        "rollout_id": rollout,
        "prompt": "",
        "tokens": np.concatenate([part.prompt, part.response]).tolist(),
        "response": "",
        "response_length": len(part.response),
        "reward": value,
        "loss_mask": part.mask.astype(int).tolist(),
        "rollout_log_probs": part.logprobs.tolist(),
        "weight_versions": [str(version) for version in example.versions],
        "status": "truncated" if example.finish == "length" else "completed",
        "metadata": metadata,
    }
