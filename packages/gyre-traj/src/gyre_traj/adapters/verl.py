"""verl 0.9: DataProto, and the outputs of its agent loops.

    from gyre_traj.adapters import examples, verl
    made, units = examples(selection, advantage=0.5, group="task-1", reward=1.0)
    batch = verl.to_batch(made, units=units, pad_token_id=0)         # numpy; batch.batch["prompts"] [b, p] …
    data = verl.to_data_proto(batch)                                 # DataProto.from_dict of torch tensors
    # actor_rollout_ref.actor.loss_agg_mode=token-sum: the loss is then Σ w·ℓ / units, however verl cuts the batch

What a batch keeps. `rollout_is_weights` holds w / units at targets, and verl multiplies per-token losses by it, so with
`loss_agg_mode=token-sum` the policy loss equals Gyre's for any aggregation and counting, on any number of ranks and
micro-batches, as long as one mini-batch is the whole batch. Its other modes (`token-mean`, `seq-mean-*`) would divide a
second time: call `to_batch(…, weights=False)` for them; executions with more branches then weigh more. verl's entropy
and KL terms are never weighted. verl's own `rollout_correction.rollout_is` needs the same field: leave it off.

`advantages` and `returns` are Gyre's, for who calls the actor directly. A verl trainer computes its own from
`rm_scores` and `uid`: `scores="reward"` (default) gives it rewards by group, in which an execution of k rows takes part
k times; `scores="advantage"` gives it Gyre's advantages, every row a group of its own, which verl's GRPO hands on
unchanged with `norm_adv_by_std_in_grpo=False`. The trainers of `trainer.use_v1` count an execution once by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre_traj.adapters import Example, Split, one_temperature, pad, split
from gyre_traj.errors import BadChoice, BadRow

_SCORES = ("reward", "advantage")


class Batch(NamedTuple):
    """The parts of a DataProto of b rows, prompts padded left to p tokens, responses right to r."""

    batch: dict[str, NDArray[Any]]
    """int64: prompts [b, p], responses [b, r], input_ids, attention_mask, position_ids [b, p + r], response_mask
    [b, r]; float32 [b, r]: rollout_log_probs, rm_scores, token_level_scores, token_level_rewards (the score at the last
    response token), advantages, returns, and with weights rollout_is_weights."""
    non_tensor_batch: dict[str, NDArray[Any]]
    """object [b]: uid, execution, group, role; int64 [b]: trajectory."""
    meta_info: dict[str, Any]
    """temperature, units, global_token_num (tokens a row)."""


def to_batch(
    examples: Sequence[Example],
    *,
    units: float,
    pad_token_id: int = 0,
    scores: str = "reward",
    weights: bool = True,
    temperature: float | None = None,
    rows: int | None = None,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> Batch:
    """Lay examples out as verl does.

    `units`: the batch's denominator, the sum over its executions. `rows`: add rows without targets up to so many, as a
    number of ranks may ask for. Widths: at least so wide; by default as wide as the longest row. `temperature`: what
    verl shall divide logits by; by default what the targets were sampled at, if that is one number.
    Raises `BadRow`, `BadChoice`.
    """
    if scores not in _SCORES:
        raise BadChoice(f"unknown scores {scores!r}; choose one of {list(_SCORES)}")
    if not units > 0:
        raise BadChoice(f"units must be above 0, got {units!r}; pass the sum of what `examples` returned")
    if temperature is None:
        temperature = one_temperature([example.row for example in examples])
    short = max(0, (rows or 0) - len(examples))
    empty = Split(*(np.full(1, value) for value in (pad_token_id, pad_token_id, False, 0.0)))
    parts = [split(example.row) for example in examples] + [empty] * short
    if not parts:
        raise BadRow("expected at least one example, got none; a batch without rows trains nothing")
    p = prompt_width or max(len(part.prompt) for part in parts)
    r = response_width or max(len(part.response) for part in parts)

    def per_row(values: Iterable[float]) -> NDArray[np.float32]:
        line = np.array([*values, *[0.0] * short], dtype=np.float32)
        return np.asarray(line[:, None] * mask, dtype=np.float32)

    prompts = pad([part.prompt for part in parts], np.int64, width=p, left=True, fill=pad_token_id)
    responses = pad([part.response for part in parts], np.int64, width=r, fill=pad_token_id)
    attention = np.concatenate(
        [
            pad([np.ones(len(part.prompt)) for part in parts], np.int64, width=p, left=True),
            pad([np.ones(len(part.response)) for part in parts], np.int64, width=r),
        ],
        axis=1,
    )
    mask = pad([part.mask for part in parts], np.int64, width=r)
    advantages = per_row(example.row.advantage for example in examples)
    given = np.zeros(mask.shape, dtype=np.float32)
    for i, example in enumerate(examples):
        score = example.row.advantage if scores == "advantage" else example.reward
        if score is None:
            raise BadRow(f"execution {example.row.execution!r} has no reward; pass scores='advantage', or leave it out")
        given[i, len(parts[i].response) - 1] = score
    arrays = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "response_mask": mask,
        "rollout_log_probs": pad([part.logprobs for part in parts], np.float32, width=r),
        "rm_scores": given,
        "token_level_scores": given,
        "token_level_rewards": given,
        "advantages": advantages,
        "returns": advantages,
    }
    if weights:
        arrays["rollout_is_weights"] = per_row(example.row.weight / units for example in examples)
    own = [_uid(example) if scores == "advantage" else example.group for example in examples]
    texts = {
        "uid": own + [f"padding-{i}" for i in range(short)],
        "execution": [example.row.execution for example in examples] + [""] * short,
        "group": [example.group for example in examples] + [""] * short,
        "role": [example.row.role for example in examples] + [""] * short,
    }
    others: dict[str, NDArray[Any]] = {name: np.array(values, dtype=object) for name, values in texts.items()}
    others["trajectory"] = np.array([example.row.trajectory for example in examples] + [-1] * short, dtype=np.int64)
    meta = {"temperature": temperature, "units": units, "global_token_num": attention.sum(axis=1).tolist()}
    return Batch(arrays, others, meta)


def to_data_proto(batch: Batch) -> Any:
    """Make a `verl.DataProto` of torch tensors; needs verl and torch."""
    import torch
    from verl import DataProto  # type: ignore[import-not-found]

    tensors = {name: torch.from_numpy(array) for name, array in batch.batch.items()}
    return DataProto.from_dict(tensors, dict(batch.non_tensor_batch), dict(batch.meta_info))


def save(folder: str | Path, batches: Iterable[Batch], rows: int) -> None:
    """Write batches of equal widths, `rows` rows in all, into an existing folder, one batch in memory at a time.

    An .npy file an array, and batch.json with the rest. Raises `BadRow`, `OSError`.
    """
    at, aliases = 0, dict[str, str]()
    others: dict[str, list[Any]] = {}
    lengths, temperatures, meta = list[int](), set[float](), dict[str, Any]()
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for batch in batches:
            if not files:
                aliases = _aliases(batch.batch)
                for name in batch.batch.keys() - aliases.keys():
                    files[name] = stack.enter_context((Path(folder) / f"{name}.npy").open("wb"))
                    _write_header(files[name], batch.batch[name], rows)
            for name, file in files.items():
                file.write(np.ascontiguousarray(batch.batch[name]).data)
            for name, values in batch.non_tensor_batch.items():
                others.setdefault(name, []).extend(values.tolist())
            lengths += batch.meta_info["global_token_num"]
            temperatures.add(batch.meta_info["temperature"])
            meta = batch.meta_info
            at += len(batch.batch["prompts"])
    if at != rows:
        raise BadRow(f"expected {rows} rows, got {at}; the batch changed while it was written")
    if len(temperatures) > 1:
        raise BadRow(f"expected one sampling temperature, got {sorted(temperatures)}; export them apart")
    rest = {"non_tensor_batch": others, "meta_info": meta | {"global_token_num": lengths}, "aliases": aliases}
    (Path(folder) / "batch.json").write_text(json.dumps(rest))


def load(folder: str | Path) -> Batch:
    """Read what `save` wrote; arrays are mapped, not read. Raises `BadRow`."""
    try:
        rest = json.loads((Path(folder) / "batch.json").read_text())
        arrays = {file.stem: np.load(file, mmap_mode="c") for file in Path(folder).glob("*.npy")}
    except (OSError, ValueError) as error:
        raise BadRow(f"{str(folder)!r} holds no batch: {error}") from error
    arrays |= {name: arrays[same] for name, same in rest["aliases"].items()}
    others = {name: np.array(values, dtype=object) for name, values in rest["non_tensor_batch"].items()}
    others["trajectory"] = others["trajectory"].astype(np.int64)
    return Batch(arrays, others, rest["meta_info"])


def agent_loop_outputs(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Arguments of an `AgentLoopOutput` each, for an agent loop's `run` that returns one execution's rows.

    verl then scores, weighs and cuts by itself: rows weigh by its `loss_agg_mode`, Gyre's weights and advantages travel
    in `extra_fields` alone. Its v1 trainers take the baseline over executions, not over rows. Raises `BadRow`.
    """
    outputs = []
    for example in examples:
        part = split(example.row)
        extra = {"execution": example.row.execution, "trajectory": example.row.trajectory, "role": example.row.role}
        if versions := example.versions:
            extra |= {"min_global_steps": versions[0], "max_global_steps": versions[-1]}
        outputs.append(
            {
                "prompt_ids": part.prompt.tolist(),
                "response_ids": part.response.tolist(),
                "response_mask": part.mask.astype(int).tolist(),
                "response_logprobs": part.logprobs.tolist(),
                "reward_score": example.reward,
                "num_turns": 1 + int(np.count_nonzero(np.diff(part.mask.astype(int)) == 1)),
                "metrics": {},
                "extra_fields": extra | {"weight": example.row.weight, "advantage": example.row.advantage},
            }
        )
    return outputs


def _uid(example: Example) -> str:
    return f"{example.row.execution}/{example.row.trajectory}"


def _aliases(arrays: dict[str, NDArray[Any]]) -> dict[str, str]:
    """Names of arrays that are the same as one named before, and that name."""
    first: dict[int, str] = {}
    named = {name: first.setdefault(id(array), name) for name, array in arrays.items()}
    return {name: same for name, same in named.items() if name != same}


def _write_header(file: BinaryIO, array: NDArray[Any], rows: int) -> None:
    kind = np.lib.format.dtype_to_descr(array.dtype)  # type: ignore[no-untyped-call]
    header = {"descr": kind, "fortran_order": False, "shape": (rows, *array.shape[1:])}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
