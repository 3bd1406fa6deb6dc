"""Which configs and inputs of the losses are refused, and what precision the others are computed in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyre_traj import Packed, Row, mean_metrics, pack_rows
from gyre_traj.errors import BadChoice, BadRow, NotFinite
from gyre_traj.torch import LossConfig, loss_sum


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "dpo"}, "unknown loss kind 'dpo'.*reinforce"),
        ({"correction": "is"}, "unknown correction 'is'.*sequence-mask"),
        ({"reject": "batch"}, "unknown reject"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": float("nan")}, "clip_high"),
        ({"dual_clip": 0.5}, "above 1"),
        ({"kind": "cispo", "dual_clip": 3.0}, "for kind 'ppo'"),
        ({"correction_low": 3.0}, "correction_low <= correction_high"),
        ({"correction_low": 0.0, "correction_high": 0.0}, "would take every weight"),
        ({"reject_low": 3.0}, "reject_low <= reject_high"),
        ({"veto": 0.0}, r"in \(0, 1\)"),
        ({"veto": 2.0}, r"in \(0, 1\)"),
        ({"kl_coef": -1.0}, "kl_coef must be"),
        ({"entropy_coef": float("inf")}, "entropy_coef must be"),
        ({"kl_estimator": "k4"}, "unknown kl_estimator"),
        ({"kl_gradient": "k3"}, "unknown kl_gradient"),
        ({"kl_against": "sft"}, "unknown kl_against"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "0 on average"),
    ],
)
def test_bad_configs_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(BadChoice, match=message):
        LossConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"kind": "decoupled"}, {}, "needs the proximal policy"),
        ({"correction": "tis"}, {}, "holds the mismatch already"),
        ({"kind": "gspo", "correction": "sequence-mask"}, {}, "holds the mismatch already"),
        ({"kl_coef": 0.1, "kl_against": "reference"}, {}, "needs reference_logprobs"),
        ({"entropy_coef": 0.1}, {}, "needs entropies"),
        ({}, {"entropies": torch.zeros(2)}, r"entropies of shape \(3,\)"),
    ],
)
def test_a_config_that_the_inputs_contradict_is_refused(micro_step, changes: dict, given: dict, message: str) -> None:
    step = micro_step([[-1.0, -2.0], [-0.5]], [1.0, -1.0])
    with pytest.raises((BadChoice, BadRow), match=message):
        loss_sum(LossConfig(**changes), step.packed, torch.zeros(3), **given)


def test_shapes_are_checked(micro_step) -> None:
    step = micro_step([[-1.0, -2.0]], [1.0])
    with pytest.raises(BadRow, match=r"logprobs of shape \(2,\).*got \(2, 1\)"):
        loss_sum(LossConfig(), step.packed, torch.zeros(2, 1))


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "reference_logprobs", "entropies"])
def test_a_target_without_a_finite_number_is_named(micro_step, name: str, value: float) -> None:
    step = micro_step([[-1.0] * 9], [1.0])
    tensors = {"logprobs": torch.zeros(9), name: torch.zeros(9)}
    tensors[name][7] = value
    told = rf"{name} of target 7 is {value}: token id 7 predicted from token 7, trajectory 0 of execution 'e0'"
    with pytest.raises(NotFinite, match=told):
        loss_sum(LossConfig(), step.packed, tensors.pop("logprobs"), **tensors)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_a_micro_step_without_targets_adds_nothing(kind: str) -> None:
    packed = Packed(ids=b"", logprobs=b"", rows=(), executions=(), budget=1)
    config = LossConfig(kind=kind, correction="sequence-mask", veto=0.1, kl_coef=0.1)
    loss, metrics = loss_sum(config, packed, torch.zeros(0), torch.zeros(0), version=3)
    assert loss.item() == 0.0
    assert set(metrics.values()) == {0.0}
    assert mean_metrics(metrics) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_narrow_log_probabilities_are_computed_wide(micro_step, kind: str, dtype: torch.dtype) -> None:
    """Rounding the inputs is all that a narrow dtype costs: the sum is the float32 one of the rounded numbers."""
    packed = micro_step([[-1.234, -0.017], [-5.4321]], [1.0, -0.7]).packed
    narrow = torch.from_numpy(packed.arrays().logprob + 0.1).to(dtype)
    config = LossConfig(kind=kind, kl_coef=0.1, entropy_coef=0.1)
    got, expected = (loss_sum(config, packed, x, entropies=-x) for x in (narrow, narrow.float()))
    assert got.loss.dtype == torch.float32
    assert got.loss.item() == expected.loss.item()
    assert got.metrics == expected.metrics


def test_a_million_targets_lose_nothing_in_float32() -> None:
    """Weights of 1e-6 add up to 1, and a trajectory's mean log-ratio is what float64 makes of it."""
    m = 1_000_000
    random = np.random.default_rng(0)
    logprobs = -random.exponential(1.0, m).astype(np.float32)
    current = logprobs + random.normal(0, 0.1, m).astype(np.float32)
    ids = np.zeros(m + 1, np.uint32)
    row = Row("e", 0, ids, np.arange(m + 1) > 0, np.append(np.float32(0), logprobs), 1 / m, 1.0)
    (packed,) = pack_rows([row], m + 1)
    exact = current.astype(np.float64) - logprobs
    for kind, expected in (
        ("ppo", -np.minimum(np.exp(exact), 1.28).mean()),
        ("gspo", -np.exp(exact.mean())),
        ("reinforce", -current.astype(np.float64).mean()),
    ):
        got = loss_sum(LossConfig(kind=kind), packed, torch.from_numpy(current))
        assert got.loss.dtype == torch.float32
        assert got.loss.item() == pytest.approx(expected, rel=2e-6)
        assert got.metrics["weight"] == pytest.approx(1.0, rel=1e-7)
        assert got.metrics["ratio"] == pytest.approx(np.exp(exact).sum(), rel=1e-9)
