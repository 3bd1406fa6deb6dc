"""What the trainer and the engine disagree by, as sums that add up over micro-steps; `gyre_traj.metrics` makes means.

With r = exp(logp - logβ), p the trainer's policy and β the engine's, on tokens sampled from β:

    mismatch, mismatch_max      Σ |log r|, max |log r|
    mismatch_k1, mismatch_k3    Σ -log r, Σ r - log r - 1: estimates of KL(β, p); k3 never negative
    ratio, ratio_max            Σ r, max r
    ratio_square                Σ r²: with Σ r the effective sample size, and χ²
    logprob, behaviour_logprob  Σ logp, Σ logβ: the perplexities
    staleness, staleness_max    Σ and max of version - version that sampled the target, over `versioned` targets

log r is clamped to ±20, but for `mismatch` and `mismatch_max`, which say what it was.
"""

from __future__ import annotations

import torch

from gyre_traj.torch.corrections import LOG_RATIO_LIMIT


def mismatch_sums(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over the targets' log-probabilities [m] by name, float64 scalars without gradient; see the module."""
    trainer, behaviour = logprobs.detach().double(), behaviour_logprobs.detach().double()
    difference = trainer - behaviour
    log_ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    return {
        "mismatch": difference.abs().sum(),
        "mismatch_max": _largest(difference.abs()),
        "mismatch_k1": -log_ratio.sum(),
        "mismatch_k3": (ratio - log_ratio - 1).sum(),
        "ratio": ratio.sum(),
        "ratio_max": _largest(ratio),
        "ratio_square": ratio.square().sum(),
        "logprob": trainer.sum(),
        "behaviour_logprob": behaviour.sum(),
    }


def staleness_sums(sampled_by: torch.Tensor, version: int) -> dict[str, torch.Tensor]:
    """How many versions behind `version` the weights were that sampled each target [m]; negative: not known."""
    known = sampled_by >= 0
    age = (version - sampled_by[known]).double()
    return {"staleness": age.sum(), "staleness_max": _largest(age), "versioned": known.sum()}


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max() if len(values) else values.new_zeros(())
