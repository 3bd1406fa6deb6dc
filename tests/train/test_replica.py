"""A replica against transformers and torch, packed against unpacked, resumed against straight. One Megatron world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gyre_train import architecture
from gyre_train.config import LossConfig, OptimizerConfig, TrainConfig
from gyre_train.errors import CheckpointError, LayoutMismatch, NonFinite, TrainError, WeightsError
from gyre_traj.packing import Row, pack_forests, pack_rows

if TYPE_CHECKING:
    import torch

    from gyre_train.replica import Replica

pytestmark = pytest.mark.megatron

Policies = Callable[..., Path]
Build = Callable[..., "Replica"]
FAMILIES = ["qwen3", "qwen3-tied", "llama", "llama-tied", "llama-scaled", "qwen2"]
ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.01, clip_grad=1.0)


@pytest.fixture(scope="module")
def build(policies: Policies) -> Iterator[Build]:
    """build(family="qwen3", optimizer=True, load=True, **train) -> a replica at version 0."""
    from gyre_train import hf
    from gyre_train.replica import Replica, leave_world

    def make(family: str = "qwen3", *, core: bool = True, load: bool = True, steps: int = 8, **train: Any) -> Replica:
        config = TrainConfig(**{"dtype": "fp32", "optimizer": ADAM, "logit_chunk": 7, **train})
        folder = policies(family)
        replica = Replica(config, architecture.read(folder), optimizer=core, steps=steps)
        if load:
            replica.load_weights(hf.read_folder(folder), version=0)
        replica.zero()
        return replica

    yield make
    leave_world()


def gradients(replica: Replica) -> list[torch.Tensor]:
    return [b.clone() for b in replica.gradient_buffers()]


def parameters(replica: Replica) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in replica.policy.named_parameters()}


def apart(a: dict[str, torch.Tensor] | list[torch.Tensor], b: dict[str, torch.Tensor] | list[torch.Tensor]) -> float:
    pairs = (
        zip(a.values(), b.values(), strict=True)
        if isinstance(a, dict) and isinstance(b, dict)
        else zip(a, b, strict=True)
    )
    return max(float((x - y).abs().max()) for x, y in pairs)


# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_transformers(
    policies: Policies, build: Build, rows: list[Row], family: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(policies(family), dtype=torch.float32)
    replica = build(family, core=False)
    for number, row in enumerate(rows):
        heat = (1.0, 0.7)[number % 2]  # what the sampler divided the logits by
        temperature = np.full(len(row), heat, np.float32)
        hot = Row(row.execution, 0, row.ids, row.target, row.logprobs, row.weight, row.advantage, temperature)
        (packed,) = pack_rows([hot], 512)
        arrays = packed.arrays()
        ids = torch.tensor(row.ids.astype("int64"))
        with torch.no_grad():
            wanted = torch.log_softmax(reference(ids[None]).logits[0] / heat, dim=-1)
            got = replica.log_probs(packed)
        for k, (source, target) in enumerate(zip(arrays.source, arrays.target, strict=True)):
            assert got[k].item() == pytest.approx(wanted[int(source), int(target)].item(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_back_bit_for_bit(policies: Policies, build: Build, family: str, dtype: str) -> None:
    import torch

    from gyre_train import hf

    saved = hf.read_folder(policies(family, dtype))
    replica = build(family, core=False, load=False, dtype={"float32": "fp32", "bfloat16": "bf16"}[dtype])
    replica.load_weights(saved, version=3)
    back = replica.weights()
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in saved.items())
    assert replica.version == 3


def test_a_step_is_that_of_torch(policies: Policies, build: Build, rows: list[Row]) -> None:
    """Loss, scaling, clipping, decay and Adam against the same written with transformers and torch alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from gyre_traj.torch import LossConfig as Loss
    from gyre_traj.torch import loss_sum

    reference = AutoModelForCausalLM.from_pretrained(policies("qwen3-tied"), dtype=torch.float32)
    decayed = [p for p in reference.parameters() if p.dim() > 1]
    plain = [p for p in reference.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=1e-3, eps=1e-8
    )
    replica = build("qwen3-tied")
    for _ in range(2):
        replica.zero()
        adam.zero_grad()
        for row in rows:
            (packed,) = pack_rows([row], 512)
            arrays = packed.arrays()
            source, target = (torch.tensor(a.astype("int64")) for a in (arrays.source, arrays.target))
            logits = reference(torch.tensor(arrays.ids.astype("int64"))[None]).logits[0]
            log_probs = torch.log_softmax(logits, dim=-1)[source, target]
            (loss_sum(Loss(), packed, log_probs).loss / 4).backward()
            replica.accumulate(packed)
        wanted = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        adam.step()
        assert replica.step(4) == pytest.approx(wanted, rel=1e-5)
    assert replica.version == 2
    theirs = dict(reference.named_parameters())
    ours = replica.weights()
    assert apart(ours, {name: theirs[name].detach() for name in ours}) < 1e-5


