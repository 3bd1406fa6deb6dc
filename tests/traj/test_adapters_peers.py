"""The stacks themselves take what the adapters give, and compute our loss from it. Each is asked where it is installed.

verl 0.9.1   DataProto.from_dict, the actor's policy loss, GRPO's advantages
TRL 1.16.0   GRPOTrainer trains on a rollout_func's answer, and on a whole batch with weights
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_traj import Row, pack_rows
from gyre_traj.adapters import Example, slime, trl, verl

torch = pytest.importorskip("torch")
VOCABULARY = 32
PPO = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.fixture
def batch() -> tuple[list[Example], float]:
    """Two executions; the first of three rows, the second of one; weights by the two-level mean."""
    rng = np.random.default_rng(5)
    made = []
    shapes = [("e", 9, 4, 9), ("e", 7, 2, 9), ("e", 11, 3, 9), ("f", 8, 5, 5)]
    for trajectory, (execution, length, targets, of) in enumerate(shapes):
        target = np.zeros(length, bool)
        target[rng.choice(np.arange(2, length), targets, replace=False)] = True
        logprobs = np.where(target, -rng.random(length) * 3, 0).astype(np.float32)
        ids = rng.integers(3, VOCABULARY, length).astype(np.uint32)
        score = float(execution == "e")
        row = Row(execution, trajectory, ids, target, logprobs, weight=1 / of, advantage=score - 0.5)
        made.append(Example(row, group="task", reward=score))
    return made, 2.0


def our_loss(made: list[Example], units: float, logprobs: Any, **config: float) -> float:
    """`logprobs`: per row, the trainer's log-probability of each token."""
    from gyre_traj.torch import LossConfig, loss_sum

    total = 0.0
    for example, row_logprobs in zip(made, logprobs, strict=True):
        (packed,) = pack_rows([example.row], budget=1024)
        chosen = torch.as_tensor(np.array(row_logprobs)[example.row.target], dtype=torch.float64)
        total += loss_sum(LossConfig(**config), packed, chosen).loss.item()
    return total / units


@pytest.mark.parametrize("rows", [4, 8])
def test_verl_computes_our_loss(batch: tuple[list[Example], float], rows: int) -> None:
    pytest.importorskip("verl", reason="verl is not installed")
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    made, units = batch
    data = verl.to_data_proto(verl.to_batch(made, units=units, rows=rows))
    assert len(data) == rows
    assert len(data.chunk(2)) == 2
    width = data.batch["prompts"].shape[1]
    rng = np.random.default_rng(1)
    noise = [rng.normal(0, 0.4, len(example.row.ids)) for example in made]
    new = data.batch["rollout_log_probs"].double().clone()
    for i, example in enumerate(made):
        start = int(np.flatnonzero(example.row.target)[0])
        real = int(data.batch["attention_mask"][i, width:].sum())
        new[i, :real] += torch.as_tensor(noise[i][start : start + real])
    config = ActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28,
        clip_ratio_c=3.0, loss_agg_mode="token-sum", rollout_n=1,
    )  # fmt: skip
    config.global_batch_info["dp_size"] = 1

    def loss(part: Any, log_prob: Any) -> float:
        value, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=part.batch["rollout_log_probs"],
            log_prob=log_prob,
            advantages=part.batch["advantages"],
            response_mask=part.batch["response_mask"],
            loss_agg_mode="token-sum",
            config=config,
            rollout_is_weights=part.batch["rollout_is_weights"],
        )
        return float(value)

    expected = our_loss(
        made, units, [e.row.logprobs + n for e, n in zip(made, noise, strict=True)], dual_clip=3.0, **PPO
    )
    assert loss(data, new) == pytest.approx(expected, abs=1e-6)
    halves = zip(data.chunk(2), new.chunk(2), strict=True)
    assert sum(loss(part, log_prob) for part, log_prob in halves) == pytest.approx(expected, abs=1e-6)


def test_verl_actor_takes_a_batch_without_padding(batch: tuple[list[Example], float]) -> None:
    """As in verl's trainers: DataProto, TensorDict, padding removed, the actor's loss of flat log-probabilities."""
    losses = pytest.importorskip("verl.workers.utils.losses", reason="verl, or what its actor needs, is not installed")
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig
    from verl.workers.utils.padding import left_right_2_no_padding

    made, units = batch
    data = verl.to_data_proto(verl.to_batch(made, units=units, rows=6))
    lengths = data.batch["attention_mask"].sum(dim=1).tolist()
    rng = np.random.default_rng(1)
    new = [example.row.logprobs + rng.normal(0, 0.4, len(example.row.ids)) for example in made]
    flat = [np.append(new[i][1:n], 0.0) if i < len(made) else np.zeros(n) for i, n in enumerate(lengths)]
    given = left_right_2_no_padding(data.to_tensordict())
    given["old_log_probs"] = given["rollout_log_probs"]
    tensordict_utils.assign_non_tensor(given, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    config = ActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28,
        clip_ratio_c=3.0, loss_agg_mode="token-sum", rollout_n=1,
    )  # fmt: skip
    chosen = torch.nested.as_nested_tensor([torch.tensor(line) for line in flat], layout=torch.jagged)
    loss, _ = losses.ppo_loss(config, {"log_probs": chosen}, given)
    assert float(loss) == pytest.approx(our_loss(made, units, new, dual_clip=3.0, **PPO), abs=1e-6)


