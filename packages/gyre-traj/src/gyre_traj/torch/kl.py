"""KL terms: per-target estimates of KL(π, ρ), ρ being π_old or a reference policy, from the tokens sampled.

With d = logπ - logρ at the sampled token (J. Schulman, "Approximating KL divergence", 2020):

    k1  d                       unbiased, may be negative
    k2  d² / 2                  biased in value, its gradient is the divergence's
    k3  exp(-d) + d - 1         unbiased, never negative, of low variance

An unbiased value has not an unbiased gradient. On samples of π, E[∇k1] = 0, E[∇k2] = ∇KL(π, ρ), E[∇k3] = ∇KL(ρ, π)
(Tang and Munos, 2025, arXiv 2506.09477). Hence the choice of gradient:

    plain   differentiate the estimate
    k2      the estimate's value with k2's gradient (verl's "k1+", "k3+"): unbiased on-policy
    ratio   r · estimate, r = π/β differentiated too: with k1 and k3 unbiased for samples of β as well
            (DeepSeek-V3.2, 2025, arXiv 2512.02556, there with k3; TRL's use_bias_correction_kl)

d and log r are clamped to ±20; beyond, the gradient of k3 and of the ratio is 0.
"""

from __future__ import annotations

import torch

from gyre_traj.errors import BadChoice
from gyre_traj.loss_config import ESTIMATORS, LossConfig
from gyre_traj.torch.corrections import LOG_RATIO_LIMIT


def kl_estimate(estimator: str, logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-target estimates [m] of KL(π, ρ), differentiable. Raises `BadChoice` for an unknown estimator."""
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator != "k3":
        raise BadChoice(f"unknown kl_estimator {estimator!r}; choose one of {list(ESTIMATORS)}")
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-difference).exp() + difference - 1


def kl_term(
    config: LossConfig, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor
) -> torch.Tensor:
    """What the loss adds kl_coef times [m], with the config's estimator and gradient."""
    value = kl_estimate(config.kl_estimator, logprobs, reference_logprobs)
    if config.kl_gradient == "plain":
        return value
    if config.kl_gradient == "k2":
        surrogate = kl_estimate("k2", logprobs, reference_logprobs)
        return value.detach() + surrogate - surrogate.detach()
    log_ratio = (logprobs - behaviour_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp() * value
