"""Losses against verl 0.9.1 and TRL 1.16.0, value and gradient; and the same loss however a batch is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_traj import Row, group_advantages, pack_forests, pack_rows, select, target_weights, weigh
from gyre_traj.errors import BadRow
from gyre_traj.torch import LossConfig, Sequences, correction_weights, loss_sum, policy_loss

ORACLE = json.loads((Path(__file__).parents[1] / "fixtures" / "losses.json").read_text())
CASES = ORACLE["cases"]
VERL_PPO = LossConfig(dual_clip=3.0)
TRL_PPO = LossConfig()
GSPO, CISPO = LossConfig(kind="gspo"), LossConfig(kind="cispo")
WIDTH = 9.0  # padded length of the oracle's rows: the constant of Dr. GRPO


class Case:
    """One oracle case, flat: its rows' real tokens one after another."""

    def __init__(self, case: dict) -> None:
        self.case = case
        self.lengths = case["lengths"]
        self.mask = np.arange(int(WIDTH)) < np.array(self.lengths)[:, None]
        self.rows = torch.tensor(np.repeat(np.arange(len(self.lengths)), self.lengths))
        self.advantage = torch.tensor(case["grpo_advantage"], dtype=torch.float64)[self.rows]

    def flat(self, values: list) -> torch.Tensor:
        return torch.tensor(np.array(values)[self.mask], dtype=torch.float64)

    def loss(self, config: LossConfig, weights: np.ndarray, units: float) -> tuple[float, torch.Tensor]:
        logprob = self.flat(self.case["logprob"]).requires_grad_()
        old = self.flat(self.case["old_logprob"])
        losses = policy_loss(config, logprob, old, self.advantage, Sequences(self.rows)).loss
        loss = (losses * torch.tensor(weights)).sum() / units
        loss.backward()
        assert logprob.grad is not None
        return loss.item(), logprob.grad

    def aggregated(self, config: LossConfig, aggregation: str) -> tuple[float, torch.Tensor]:
        weights, units = target_weights(self.lengths, aggregation, norm=WIDTH)
        return self.loss(config, weights[self.rows], units)


@pytest.fixture(params=CASES, ids=lambda case: f"seed{case['seed']}")
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def agrees(case: Case, got: tuple[float, torch.Tensor], expected: dict) -> None:
    assert set(expected) <= {"loss", "grad", "aggregate", "execution"}
    assert got[0] == pytest.approx(expected["loss"], abs=1e-6)
    torch.testing.assert_close(got[1], case.flat(expected["grad"]), atol=1e-6, rtol=0)


def two_level(case: Case) -> tuple[np.ndarray, int]:
    """Weight of each row's targets, and the number of executions."""
    execution = np.array(case.case["two_level"]["execution"])
    weights = np.zeros(len(execution))
    for e in set(execution.tolist()):
        weights[execution == e] = target_weights(np.array(case.lengths)[execution == e])[0]
    return weights, len(set(execution.tolist()))


# --- every number of the oracle -----------------------------------------------------------------------------------


def aggregate(name: str) -> Callable[[Case, dict], None]:
    return lambda case, expected: agrees(case, case.aggregated(VERL_PPO, name), expected)


def policy(config: LossConfig) -> Callable[[Case, dict], None]:
    return lambda case, expected: agrees(case, case.aggregated(config, expected["aggregate"]), expected)


def trl(config: LossConfig, aggregation: str) -> Callable[[Case, float], None]:
    def check(case: Case, expected: float) -> None:
        assert case.aggregated(config, aggregation)[0] == pytest.approx(expected, abs=1e-6)

    return check


def correction(config: LossConfig) -> Callable[[Case, list], None]:
    def check(case: Case, expected: list) -> None:
        got = correction_weights(config, case.flat(case.case["old_logprob"]), case.flat(case.case["behaviour_logprob"]))
        assert got is not None
        torch.testing.assert_close(got.weight, case.flat(expected), atol=1e-6, rtol=0)

    return check


def advantage(*, std: bool) -> Callable[[Case, list], None]:
    def check(case: Case, expected: list) -> None:
        group, reward = np.array(case.case["group"]), np.array(case.case["reward"], dtype=float)
        got = np.concatenate([group_advantages(reward[group == g], std=std) for g in sorted(set(group.tolist()))])
        assert got == pytest.approx(expected, abs=1e-6)

    return check


def two_level_mean(case: Case, expected: dict) -> None:
    weights, executions = two_level(case)
    agrees(case, case.loss(TRL_PPO, weights[case.rows], executions), expected)


