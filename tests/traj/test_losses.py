"""Losses against verl 0.9.1 and TRL 1.16.0, value and gradient; and the same loss however a batch is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_traj import Row, group_advantages, pack_forests, pack_rows, select, target_weights, weigh
from gyre_traj.errors import BadChoice, BadRow, NotFinite
from gyre_traj.torch import LossConfig, Sequences, correction_weights, dense_mask, loss_sum, policy_loss

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
        ({}, {"entropies": torch.zeros(3)}, r"entropies of shape \(29,\)"),
    ],
)
def test_a_config_that_the_inputs_contradict_is_refused(changes: dict, given: dict, message: str) -> None:
    (packed,) = pack_rows(oracle_rows(Case(CASES[0])), 1000)
    with pytest.raises((BadChoice, BadRow), match=message):
        loss_sum(LossConfig(**changes), packed, torch.zeros(29), **given)


def test_shapes_are_checked(case: Case) -> None:
    (packed,) = pack_rows(oracle_rows(case), 1000)
    with pytest.raises(BadRow, match=r"shape \(29,\)"):
        loss_sum(TRL_PPO, packed, torch.zeros(28))


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "reference_logprobs", "entropies"])
def test_a_target_without_a_finite_number_is_named(case: Case, name: str, value: float) -> None:
    (packed,) = pack_rows(oracle_rows(case), 1000)
    tensors = {"logprobs": torch.zeros(29), name: torch.zeros(29)}
    tensors[name][7] = value
    token = packed.arrays().target[7]
    with pytest.raises(NotFinite, match=rf"{name} of target 7 is {value}: token id {token}.*execution 'e"):
        loss_sum(TRL_PPO, packed, tensors.pop("logprobs"), **tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_narrow_log_probabilities_are_computed_wide(case: Case, kind: str, dtype: torch.dtype) -> None:
    """Rounding the inputs is all that a narrow dtype costs: the sum is the float32 one of the rounded numbers."""
    (packed,) = pack_rows(oracle_rows(case), 1000)
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


# --- the layout in a transformer ----------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    """Two layers of attention under any mask, positions given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(8, 16, dtype=torch.float64)
        self.place = torch.nn.Embedding(16, 16, dtype=torch.float64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 64, dtype=torch.float64) for _ in range(2))
        self.head = torch.nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.place(position)
        for layer in self.layers:
            q, k, v, up = layer(x).chunk(4, -1)
            score = (q @ k.T / 4).masked_fill(~mask, float("-inf"))
            x = x + score.softmax(-1) @ v + torch.tanh(up)
        return self.head(x).log_softmax(-1)


def tree_rows() -> list[Row]:
    generator = np.random.default_rng(0)
    trunk = generator.integers(0, 8, 6)
    rows = []
    for number, (shared, n) in enumerate([(6, 12), (6, 9), (4, 10), (2, 7), (0, 8), (6, 12)]):
        ids = np.concatenate([trunk[:shared], generator.integers(0, 8, n - shared)]).astype(np.uint32)
        target = generator.random(n) < 0.6
        target[0], target[-1] = False, True
        rows.append(Row(f"e{number // 5}", number, ids, target, -generator.random(n).astype(np.float32), 0.1, 1.0))
    return rows


def batch_gradient(packs: list) -> tuple[float, list[torch.Tensor], int]:
    model = Tiny()
    total, tokens = 0.0, 0
    for packed in packs:
        a = packed.arrays()
        out = model(torch.from_numpy(a.ids.astype("int64")), torch.from_numpy(a.position.copy()), dense_mask(packed))
        got = loss_sum(LossConfig(), packed, out[a.source.astype("int64"), a.target.astype("int64")])
        got.loss.backward()
        total, tokens = total + got.loss.item(), tokens + packed.tokens
    return total, [p.grad for p in model.parameters() if p.grad is not None], tokens


@pytest.mark.parametrize("budget", [16, 30, 1000])
def test_forests_compute_what_rows_compute_with_fewer_tokens(budget: int) -> None:
    rows = tree_rows()
    loss, gradients, tokens = batch_gradient([p for row in rows for p in pack_rows([row], 100)])
    assert tokens == sum(len(row.ids) for row in rows)
    for pack in (pack_rows, pack_forests):
        packed_loss, packed_gradients, packed_tokens = batch_gradient(pack(rows, budget))
        assert packed_loss == pytest.approx(loss, abs=1e-10)
        torch.testing.assert_close(packed_gradients, gradients, atol=1e-10, rtol=0)
        assert packed_tokens < tokens if pack is pack_forests else packed_tokens == tokens


def test_dense_mask_is_the_definition() -> None:
    for packed in pack_forests(tree_rows(), 40):
        end = packed.arrays().end
        n = packed.tokens
        expected = [[j <= i < end[j] for j in range(n)] for i in range(n)]
        assert dense_mask(packed).tolist() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_the_same_on_a_gpu(kind: str) -> None:
    for packed in pack_forests(tree_rows(), 40):
        torch.testing.assert_close(dense_mask(packed, "cuda").cpu(), dense_mask(packed))
        logprobs = -torch.rand(packed.targets)
        config = LossConfig(kind=kind, correction="sequence-truncate", reject="geometric", veto=0.01)
        one, other = (loss_sum(config, packed, logprobs.to(d), (logprobs - 0.1).to(d)) for d in ("cpu", "cuda"))
        torch.testing.assert_close(other.loss.cpu(), one.loss)
        assert other.metrics == pytest.approx(one.metrics, rel=1e-4)
