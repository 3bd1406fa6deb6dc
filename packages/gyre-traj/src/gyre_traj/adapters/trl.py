"""TRL 1.16's GRPOTrainer.

    from gyre_traj.adapters import examples, trl
    records = [trl.to_record(e) for e in examples(selection, advantage=0.5, reward=1.0)[0]]

1. `rollout_func`, one trajectory an execution (J_max 1). TRL wants an answer for each prompt it passes, in order, and
   computes rewards and baselines itself:

    def rollout(prompts, trainer):
        ...                                              # run an execution for each prompt
        return trl.to_rollout(records, executions, pad_token_id=0)
    def score(completions, score, **_): return score     # the reward function; None is "not scorable" to TRL
    trainer = GRPOTrainer(model, reward_funcs=score, rollout_func=rollout, …)

   With `loss_type="grpo"` a row's mean, then the mean of rows, is Gyre's two-level mean. Lost: an execution that was
   not scored has advantage 0, but stays in TRL's denominator.

2. Whole batches, with branches: a subclass hands TRL its batch ready made.

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = trl.to_batch(records, units=units, loss_type=self.loss_type, pad_token_id=0)
            return trl.to_tensors(batch, self.accelerator.device)

   TRL knows no weights, so they are folded into advantages: every loss type named in `LOSS_TYPES` is proportional to
   the advantage, hence the sum TRL forms is Σ w·ℓ / units exactly. The KL term (`beta`) and the entropy bonus are not,
   and stay means over rows or tokens. `bnpo` divides by the targets of whatever micro-batch a row falls into, and is
   refused. TRL slices a batch into micro-batches of equal size: pass `rows`, a multiple of them, and rows without
   targets are added. One batch must be one optimizer step (`steps_per_generation == gradient_accumulation_steps`).

TRL divides logits by its own `temperature`: set it to the one that was sampled at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_traj.adapters import Example, pad, split
from gyre_traj.errors import BadChoice, BadRow

LOSS_TYPES = ("grpo", "sapo", "dapo", "cispo", "vespo", "dr_grpo", "luspo")


def to_record(example: Example) -> dict[str, Any]:
    """A row as plain lists, under the names of a `rollout_func`'s answer, fit for JSON.

    prompt_ids [p], completion_ids [c], logprobs [c] (0 where env_mask is 0), env_mask [c] (1: a target); and
    advantage, weight (w of each target), score, execution, group, trajectory, role. Raises `BadRow`.
    """
    part = split(example.row)
    return {
        "prompt_ids": part.prompt.tolist(),
        "completion_ids": part.response.tolist(),
        "logprobs": part.logprobs.tolist(),
        "env_mask": part.mask.astype(int).tolist(),
        "advantage": example.row.advantage,
        "weight": example.row.weight,
        "score": example.reward,
        "execution": example.row.execution,
        "group": example.group,
        "trajectory": example.row.trajectory,
        "role": example.row.role,
    }


def to_rollout(
    records: Iterable[Mapping[str, Any]], executions: Sequence[str], *, pad_token_id: int
) -> dict[str, list[Any]]:
    """What a `rollout_func` returns for `executions`, the ones run for its prompts, in their order.

    An execution without a record gets a completion of one masked token and the score None. Raises `BadChoice` when one
    has several records, or when a record is of none of them.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for record in records:
        name = record["execution"]
        if name in found:
            raise BadChoice(
                f"execution {name!r} has several rows, and rollout_func answers a prompt with one; "
                "select with j_max=1, or give TRL whole batches (`to_batch`)"
            )
        found[name] = record
    if unknown := set(found) - set(executions):
        raise BadChoice(f"rows of {sorted(unknown)!r} belong to none of the prompts; pass every execution in order")
    empty = {"prompt_ids": [pad_token_id], "completion_ids": [pad_token_id], "logprobs": [0.0], "env_mask": [0]}
    lines = [found.get(name, empty | {"execution": name, "score": None}) for name in executions]
    return {name: [line[name] for line in lines] for name in (*empty, "execution", "score")}