def test_an_export_is_loadable_and_the_same(policies: Policies, build: Build, rows: list[Row], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from gyre_train import hf

    replica = build("llama", dtype="bf16")
    (packed,) = pack_rows(rows, 512)
    replica.accumulate(packed)
    replica.step(4)
    out = hf.write_folder(policies("llama"), tmp_path / "policy", replica.weights())
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    ours = replica.weights()
    assert all(torch.equal(p, ours[n]) for n, p in model.named_parameters())
    assert (out / "tokenizer_config.json").is_file()


# --- packing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [pack_rows, pack_forests])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_equals_unpacked(build: Build, rows: list[Row], pack: Any, recompute: bool) -> None:
    """Log-probabilities and gradients do not depend on what else is in a micro-step, nor on how it is computed."""
    replica = build("qwen3", core=False, recompute=recompute)
    alone: dict[tuple[int, int], list[float]] = {}
    total = 0.0
    for row in rows:
        (packed,) = pack_rows([row], 512)
        arrays = packed.arrays()
        for k, value in enumerate(replica.log_probs(packed).tolist()):
            alone.setdefault((int(arrays.trajectory[k]), int(arrays.target[k])), []).append(value)
        total += replica.accumulate(packed)[0]
    separate = gradients(replica)
    replica.zero()
    micro_steps = pack(rows, 150)
    assert 1 < len(micro_steps) < len(rows)
    together = 0.0
    for packed in micro_steps:
        arrays = packed.arrays()
        for k, value in enumerate(replica.log_probs(packed).tolist()):
            key = (int(arrays.trajectory[k]), int(arrays.target[k]))
            assert any(abs(value - other) < 1e-4 for other in alone[key])
        together += replica.accumulate(packed)[0]
    assert together == pytest.approx(total, abs=1e-5)
    assert apart(gradients(replica), separate) < 1e-5 * max(1.0, max(float(b.abs().max()) for b in separate))


def test_forests_compute_fewer_tokens(rows: list[Row]) -> None:
    assert sum(p.tokens for p in pack_forests(rows, 512)) < sum(p.tokens for p in pack_rows(rows, 512))


def test_positions_beyond_the_limit_are_refused(build: Build, rows: list[Row]) -> None:
    replica = build("qwen3", core=False, max_length=8)
    with pytest.raises(TrainError, match="max_length"):
        replica.accumulate(pack_rows(rows, 512)[0])


def test_recomputed_old_log_probabilities_start_at_ratio_one(build: Build, rows: list[Row]) -> None:
    """With pi_old from the trainer, the ratio is 1: the loss of a target is minus its advantage."""
    replica = build("qwen3", core=False, loss=LossConfig(old="recompute"))
    loss, metrics = replica.accumulate(pack_rows(rows, 512)[0])
    wanted = -sum(row.weight * row.advantage * int(row.target.sum()) for row in rows)
    assert loss == pytest.approx(wanted, abs=1e-5)
    assert metrics["clipped"] == 0


# --- cells ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_replicas_sum_to_one(build: Build, rows: list[Row], dtype: str) -> None:
    core, satellite, alone = (build("qwen3-tied", dtype=dtype, core=o) for o in (True, False, True))
    micro_steps = [pack_rows([row], 512)[0] for row in rows]
    for packed in micro_steps:
        alone.accumulate(packed)
    for packed in micro_steps[:3]:
        core.accumulate(packed)
    satellite.load_weights(core.weights(), version=0)
    for packed in micro_steps[3:]:
        satellite.accumulate(packed)
    for index, sums in enumerate(satellite.gradient_buffers()):
        core.add_gradients(index, sums)
    assert core.step(4) == pytest.approx(alone.step(4), rel=1e-5)
    assert apart(parameters(core), parameters(alone)) < (1e-5 if dtype == "fp32" else 2e-2)


def test_sums_of_another_layout_are_refused_whole(build: Build, rows: list[Row]) -> None:
    import torch

    replica = build("qwen3")
    replica.accumulate(pack_rows(rows, 512)[0])
    before = gradients(replica)
    for index, sums in ((0, before[0][:-1]), (0, before[0].double()), (len(before), before[0])):
        with pytest.raises(LayoutMismatch):
            replica.add_gradients(index, sums)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(replica), strict=True))


def test_a_satellite_cannot_step(build: Build) -> None:
    replica = build("qwen3", core=False)
    with pytest.raises(TrainError, match="satellite"):
        replica.step(1)
    with pytest.raises(TrainError, match="satellite"):
        replica.state()


