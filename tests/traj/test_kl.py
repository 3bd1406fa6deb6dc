"""KL estimators: against verl 0.9.1 and TRL 1.16.0, and their expectations over a whole vocabulary."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from gyre_traj.errors import BadChoice
from gyre_traj.torch import LossConfig, kl_estimate, kl_term, loss_sum

FIXTURES = Path(__file__).parents[1] / "fixtures"
INPUTS = {case["seed"]: case for case in json.loads((FIXTURES / "losses.json").read_text())["cases"]}
ORACLE = json.loads((FIXTURES / "traj" / "corrections.json").read_text())["cases"]


def cut(case: dict, name: str) -> list[list[float]]:
    inputs = INPUTS[case["seed"]]
    return [row[:n] for row, n in zip(inputs[name], inputs["lengths"], strict=True)]


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


@pytest.fixture(params=ORACLE, ids=lambda case: f"seed{case['seed']}")
def case(request: pytest.FixtureRequest) -> dict:
    return request.param


# --- against verl and TRL -----------------------------------------------------------------------------------------

VERL = {"k1": ("k1", "plain"), "k2": ("k2", "plain"), "k3": ("k3", "plain"), "k1+": ("k1", "k2"), "k3+": ("k3", "k2")}


@pytest.mark.parametrize("name", list(ORACLE[0]["kl"]))
def test_estimates_and_gradients_agree_with_verl(case: dict, name: str) -> None:
    estimator, gradient = VERL[name]
    config = LossConfig(kl_estimator=estimator, kl_gradient=gradient)
    new, reference = flat(cut(case, "logprob")).requires_grad_(), flat(cut(case, "behaviour_logprob"))
    total = kl_term(config, new, reference, reference).sum()
    total.backward()
    expected = case["kl"][name]
    assert total.item() == pytest.approx(expected["loss"], abs=1e-6)
    torch.testing.assert_close(new.grad, flat(expected["grad"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "gradient"), [("kl-plain", "plain"), ("kl-ratio", "ratio")])
def test_losses_with_a_reference_agree_with_trl(case: dict, micro_step, name: str, gradient: str) -> None:
    """TRL's ratio is against its old policy, which sampled: our β."""
    inputs = INPUTS[case["seed"]]
    weights = [1 / n / len(inputs["lengths"]) for n in inputs["lengths"]]
    step = micro_step(cut(case, "old_logprob"), inputs["grpo_advantage"], weights)
    current = step.pick(cut(case, "logprob")).requires_grad_()
    config = LossConfig(kl_coef=0.1, kl_against="reference", kl_gradient=gradient)
    reference = step.pick(cut(case, "behaviour_logprob")) + 0.25
    loss, metrics = loss_sum(config, step.packed, current, reference_logprobs=reference)
    loss.backward()
    expected = case["trl"][name]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert flat(step.table(current.grad)).tolist() == pytest.approx(flat(expected["grad"]).tolist(), abs=1e-6)
    assert metrics["reference_kl"] == pytest.approx(kl_estimate("k3", current, reference).sum().item())


# --- expectations -------------------------------------------------------------------------------------------------


