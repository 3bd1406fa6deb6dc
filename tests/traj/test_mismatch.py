"""What the trainer and the engine disagree by: sums of micro-steps, merged, and the means made of them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_traj import mean_metrics, merge_metrics
from gyre_traj.torch import LossConfig, loss_sum, mismatch_sums, staleness_sums

FIXTURES = Path(__file__).parents[1] / "fixtures"
INPUTS = {case["seed"]: case for case in json.loads((FIXTURES / "losses.json").read_text())["cases"]}
ORACLE = json.loads((FIXTURES / "traj" / "corrections.json").read_text())["cases"]
OURS = {
    "kl": "mismatch_k1",
    "k3_kl": "mismatch_k3",
    "chi2_token": "chi_square",
    "rollout_is_eff_sample_size": "effective_sample",
    "rollout_is_mean": "ratio",
    "rollout_is_max": "ratio_max",
}


@pytest.mark.parametrize("case", ORACLE, ids=lambda case: f"seed{case['seed']}")
def test_means_agree_with_verl(case: dict, micro_step) -> None:
    inputs = INPUTS[case["seed"]]
    new, old, behaviour = (
        [row[:n] for row, n in zip(inputs[name], inputs["lengths"], strict=True)]
        for name in ("logprob", "old_logprob", "behaviour_logprob")
    )
    step = micro_step(behaviour, inputs["grpo_advantage"])
    means = mean_metrics(loss_sum(LossConfig(), step.packed, step.pick(new), step.pick(old)).metrics)
    assert {name: means[ours] for name, ours in OURS.items()} == pytest.approx(case["metrics"], abs=1e-6)


def sums(logprobs: list[float], behaviour: list[float], **more: float) -> dict[str, float]:
    got = mismatch_sums(torch.tensor(logprobs, dtype=torch.float64), torch.tensor(behaviour, dtype=torch.float64))
    return {name: value.item() for name, value in got.items()} | {"targets": float(len(logprobs)), **more}


def test_the_means_in_closed_form() -> None:
    """Two targets with ratios 2 and 1/2."""
    means = mean_metrics(sums([-1.0, -2.0], [-1.0 - math.log(2), -2.0 + math.log(2)]))
    assert means == pytest.approx(
        {
            "mismatch": math.log(2),
            "mismatch_max": math.log(2),
            "mismatch_k1": 0.0,
            "mismatch_k3": 0.25,
            "ratio": 1.25,
            "ratio_max": 2.0,
            "effective_sample": 2.5**2 / (2 * 4.25),
            "chi_square": 4.25 / 2 - 1,
            "perplexity": math.exp(1.5),
            "behaviour_perplexity": math.exp(1.5),
        },
        abs=1e-12,
    )


def test_equal_policies_have_a_full_sample() -> None:
    means = mean_metrics(sums([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]))
    assert (means["effective_sample"], means["chi_square"], means["mismatch_k3"]) == (1.0, 0.0, 0.0)


def test_merging_knows_no_order() -> None:
    random = np.random.default_rng(0)
    parts = [sums((-random.random(n)).tolist(), (-random.random(n)).tolist(), weight=0.1) for n in (3, 1, 7, 20)]
    merged = merge_metrics(parts)
    for order in itertools.permutations(parts):
        assert merge_metrics(order) == merged
    assert merge_metrics([merge_metrics(parts[:2]), merge_metrics(parts[2:])]) == pytest.approx(merged, rel=1e-14)
    assert merged["targets"] == 31
    assert merged["mismatch_max"] == max(part["mismatch_max"] for part in parts)


def test_a_part_that_lacks_a_name_counts_as_nothing() -> None:
    assert merge_metrics([{"a": 1.0, "b_max": -2.0}, {"a": 2.0}, {}]) == {"a": 3.0, "b_max": -2.0}
    assert merge_metrics([]) == {}
    assert mean_metrics({}) == mean_metrics({"targets": 0.0, "clipped": 0.0}) == {}


def test_infinities_are_not_hidden() -> None:
    assert merge_metrics([{"a": math.inf}, {"a": 1.0}]) == {"a": math.inf}
    assert math.isnan(merge_metrics([{"a": math.inf}, {"a": -math.inf}])["a"])


def test_staleness_is_of_the_targets_whose_version_is_known() -> None:
    got = {name: value.item() for name, value in staleness_sums(torch.tensor([3, 5, -1, 4]), 5).items()}
    assert got == {"staleness": 3.0, "staleness_max": 2.0, "versioned": 3}
    means = mean_metrics({"targets": 4.0, **got})
    assert (means["staleness"], means["staleness_max"]) == (1.0, 2.0)
    unknown = {name: value.item() for name, value in staleness_sums(torch.tensor([-1]), 5).items()}
    assert "staleness" not in mean_metrics({"targets": 1.0, **unknown})


def test_without_targets_every_sum_is_zero(micro_step) -> None:
    got = sums([], [])
    assert set(got.values()) == {0.0}


def test_far_log_ratios_are_told_as_they_are() -> None:
    got = sums([-1.0], [-1001.0])
    assert (got["mismatch"], got["mismatch_max"]) == (1000.0, 1000.0)
    assert got["ratio"] == pytest.approx(math.exp(20))
    assert math.isfinite(mean_metrics(sums([-5000.0], [-1.0]))["perplexity"])