def to_batch(
    records: Sequence[Mapping[str, Any]],
    *,
    units: float,
    loss_type: str = "grpo",
    pad_token_id: int = 0,
    max_completion_length: int | None = None,
    rows: int | None = None,
) -> dict[str, NDArray[Any]]:
    """The batch `_generate_and_score_completions` returns, in numpy: b rows, prompts padded left, completions right.

    int64: prompt_ids, prompt_mask [b, p], completion_ids, completion_mask, tool_mask [b, c], num_items_in_batch [].
    float32: advantages [b], weights folded in; old_per_token_logps and sampling_per_token_logps [b, c], both the
    behaviour policy's. `units`: the batch's denominator; `rows`: add rows without targets up to so many;
    `max_completion_length`: the trainer's, read by dr_grpo. Raises `BadChoice`, `BadRow`.
    """
    if loss_type not in LOSS_TYPES:
        raise BadChoice(f"weights cannot be kept under loss_type {loss_type!r}; choose one of {list(LOSS_TYPES)}")
    if not units > 0:
        raise BadChoice(f"units must be above 0, got {units!r}; pass the sum of what `examples` returned")
    if not records:
        raise BadRow("expected at least one record, got none; a batch without rows trains nothing")
    short = max(0, (rows or 0) - len(records))
    filler = {"prompt_ids": [pad_token_id], "completion_ids": [pad_token_id], "logprobs": [0.0], "env_mask": [0]}
    lines = [*records, *[filler] * short]
    columns = {name: [np.asarray(line[name]) for line in lines] for name in filler}
    p = max(len(ids) for ids in columns["prompt_ids"])
    c = max(len(ids) for ids in columns["completion_ids"])
    ones = {name: [np.ones(len(ids)) for ids in columns[name]] for name in ("prompt_ids", "completion_ids")}

    targets = np.array([mask.sum() for mask in columns["env_mask"]], dtype=np.int64)
    weight = np.array([line.get("weight", 0.0) for line in lines], dtype=np.float64)
    advantage = np.array([line.get("advantage", 0.0) for line in lines], dtype=np.float64)
    factor = _undo(loss_type, targets, max_completion_length) / units
    logprobs = pad(columns["logprobs"], np.float32, width=c)
    return {
        "prompt_ids": pad(columns["prompt_ids"], np.int64, width=p, left=True, fill=pad_token_id),
        "prompt_mask": pad(ones["prompt_ids"], np.int64, width=p, left=True),
        "completion_ids": pad(columns["completion_ids"], np.int64, width=c, fill=pad_token_id),
        "completion_mask": pad(ones["completion_ids"], np.int64, width=c),
        "tool_mask": pad(columns["env_mask"], np.int64, width=c),
        "advantages": (advantage * weight * factor).astype(np.float32),
        "old_per_token_logps": logprobs,
        "sampling_per_token_logps": logprobs,
        "num_items_in_batch": np.array(targets.sum(), dtype=np.int64),
    }


def to_tensors(batch: Mapping[str, NDArray[Any]], device: Any = "cpu") -> dict[str, Any]:
    """The batch as torch tensors; needs torch."""
    import torch

    return {name: torch.tensor(array, device=device) for name, array in batch.items()}


def _undo(loss_type: str, targets: NDArray[np.int64], length: int | None) -> NDArray[np.float64]:
    """What TRL divides the sum over a row's targets by [b]."""
    rows: NDArray[np.float64] = np.full(len(targets), len(targets), dtype=np.float64)
    if loss_type in ("grpo", "sapo"):  # mean over the row, then over rows
        return np.asarray(rows * np.maximum(targets, 1))
    if loss_type == "luspo":  # sum over the row, mean over rows
        return rows
    if loss_type == "dr_grpo":
        if length is None:
            raise BadChoice("dr_grpo divides by the trainer's max_completion_length; pass it")
        return np.asarray(rows * length)
    return np.full(len(targets), max(1, int(targets.sum())), dtype=np.float64)  # dapo, cispo, vespo