class Policies:
    """Three policies over a vocabulary of six, so that expectations are sums."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
        self.reference, self.behaviour = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)

    @property
    def current(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(value, self.logits)
        return gradient

    def divergence(self) -> torch.Tensor:
        return (self.current.exp() * (self.current - self.reference)).sum()

    def expected(self, config: LossConfig, sampler: torch.Tensor) -> torch.Tensor:
        """E[estimate] over tokens drawn from `sampler`; its gradient is the expected gradient of the term."""
        return (sampler.detach().exp() * kl_term(config, self.current, self.reference, sampler.detach())).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    p = Policies()
    assert p.expected(LossConfig(kl_estimator=estimator), p.current).item() == pytest.approx(p.divergence().item())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_k2_is_the_divergences_on_policy(estimator: str) -> None:
    p = Policies()
    config = LossConfig(kl_estimator=estimator, kl_gradient="k2")
    torch.testing.assert_close(p.gradient(p.expected(config, p.current)), p.gradient(p.divergence()))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_ratio_makes_value_and_gradient_unbiased_off_policy(estimator: str) -> None:
    p = Policies()
    expected = p.expected(LossConfig(kl_estimator=estimator, kl_gradient="ratio"), p.behaviour)
    assert expected.item() == pytest.approx(p.divergence().item())
    torch.testing.assert_close(p.gradient(expected), p.gradient(p.divergence()))


def test_plain_gradients_are_of_something_else() -> None:
    """k1: nothing. k3: the divergence the other way round."""
    p = Policies()
    k1 = p.gradient(p.expected(LossConfig(kl_estimator="k1"), p.current))
    torch.testing.assert_close(k1, torch.zeros_like(k1), atol=1e-12, rtol=0)
    k3 = p.gradient(p.expected(LossConfig(kl_estimator="k3"), p.current))
    reverse = (p.reference.exp() * (p.reference - p.current)).sum()
    torch.testing.assert_close(k3, p.gradient(reverse))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gradient", ["plain", "k2", "ratio"])
def test_gradients_are_those_of_finite_differences(estimator: str, gradient: str) -> None:
    """But for "k2", whose value and gradient are of two functions."""
    torch.manual_seed(1)
    logprobs, reference, behaviour = -torch.rand(3, 20, dtype=torch.float64)
    config = LossConfig(kl_estimator=estimator, kl_gradient=gradient)
    other = LossConfig(kl_estimator="k2") if gradient == "k2" else config
    new = logprobs.clone().requires_grad_()
    kl_term(config, new, reference, behaviour).sum().backward()
    step = 1e-6
    up, down = (kl_term(other, logprobs + s, reference, behaviour) for s in (step, -step))
    torch.testing.assert_close(new.grad, (up - down) / (2 * step), atol=1e-8, rtol=1e-6)


def test_k3_is_never_negative_and_stays_finite() -> None:
    far = torch.tensor([-1e4, -30.0, -1e-9, 0.0, 1e-9, 30.0, 1e4])
    got = kl_estimate("k3", far, torch.zeros(7))
    assert (got >= 0).all()
    assert torch.isfinite(got).all()


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(BadChoice, match=r"'k4'; choose one of \['k1', 'k2', 'k3'\]"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))


# --- in the loss --------------------------------------------------------------------------------------------------


def test_kl_and_entropy_are_not_corrected(micro_step) -> None:
    """A rejected target keeps its pull towards the reference, and its bonus."""
    step = micro_step([[-1.0, -2.0]], [0.5], 0.25)
    old = step.pick([[-1.0, -9.0]])
    entropies = step.pick([[0.7, 0.9]]).requires_grad_()
    config = LossConfig(correction="icepop", kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    loss, metrics = loss_sum(config, step.packed, old + 0.2, old, entropies=entropies)
    policy = -0.5 * 1.2214027581601699  # of the first target; the second is masked
    assert loss.item() == pytest.approx(0.25 * (policy + 2 * 0.1 * 0.02 - 0.01 * 1.6))
    loss.backward()
    assert entropies.grad is not None
    assert entropies.grad.tolist() == pytest.approx([-0.0025, -0.0025])
    assert metrics["entropy"] == pytest.approx(1.6)
    assert metrics["rejected"] == 1.0


def test_the_ratio_is_against_the_policy_that_sampled(micro_step) -> None:
    """Not against a recomputed π_old: π = π_old = 2 β, so that the ratio is 2."""
    step = micro_step([[-2.0]], [0.0])
    old = step.pick([[-2.0 + math.log(2)]])
    config = LossConfig(kl_coef=1.0, kl_estimator="k1", kl_gradient="ratio", kl_against="reference")
    loss = loss_sum(config, step.packed, old.clone(), old, reference_logprobs=old - 0.5).loss
    assert loss.item() == pytest.approx(2 * 0.5)


def test_a_reference_without_a_coefficient_is_a_metric_only(micro_step) -> None:
    step = micro_step([[-1.0, -2.0]], [0.5])
    current, reference = step.pick([[-1.1, -2.2]]), step.pick([[-1.0, -3.0]])
    plain = loss_sum(LossConfig(), step.packed, current)
    measured = loss_sum(LossConfig(), step.packed, current, reference_logprobs=reference)
    assert measured.loss.item() == plain.loss.item()
    assert measured.metrics["reference_kl"] == pytest.approx(kl_estimate("k3", current, reference).sum().item())
    assert "reference_kl" not in plain.metrics