CHECKS: dict[str, Callable[[Case, object], None]] = {
    "grpo_advantage": advantage(std=True),
    "grpo_advantage_mean_only": advantage(std=False),
    "aggregate/token-mean": aggregate("token-mean"),
    "aggregate/seq-mean-token-sum": aggregate("seq-mean-token-sum"),
    "aggregate/seq-mean-token-mean": aggregate("seq-mean-token-mean"),
    "aggregate/seq-mean-token-sum-norm": aggregate("seq-mean-token-sum-norm"),
    "policy/vanilla": policy(VERL_PPO),
    "policy/gspo": policy(GSPO),
    "policy/cispo": policy(CISPO),
    "trl/grpo": trl(TRL_PPO, "seq-mean-token-mean"),
    "trl/bnpo": trl(TRL_PPO, "token-mean"),
    "trl/dapo": trl(TRL_PPO, "token-mean"),
    "trl/dr_grpo": trl(TRL_PPO, "seq-mean-token-sum-norm"),
    "trl/grpo_sequence": trl(GSPO, "seq-mean-token-mean"),
    "correction/tis_2.0": correction(LossConfig(correction="tis", correction_high=2.0)),
    "correction/icepop_0.5_2.0": correction(LossConfig(correction="icepop", correction_low=0.5, correction_high=2.0)),
    "two_level": two_level_mean,
}  # type: ignore[dict-item]
INPUTS = {"seed", "clip", "lengths", "group", "reward", "logprob", "old_logprob", "behaviour_logprob"}
NESTED = {"aggregate", "policy", "trl", "correction"}


@pytest.mark.parametrize("name", CHECKS)
def test_values_and_gradients_agree(case: Case, name: str) -> None:
    section, _, entry = name.partition("/")
    CHECKS[name](case, case.case[section][entry] if entry else case.case[section])


def test_no_entry_of_the_oracle_goes_unused(case: Case) -> None:
    entries = set(case.case) - INPUTS - NESTED
    entries |= {f"{section}/{name}" for section in NESTED for name in case.case[section]}
    assert entries == set(CHECKS)
    assert set(ORACLE) == {"made_by", "cases", "two_level_published"}
    assert case.case["clip"] == [TRL_PPO.clip_low, TRL_PPO.clip_high]


def test_the_published_cases_come_out_exactly() -> None:
    """Loss 1 in every token of A = 50 + 100, B = 3 · 30, C = 40 is a loss of 1; and advantages know no rows."""
    unequal, split = ORACLE["two_level_published"]
    executions: dict[str, list[int]] = {}
    for execution, size in unequal["rows"]:
        executions.setdefault(execution, []).append(size)
    means = [float((target_weights(sizes)[0] * sizes).sum()) for sizes in executions.values()]
    assert sum(means) / len(means) == unequal["loss"] == 1.0
    rewards = split["reward"]
    of = dict(zip(rewards, group_advantages(list(rewards.values()), std=False), strict=True))
    assert [of[e] for e in split["rows"]] == split["mean_only_advantage"] == [0.5, 0.5, 0.5, -0.5]


# --- the streaming form -------------------------------------------------------------------------------------------


def oracle_rows(case: Case) -> list[Row]:
    """The oracle's rows as rows to pack; ids are unique, so that log-probabilities can be looked up by them."""
    weights, _ = two_level(case)
    rows = []
    for i, n in enumerate(case.lengths):
        ids = np.array([9999, *range(100 * i, 100 * i + n)], dtype=np.uint32)
        old = np.array([0.0, *case.case["old_logprob"][i][:n]], dtype=np.float32)
        execution = f"e{case.case['two_level']['execution'][i]}"
        rows.append(Row(execution, i, ids, ids != 9999, old, float(weights[i]), case.case["grpo_advantage"][i]))
    return rows