def test_verl_agent_loops_take_our_outputs(batch: tuple[list[Example], float]) -> None:
    loops = pytest.importorskip(
        "verl.experimental.agent_loop.agent_loop", reason="verl, or what its agent loops need, is not installed"
    )
    outputs = [loops.AgentLoopOutput(**given) for given in verl.agent_loop_outputs(batch[0])]
    assert [int(output.as_dict()["response_mask"].sum()) for output in outputs] == [4, 2, 3, 5]


def test_verl_hands_our_advantages_on(batch: tuple[list[Example], float]) -> None:
    pytest.importorskip("verl", reason="verl is not installed")
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    made, units = batch
    given = verl.to_data_proto(verl.to_batch(made, units=units, scores="advantage"))
    advantages, _ = compute_grpo_outcome_advantage(
        given.batch["token_level_rewards"],
        given.batch["response_mask"],
        index=given.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=False,
    )
    torch.testing.assert_close(advantages, given.batch["advantages"])


@pytest.fixture
def trainer_parts(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("trl", reason="TRL is not installed")
    import datasets as hugging_face
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig

    torch.manual_seed(0)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w1", eos_token="w2"
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, pad_token_id=1, eos_token_id=2, bos_token_id=None,
        )
    )  # fmt: skip
    arguments: dict[str, Any] = dict(  # noqa: C408
        output_dir=str(tmp_path), per_device_train_batch_size=2, num_generations=2, gradient_accumulation_steps=2,
        max_steps=1, learning_rate=0.0, epsilon_high=0.28, report_to=[], use_cpu=True, logging_steps=1, beta=0.0,
        save_strategy="no", disable_dropout=True, temperature=1.0, max_completion_length=16, bf16=False,
    )  # fmt: skip
    return {
        "model": model,
        "tokenizer": tokenizer,
        "data": hugging_face.Dataset.from_dict({"prompt": ["w3", "w4"]}),
        "args": lambda **more: GRPOConfig(**(arguments | more)),
    }


def model_logprobs(model: Any, made: list[Example]) -> list[np.ndarray]:
    """Log-probability of each token of each row, 0 for the first."""
    found = []
    for example in made:
        ids = torch.as_tensor(example.row.ids.astype("int64"))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        found.append(np.concatenate([[0], logits.gather(1, ids[0, 1:, None])[:, 0].numpy()]))
    return found


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_trl_trains_on_a_whole_batch(
    batch: tuple[list[Example], float], trainer_parts: dict[str, Any], loss_type: str
) -> None:
    from trl import GRPOTrainer

    made, units = batch
    records = [trl.to_record(example) for example in made]
    losses: list[float] = []

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            given = trl.to_batch(
                records, units=units, loss_type=self.loss_type, pad_token_id=1, max_completion_length=16
            )
            return trl.to_tensors(given, self.accelerator.device)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    trainer = Trainer(
        trainer_parts["model"],
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trainer_parts["args"](
            loss_type=loss_type, shuffle_dataset=False, epsilon_high=1.28 if loss_type == "cispo" else 0.28
        ),
        train_dataset=trainer_parts["data"],
        processing_class=trainer_parts["tokenizer"],
    )
    expected = our_loss(
        made, units, model_logprobs(trainer.model.eval(), made),
        kind="cispo" if loss_type == "cispo" else "ppo",
        **(PPO if loss_type != "cispo" else {"clip_low": 1.0, "clip_high": 0.28}),
    )  # fmt: skip
    trainer.train()
    assert len(losses) == 2  # two micro-batches of one step
    assert sum(losses) == pytest.approx(expected, abs=1e-5)


def test_trl_trains_on_a_rollout(batch: tuple[list[Example], float], trainer_parts: dict[str, Any]) -> None:
    """One row an execution: TRL's own rewards and baseline, our rows."""
    from trl import GRPOTrainer

    made, _ = batch
    by_execution = {example.row.execution: example for example in made}
    seen: list[dict[str, Any]] = []

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        names = ["e", "f"] * (len(prompts) // 2)
        records = [trl.to_record(example) for example in by_execution.values()]
        answer = trl.to_rollout(records, ["e", "f"], pad_token_id=1)
        return {key: values * (len(names) // 2) for key, values in answer.items()}

    def score(completions: list[Any], score: list[float | None], **_: Any) -> list[float | None]:
        return score

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            seen.append(super()._generate_and_score_completions(inputs))
            return seen[-1]

    trainer = Trainer(
        trainer_parts["model"],
        reward_funcs=score,
        rollout_func=rollout,
        args=trainer_parts["args"](scale_rewards="none"),
        train_dataset=trainer_parts["data"],
        processing_class=trainer_parts["tokenizer"],
    )
    trainer.train()
    (given,) = seen
    assert given["advantages"].tolist() == [0.5, -0.5, 0.5, -0.5]
    assert (given["tool_mask"] * given["completion_mask"]).sum(-1).tolist() == [
        int(by_execution[name].row.target.sum()) for name in ("e", "f", "e", "f")
    ]


def test_slime_reads_our_samples(batch: tuple[list[Example], float]) -> None:
    sample_types = pytest.importorskip("slime.utils.types", reason="slime is not installed")
    made, _ = batch
    samples = [sample_types.Sample.from_dict(given) for given in slime.to_samples(made)]
    for sample in samples:
        sample._validate_response_metadata_lengths()
    assert [sample.effective_response_length for sample in samples] == [4, 2, 3, 5]
    assert [sample.rollout_id for sample in samples] == [0, 0, 0, 1]
    assert {sample.status for sample in samples} == {sample_types.Sample.Status.COMPLETED}