def test_weights_that_do_not_fit_change_nothing(build: Build) -> None:
    import torch

    replica = build("qwen3")
    before = parameters(replica)
    good = {n: t + 1 for n, t in replica.weights().items()}
    missing = {n: t for n, t in good.items() if n != "model.norm.weight"}
    misshapen = {**good, "model.norm.weight": good["model.norm.weight"][:-1]}
    unknown = {**good, "model.layers.9.mlp.up_proj.weight": torch.zeros(1)}
    for wrong, names in ((missing, "norm"), (misshapen, "norm"), (unknown, r"layers\.9")):
        with pytest.raises(WeightsError, match=names):
            replica.load_weights(wrong, version=7)
    assert apart(parameters(replica), before) == 0.0
    assert replica.version == 0


def test_a_gradient_that_is_not_finite_changes_nothing(build: Build, rows: list[Row]) -> None:
    replica = build("qwen3")
    before = parameters(replica)
    replica.accumulate(pack_rows(rows, 512)[0])
    replica.gradient_buffers()[0][5] = float("inf")
    with pytest.raises(NonFinite, match="step 0"):
        replica.step(4)
    assert apart(parameters(replica), before) == 0.0
    assert replica.version == 0


def test_a_log_probability_that_is_not_finite_is_named(build: Build, rows: list[Row]) -> None:
    import torch

    replica = build("qwen3")
    with torch.no_grad():
        next(iter(replica.policy.parameters())).fill_(float("nan"))
    with pytest.raises(NonFinite, match="at version 0, logprobs of target 0 is nan"):
        replica.accumulate(pack_rows(rows, 512)[0])


def test_a_batch_without_executions_only_counts(build: Build) -> None:
    replica = build("qwen3")
    before = parameters(replica)
    assert replica.step(0) == 0.0
    assert replica.version == 1
    assert apart(parameters(replica), before) == 0.0


# --- checkpoints ----------------------------------------------------------------------------------------------------


def train(replica: Replica, rows: list[Row], step: int) -> float:
    replica.zero()
    for row in rows[step % 3 :]:
        replica.accumulate(pack_rows([row], 512)[0])
    return replica.step(4)


def load(replica: Replica, path: Path) -> None:
    from gyre_train import checkpoint

    meta = checkpoint.read_meta(path)
    replica.load_state(meta, {part: checkpoint.read_part(path, part) for part in meta.parts})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_bit_for_bit_a_straight_one(build: Build, rows: list[Row], tmp_path: Path, dtype: str) -> None:
    from gyre_train import checkpoint

    decaying = OptimizerConfig(lr=1e-3, weight_decay=0.01, warmup_steps=2, decay="cosine")
    straight = build("llama", dtype=dtype, optimizer=decaying)
    norms = [train(straight, rows, step) for step in range(3)]
    first = build("llama", dtype=dtype, optimizer=decaying)
    assert [train(first, rows, step) for step in range(2)] == norms[:2]
    meta, state = first.state()
    path = checkpoint.save(tmp_path, meta, state, keep=2)
    second = build("llama", dtype=dtype, optimizer=decaying, load=False)
    load(second, path)
    assert second.version == 2
    assert train(second, rows, 2) == norms[2]
    assert second.learning_rate == straight.learning_rate
    assert apart(parameters(second), parameters(straight)) == 0.0
    assert second.version == straight.version == 3


def test_checkpoints_are_kept_up_to_a_number(build: Build, rows: list[Row], tmp_path: Path) -> None:
    from gyre_train import checkpoint

    replica = build("llama")
    for step in range(4):
        train(replica, rows, step)
        checkpoint.save(tmp_path, *replica.state(), keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-4"


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(
    build: Build, rows: list[Row], tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    from gyre_train import checkpoint

    replica = build("llama")
    train(replica, rows, 0)
    checkpoint.save(tmp_path, *replica.state(), keep=2)
    train(replica, rows, 1)
    with full_disk(), pytest.raises(CheckpointError, match="step-2"):
        checkpoint.save(tmp_path, *replica.state(), keep=2)
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_checkpoint_of_another_run_is_refused(build: Build, rows: list[Row], tmp_path: Path) -> None:
    from gyre_train import checkpoint

    replica = build("llama")
    train(replica, rows, 0)
    path = checkpoint.save(tmp_path, *replica.state(), keep=2)
    for other, names in ((build("qwen3"), "another model"), (build("llama", dtype="bf16"), "dtype")):
        before = parameters(other)
        with pytest.raises(CheckpointError, match=names):
            load(other, path)
        assert apart(parameters(other), before) == 0.0


def test_a_checkpoint_exports_without_megatron(
    policies: Policies, build: Build, rows: list[Row], tmp_path: Path
) -> None:
    import torch

    from gyre_train import checkpoint, hf
    from gyre_train.export import export_checkpoint

    replica = build("llama", dtype="bf16")
    train(replica, rows, 0)
    path = checkpoint.save(tmp_path, *replica.state(), keep=1)
    exported = hf.read_folder(export_checkpoint(path, policies("llama"), tmp_path / "policy"))
    ours = replica.weights()
    assert all(torch.equal(exported[n], t) for n, t in ours.items())
