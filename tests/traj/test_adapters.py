"""Adapters to other RL stacks: shapes, and the same loss in their arithmetic as in ours.

Expected numbers are written out, or come from the stacks' formulas spelt here; `test_adapters_peers.py` asks the stacks
themselves where they are installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_traj import Row, Tree, pack_rows, select
from gyre_traj.adapters import Example, datasets, examples, one_temperature, slime, split, trl, verl
from gyre_traj.errors import BadChoice, BadRow
from gyre_traj.torch import LossConfig, loss_sum

Batch = tuple[list[Example], float]


@pytest.fixture
def branchy(story, new_story) -> Batch:
    """Execution e of 3 trajectories and 9 targets, execution f of one with 4; scored 1.0 and 0.0; units 2."""
    story.call("a", "sys task", "one two three", logprobs=[-0.1, -0.2, -0.3])
    story.call("b", "result", "done now", parent="a", logprobs=[-0.4, -0.5], version=1)
    story.call("c", "failure", "else", parent="a", logprobs=[-0.6], version=2)
    story.call("g", "agent job", "x y z", role="sub-agent", logprobs=[-0.7, -0.8, -0.9])
    other = new_story("f")
    other.call("p", "sys task", "p q r s", logprobs=[-1.0, -1.1, -1.2, -1.3])
    made, units = [], 0.0
    for tree, advantage, reward in ((story.tree(), 0.5, 1.0), (other.tree(), -0.5, 0.0)):
        selection = select(tree, None, seed=0)
        part, share = examples(
            selection, advantage=advantage, group="t", reward=reward, tree=tree, first_trajectory=len(made)
        )
        made += part
        units += share
    return made, units


def gyre_loss(made: list[Example], units: float, shift: float = 0.3) -> float:
    """Ours, when the trainer's log-probability of id i is behaviour + shift·sin(i)."""
    (packed,) = pack_rows([example.row for example in made], budget=4096)
    arrays = packed.arrays()
    logprobs = torch.tensor(arrays.logprob + shift * np.sin(arrays.target), dtype=torch.float64)
    return loss_sum(LossConfig(dual_clip=3.0), packed, logprobs).loss.item() / units


def clipped(ids: np.ndarray, advantage: np.ndarray, shift: float = 0.3) -> np.ndarray:
    """PPO-clip of each token with the ratio exp(shift·sin(i)), as TRL and verl write it."""
    ratio = np.exp(shift * np.sin(ids))
    return -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)


def test_examples_say_where_rows_come_from(branchy: Batch) -> None:
    made, units = branchy
    assert units == 2
    assert [(e.row.execution, e.row.trajectory, e.row.role, e.group, e.reward) for e in made] == [
        ("e", 0, "main", "t", 1.0),
        ("e", 1, "main", "t", 1.0),
        ("e", 2, "sub-agent", "t", 1.0),
        ("f", 3, "main", "t", 0.0),
    ]
    by_call = {e.call: e for e in made}
    assert set(by_call) == {"b", "c", "g", "p"}
    assert {e.finish for e in made} == {"stop"}
    assert {v for e in made if e.call in "bc" for v in e.versions} == {0, 1, 2}


def test_split_cuts_at_the_first_and_after_the_last_target() -> None:
    row = Row("e", 0, np.arange(1, 8, dtype=np.uint32), flags("..x.xx."), np.full(7, -0.5, np.float32), 1.0, 1.0)
    part = split(row)
    assert part.prompt.tolist() == [1, 2]
    assert part.response.tolist() == [3, 4, 5, 6]
    assert part.mask.tolist() == [True, False, True, True]
    assert part.logprobs.tolist() == [-0.5, 0, -0.5, -0.5]
    for bad in ("...", "x.."):
        with pytest.raises(BadRow, match="expected a target after the first token"):
            split(Row("e", 0, np.arange(3, dtype=np.uint32), flags(bad), np.zeros(3, np.float32), 1.0, 1.0))


def flags(text: str) -> np.ndarray:
    return np.array([sign == "x" for sign in text])


def test_several_temperatures_are_not_one() -> None:
    def row(temperature: float | None) -> Row:
        values = None if temperature is None else np.full(3, temperature, np.float32)
        return Row("e", 0, np.arange(3, dtype=np.uint32), flags(".xx"), np.zeros(3, np.float32), 1.0, 1.0, values)

    assert one_temperature([row(0.5), row(0.5)]) == 0.5
    assert one_temperature([row(None), row(1.0)]) == one_temperature([]) == 1.0
    with pytest.raises(BadRow, match=r"got \[0.5, 1.0\]"):
        one_temperature([row(0.5), row(None)])