@pytest.mark.parametrize("budget", [1, 7, 12, 1000])
@pytest.mark.parametrize("pack", [pack_rows, pack_forests])
def test_the_sum_over_micro_steps_is_the_batch_loss(case: Case, budget: int, pack) -> None:
    """Per-micro-batch means would depend on the partition; sums of w · ℓ do not."""
    expected = case.case["two_level"]
    logprob = torch.tensor(case.case["logprob"], dtype=torch.float64, requires_grad=True)
    total, targets = 0.0, 0.0
    for packed in pack(oracle_rows(case), budget):
        target = packed.arrays().target.astype("int64")
        got = loss_sum(TRL_PPO, packed, logprob[target // 100, target % 100])
        (got.loss / 4).backward()
        total += got.loss.item() / 4
        targets += got.metrics["targets"]
    assert targets == sum(case.lengths)
    assert logprob.grad is not None
    agrees(case, (total, logprob.grad[case.mask]), expected)


def test_metrics_are_sums_over_targets(case: Case) -> None:
    (packed,) = pack_rows(oracle_rows(case), 1000)
    target = packed.arrays().target.astype("int64")

    def pick(key: str) -> torch.Tensor:
        return torch.tensor(case.case[key], dtype=torch.float64)[target // 100, target % 100]

    new, old = pick("logprob"), pick("old_logprob")
    metrics = loss_sum(TRL_PPO, packed, new).metrics
    assert metrics["mismatch"] == pytest.approx((new - old).abs().sum().item(), abs=1e-5)
    assert metrics["mismatch_max"] == pytest.approx((new - old).abs().max().item(), abs=1e-5)
    assert metrics["kl"] == pytest.approx(((old - new).exp() - (old - new) - 1).sum().item(), abs=1e-5)
    assert metrics["weight"] == pytest.approx(4.0)
    ratio, advantage = (new - old).exp(), torch.tensor(case.case["grpo_advantage"])[target // 100]
    out = ((ratio > 1.28) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    assert metrics["clipped"] == out.sum().item()
    bad = ((ratio < 0.8) | (ratio > 1.28)).sum().item()
    assert metrics["outside"] == bad
    dropped = loss_sum(LossConfig(correction="icepop", correction_high=1.1), packed, new, new + 1.0).metrics
    assert dropped["corrected"] == ((new + 1 - old).exp() > 1.1).sum() + ((new + 1 - old).exp() < 0.5).sum()


def test_behaviour_is_not_old_when_old_was_recomputed(case: Case) -> None:
    """Decoupled: the ratio is against the recomputed policy, the correction against the engine's."""
    (packed,) = pack_rows(oracle_rows(case), 1000)
    target = packed.arrays().target.astype("int64")
    behaviour = torch.tensor(case.case["old_logprob"])[target // 100, target % 100]
    old = behaviour + 0.3
    got = loss_sum(LossConfig(correction="tis", correction_high=1.2), packed, old.clone(), old)
    arrays = packed.arrays()
    expected = -(arrays.weight * arrays.advantage).sum() * 1.2  # ratio 1 everywhere, weight e^0.3 truncated to 1.2
    assert got.loss.item() == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(("ratio", "loss"), [(5.0, 3.0), (2.0, 2.0), (0.5, 0.8)])
@pytest.mark.parametrize("kind", ["ppo", "decoupled"])
def test_dual_clip_bounds_the_loss_of_bad_actions(kind: str, ratio: float, loss: float) -> None:
    one = torch.tensor([0.0], dtype=torch.float64)
    got = policy_loss(LossConfig(kind=kind, dual_clip=3.0), one + np.log(ratio), one, one - 1)
    assert got.loss.item() == pytest.approx(loss)
    assert got.clipped.item() is (ratio != 2.0)
    assert got.outside.item() is True


def test_reinforce_is_minus_the_advantage_times_the_score() -> None:
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    got = policy_loss(LossConfig(kind="reinforce"), logprobs, logprobs.detach() - 1, torch.tensor([2.0, -1.0]))
    got.loss.sum().backward()
    assert got.loss.tolist() == [1.0, -2.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-2.0, 1.0]
    assert not got.clipped.any()


@pytest.mark.parametrize("kind", ["ppo", "decoupled", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_far_ratios_stay_finite(kind: str, offset: float) -> None:
    zero = torch.zeros(1, requires_grad=True)
    losses = policy_loss(LossConfig(kind=kind), zero, zero.detach() + offset, torch.ones(1), Sequences(torch.zeros(1)))
    losses.loss.sum().backward()
    assert torch.isfinite(losses.loss).all()
    assert zero.grad is not None
    assert torch.isfinite(zero.grad).all()


def test_gspo_without_sequences_is_refused() -> None:
    with pytest.raises(BadRow, match="gspo looks at whole trajectories"):
        policy_loss(GSPO, torch.zeros(1), torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("pack", [pack_rows, pack_forests])
@pytest.mark.parametrize("budget", [60, 10_000])
def test_unequal_rows_from_calls_to_loss(new_story, pack, budget: int) -> None:
    """The published case, the whole way: A sampled 50 + 100 tokens, B three times 30, C 40; each loss is 1."""
    rows: list[Row] = []
    for name, sizes in (("A", [50, 100]), ("B", [30, 30, 30]), ("C", [40])):
        story = new_story(name)
        for i, size in enumerate(sizes):
            story.call(f"{name}{i}", "shared prompt", " ".join(f"{name}{i}-{j}" for j in range(size)))
        selection = select(story.tree(), None, seed=0)
        rows += weigh(selection, advantage=-1.0, first_trajectory=len(rows)).rows
    packs = pack(rows, budget)
    assert sum(p.targets for p in packs) == 280
    same = [torch.from_numpy(p.arrays().logprob.copy()) for p in packs]  # ratio 1, so ℓ = -A = 1
    total = sum(loss_sum(TRL_PPO, p, logprob).loss.item() for p, logprob in zip(packs, same, strict=True))
    assert total / 3 == pytest.approx(1.0, abs=1e-6)