# verl


def test_verl_layout(branchy: Batch) -> None:
    made, units = branchy
    batch, others, meta = verl.to_batch(made, units=units, pad_token_id=99, rows=6)
    assert {name: array.shape for name, array in batch.items()} == {
        **dict.fromkeys(("prompts",), (6, batch["prompts"].shape[1])),
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), batch["input_ids"].shape),
        **dict.fromkeys(
            (
                *("responses", "response_mask", "rollout_log_probs", "rm_scores", "token_level_scores"),
                *("token_level_rewards", "advantages", "returns", "rollout_is_weights"),
            ),
            batch["responses"].shape,
        ),
    }
    ints = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
    assert {name for name, array in batch.items() if array.dtype == np.int64} == set(ints)
    assert {array.dtype for name, array in batch.items() if name not in ints} == {np.dtype(np.float32)}
    width = batch["prompts"].shape[1]
    for i, example in enumerate(made):
        part = split(example.row)
        real = batch["attention_mask"][i].astype(bool)
        assert batch["input_ids"][i][real].tolist() == [*part.prompt, *part.response]
        assert batch["position_ids"][i][real].tolist() == list(range(real.sum()))
        assert (batch["input_ids"][i][~real] == 99).all()
        assert real[width - 1]
        assert real[width]
        assert batch["rm_scores"][i].sum() == example.reward
        assert batch["rm_scores"][i][len(part.response) - 1] == example.reward
    assert batch["response_mask"].sum() == 13
    assert not batch["response_mask"][4:].any()
    assert batch["attention_mask"][4:].sum(axis=1).tolist() == [2, 2]
    assert others["uid"].tolist() == ["t"] * 4 + ["padding-0", "padding-1"]
    assert others["execution"].tolist() == ["e", "e", "e", "f", "", ""]
    assert (meta["temperature"], meta["units"], len(meta["global_token_num"])) == (1.0, 2.0, 6)


@pytest.mark.parametrize("aggregation", ["two-level", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("counting", ["per_execution", "per_trajectory"])
def test_verl_token_sum_is_our_loss(branchy: Batch, story, aggregation: str, counting: str) -> None:
    tree = story.tree()
    made, units = examples(
        select(tree, None, seed=0), advantage=0.5, reward=1.0, aggregation=aggregation, counting=counting
    )
    batch = verl.to_batch(made, units=units, rows=5).batch
    losses = clipped(batch["responses"], batch["advantages"]) * batch["rollout_is_weights"]
    assert (losses * batch["response_mask"]).sum() == pytest.approx(gyre_loss(made, units), abs=1e-6)


def test_verl_scores_of_either_kind(branchy: Batch) -> None:
    made, units = branchy
    given = verl.to_batch(made, units=units, scores="advantage", weights=False)
    assert "rollout_is_weights" not in given.batch
    assert given.batch["token_level_rewards"].sum(axis=1).tolist() == [0.5, 0.5, 0.5, -0.5]
    assert len(set(given.non_tensor_batch["uid"])) == 4
    with pytest.raises(BadChoice, match="unknown scores"):
        verl.to_batch(made, units=units, scores="rewards")
    with pytest.raises(BadChoice, match="units"):
        verl.to_batch(made, units=0)
    with pytest.raises(BadRow, match="at least one example"):
        verl.to_batch([], units=1)
    with pytest.raises(BadRow, match="raise the width"):
        verl.to_batch(made, units=units, response_width=2)
    with pytest.raises(BadRow, match="has no reward"):
        verl.to_batch([Example(made[0].row)], units=units)


def test_verl_agent_loop_outputs(branchy: Batch) -> None:
    outputs = {o["extra_fields"]["trajectory"]: o for o in verl.agent_loop_outputs(branchy[0])}
    last = outputs[3]
    assert last["response_mask"] == [1, 1, 1, 1]
    assert last["response_logprobs"] == pytest.approx([-1.0, -1.1, -1.2, -1.3])
    assert (last["reward_score"], last["num_turns"]) == (0.0, 1)
    assert max(o["num_turns"] for o in outputs.values()) == 2
    assert all(
        len(o["response_ids"]) == len(o["response_mask"]) == len(o["response_logprobs"]) for o in outputs.values()
    )
    json.dumps(list(outputs.values()))


# TRL


def trl_loss(batch: dict[str, np.ndarray], loss_type: str, length: int) -> float:
    """TRL's last lines, for one micro-batch that is the batch."""
    mask = batch["completion_mask"] * batch["tool_mask"]
    losses = clipped(batch["completion_ids"], batch["advantages"][:, None])
    if loss_type in ("grpo", "sapo"):
        return float(((losses * mask).sum(-1) / mask.sum(-1).clip(min=1)).mean())
    if loss_type == "dr_grpo":
        return float((losses * mask).sum() / (len(losses) * length))
    if loss_type == "luspo":
        return float((losses * mask).sum(-1).mean())
    return float((losses * mask).sum() / batch["num_items_in_batch"])


@pytest.mark.parametrize("loss_type", trl.LOSS_TYPES)
@pytest.mark.parametrize("rows", [None, 6])
def test_trl_sums_to_our_loss(branchy: Batch, loss_type: str, rows: int | None) -> None:
    made, units = branchy
    records = [trl.to_record(example) for example in made]
    batch = trl.to_batch(records, units=units, loss_type=loss_type, rows=rows, max_completion_length=32)
    assert trl_loss(batch, loss_type, 32) == pytest.approx(gyre_loss(made, units), abs=1e-6)
    assert batch["num_items_in_batch"] == 13
    assert len(batch["prompt_ids"]) == (rows or 4)
    assert batch["sampling_per_token_logps"].dtype == batch["advantages"].dtype == np.float32


def test_trl_records_are_json_and_pad_as_trl_does(branchy: Batch) -> None:
    made, units = branchy
    records = [json.loads(json.dumps(trl.to_record(example))) for example in made]
    batch = trl.to_batch(records, units=units, pad_token_id=99)
    assert (batch["prompt_ids"][:, -1] != 99).all()
    assert (batch["completion_ids"][:, 0] != 99).all()
    assert ((batch["prompt_ids"] == 99) == (batch["prompt_mask"] == 0)).all()
    assert ((batch["completion_ids"] == 99) == (batch["completion_mask"] == 0)).all()
    tensors = trl.to_tensors(batch)
    assert tensors["prompt_ids"].dtype == torch.int64
    assert tensors["num_items_in_batch"].shape == ()


def test_trl_refuses_what_it_cannot_keep(branchy: Batch) -> None:
    records = [trl.to_record(example) for example in branchy[0]]
    for arguments, message in (
        ({"loss_type": "bnpo"}, "cannot be kept under loss_type 'bnpo'"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"units": 0}, "units"),
    ):
        with pytest.raises(BadChoice, match=message):
            trl.to_batch(records, **({"units": 2.0} | arguments))
    with pytest.raises(BadRow, match="at least one record"):
        trl.to_batch([], units=1)


def test_trl_rollout_answers_every_prompt(branchy: Batch) -> None:
    records = [trl.to_record(example) for example in branchy[0]]
    answer = trl.to_rollout(records[3:], ["unscored", "f"], pad_token_id=7)
    assert answer["execution"] == ["unscored", "f"]
    assert answer["score"] == [None, 0.0]
    assert answer["completion_ids"][0] == [7]
    assert answer["env_mask"] == [[0], [1, 1, 1, 1]]
    assert len(answer["logprobs"][1]) == 4
    with pytest.raises(BadChoice, match="j_max=1"):
        trl.to_rollout(records, ["e", "f"], pad_token_id=7)
    with pytest.raises(BadChoice, match="belong to none"):
        trl.to_rollout(records[3:], ["e"], pad_token_id=7)


# slime


def test_slime_samples(branchy: Batch) -> None:
    samples = list(slime.to_samples(branchy[0], first_index=10))
    assert [s["index"] for s in samples] == [10, 11, 12, 13]
    assert [s["rollout_id"] for s in samples] == [0, 0, 0, 1]
    assert [s["group_index"] for s in samples] == [0, 0, 0, 0]
    assert [s["reward"] for s in samples] == [0.5, 0.5, 0.5, -0.5]
    assert [s["metadata"]["raw_reward"] for s in samples] == [1.0, 1.0, 1.0, 0.0]
    for sample in samples:
        assert sample["response_length"] == len(sample["loss_mask"]) == len(sample["rollout_log_probs"])
        assert len(sample["tokens"]) > sample["response_length"]
    assert {v for s in samples for v in s["weight_versions"]} == {"0", "1", "2"}
    assert [s["reward"] for s in slime.to_samples(branchy[0], reward="reward")] == [1.0, 1.0, 1.0, 0.0]


def test_slime_takes_our_two_level_mean(branchy: Batch) -> None:
    """slime: Σ over samples of (ℓ·mask).sum / mask sum of the whole rollout, over the step's rollouts."""
    made, units = branchy
    samples = list(slime.to_samples(made))
    denominators: dict[int, int] = {}
    for sample in samples:
        denominators[sample["rollout_id"]] = denominators.get(sample["rollout_id"], 0) + sum(sample["loss_mask"])
    total = 0.0
    for sample in samples:
        ids = np.array(sample["tokens"][-sample["response_length"] :])
        losses = clipped(ids, np.array(sample["reward"])) * sample["loss_mask"]
        total += losses.sum() / denominators[sample["rollout_id"]]
    assert total / len(denominators) == pytest.approx(gyre_loss(made, units), abs=1e-6)


def test_slime_refuses_other_weights(branchy: Batch, story) -> None:
    other, _ = examples(select(story.tree(), None, seed=0), advantage=0.5, aggregation="token-mean")
    with pytest.raises(BadChoice, match="two-level"):
        list(slime.to_samples(other))
    made = branchy[0]
    with pytest.raises(BadChoice, match="two places"):
        list(slime.to_samples([*made, made[0]]))
    with pytest.raises(BadChoice, match="unknown reward"):
        list(slime.to_samples(made, reward="score"))


def test_slime_says_what_was_cut_short(story) -> None:
    import msgspec

    tree = Tree("e")
    tree.add(msgspec.structs.replace(story.call("a", "sys task", "one"), finish="length"))
    made, _ = examples(select(tree, None, seed=0), advantage=1.0, tree=tree)
    assert [s["status"] for s in slime.to_samples(made)] == ["truncated"]


# Parquet


def same(a: Example, b: Example) -> None:
    assert (a.group, a.reward, a.call, a.finish, a.versions) == (b.group, b.reward, b.call, b.finish, b.versions)
    x, y = a.row, b.row
    assert (x.execution, x.trajectory, x.role) == (y.execution, y.trajectory, y.role)
    assert (x.weight, x.advantage) == (y.weight, y.advantage)
    np.testing.assert_array_equal(x.ids, y.ids)
    np.testing.assert_array_equal(x.target, y.target)
    for name in ("logprobs", "temperature", "version"):  # read at targets alone
        assert getattr(x, name).dtype == getattr(y, name).dtype
        np.testing.assert_array_equal(getattr(x, name)[x.target], getattr(y, name)[y.target])


def test_parquet_keeps_rows_exactly(
    branchy: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Callable
) -> None:
    made, units = branchy
    hot = Row(
        "h", 9, np.array([1, 2, 2**32 - 1], np.uint32), flags(".xx"), np.array([0, -0.1, -30.5], np.float32),
        1 / 3, -0.123456789, np.array([1, 0.7, 0.7], np.float32),
    )  # fmt: skip
    given = [*made, Example(hot)]
    monkeypatch.setattr(datasets, "_TOKENS", 8)  # so that there are several row groups
    path = tmp_path / "rows.parquet"
    assert datasets.write_parquet(path, iter(given), units=units, note={"aggregation": "two-level"}) == 5
    back = list(datasets.read_parquet(path))
    assert len(back) == 5
    for a, b in zip(given, back, strict=True):
        same(a, b)
    assert datasets.read_note(path) == {"format": 1, "units": 2.0, "aggregation": "two-level"}
    assert gyre_loss(back[:4], units) == gyre_loss(made, units)


def test_parquet_opens_in_hugging_face_datasets(branchy: Batch, tmp_path: Path) -> None:
    hugging_face = pytest.importorskip("datasets")
    path = tmp_path / "rows.parquet"
    datasets.write_parquet(path, branchy[0], units=2.0)
    loaded = hugging_face.load_dataset(
        "parquet", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    )
    lines = list(loaded)
    assert [line["ids"] for line in lines] == [example.row.ids.tolist() for example in branchy[0]]
    assert [line["target"] for line in lines] == [example.row.target.tolist() for example in branchy[0]]


def test_parquet_of_someone_else(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(BadRow, match="no columns"):
        list(datasets.read_parquet(path))
    with pytest.raises(BadRow, match="not written by"):
        datasets.read_note(path)
    path.write_bytes(b"text")
    with pytest.raises(BadRow, match="cannot be read"):
        list(datasets.read_parquet(path))


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    assert datasets.write_parquet(tmp_path / "none.parquet", [], units=0.0) == 0
    assert list(datasets.read_parquet(tmp_path / "none.parquet")) == []
