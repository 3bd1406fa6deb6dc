"""Policy losses over flat targets: Σ w_t · ℓ_t, so that it does not matter how a batch is cut into micro-steps.

With ρ_t = exp(logπ_t - logπ_old_t), A the advantage, c_t the correction weight (1 without one):

    ppo     ℓ = c · max(-A ρ, -A clip(ρ, 1 - low, 1 + high)); for A < 0 at most -A · dual_clip      arXiv 1707.06347
    gspo    as ppo, with ρ the exponential of the mean log-ratio over the trajectory's targets      arXiv 2507.18071
    cispo   ℓ = -c · sg(clip(ρ, 1 - low, 1 + high)) · A · logπ                                      arXiv 2506.13585
    tis     c = min(exp(logπ_old - logβ), high)
    icepop  c = exp(logπ_old - logβ) inside [low, high], else 0
    kl      + kl_coef · (exp(-logρ) + logρ - 1), the k3 estimator of KL(π, π_old)

gspo needs all targets of a trajectory in one micro-step: packing never parts them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from gyre_traj.errors import BadChoice, BadRow
from gyre_traj.packing import Packed

_LOG_RATIO_LIMIT = 20.0  # a ratio beyond e^20 says nothing more, and overflows
_KINDS = ("ppo", "gspo", "cispo")
_CORRECTIONS = ("none", "tis", "icepop")


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which loss. Defaults: PPO-clip with asymmetric bounds, no correction, no KL term. Raises `BadChoice`."""

    kind: str = "ppo"  # ppo | gspo | cispo
    clip_low: float = 0.2  # ratio >= 1 - clip_low
    clip_high: float = 0.28  # ratio <= 1 + clip_high
    dual_clip: float | None = None  # ppo: ℓ <= -A·dual_clip for A < 0, > 1; None: off
    correction: str = "none"  # none | tis | icepop
    correction_low: float = 0.5  # icepop
    correction_high: float = 2.0  # tis, icepop
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise BadChoice(f"unknown loss kind {self.kind!r}; choose one of {list(_KINDS)}")
        if self.correction not in _CORRECTIONS:
            raise BadChoice(f"unknown correction {self.correction!r}; choose one of {list(_CORRECTIONS)}")
        if not (self.clip_low >= 0 and self.clip_high >= 0):
            raise BadChoice(f"clip bounds must not be negative, got {self.clip_low!r} and {self.clip_high!r}")
        if self.dual_clip is not None and (self.kind != "ppo" or not self.dual_clip > 1):
            raise BadChoice(f"dual_clip is for kind 'ppo' and above 1, got {self.dual_clip!r} for {self.kind!r}")
        if not 0 <= self.correction_low <= self.correction_high:
            raise BadChoice(
                "expected 0 <= correction_low <= correction_high, "
                f"got {self.correction_low!r} and {self.correction_high!r}"
            )


class LossSum(NamedTuple):
    """`loss` = Σ w·ℓ (a scalar to call backward on), and detached sums over the targets."""

    loss: torch.Tensor
    metrics: dict[str, float]


def policy_loss(
    config: LossConfig,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    trajectory: torch.Tensor,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-target losses ℓ [m], and which targets had their ratio clipped, bool [m].

    All inputs are [m]; `trajectory` numbers say which targets belong together (any ids; read by gspo alone).
    """
    log_ratio = (logprobs - old_logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    if config.kind == "gspo":
        log_ratio = _sequence_log_ratio(logprobs, old_logprobs, trajectory)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.kind == "cispo":
        loss = -bounded.detach() * advantages * logprobs
        clipped = bounded != ratio
    else:
        plain, limited = -advantages * ratio, -advantages * bounded
        loss, clipped = torch.maximum(plain, limited), limited > plain
        if config.dual_clip is not None:
            ceiling = -advantages * config.dual_clip
            over = (advantages < 0) & (loss > ceiling)
            loss, clipped = torch.where(over, ceiling, loss), clipped | over
    if correction is not None:
        loss = loss * correction
    if config.kl_coef:
        loss = loss + config.kl_coef * _k3(logprobs, old_logprobs)
    return loss, clipped.detach()


def correction_weights(
    config: LossConfig, old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor
) -> torch.Tensor | None:
    """Importance weights [m] between trainer and engine probabilities, without gradient; None without a correction."""
    if config.correction == "none":
        return None
    difference = (old_logprobs - behaviour_logprobs).detach()
    ratio = difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    if config.correction == "tis":
        return ratio.clamp(max=config.correction_high)
    return ratio * ((ratio >= config.correction_low) & (ratio <= config.correction_high))


def loss_sum(
    config: LossConfig, packed: Packed, logprobs: torch.Tensor, old_logprobs: torch.Tensor | None = None
) -> LossSum:
    """Σ w·ℓ over a micro-step. `logprobs` [m]: the model's, at `source` for `target`, in the packed order.

    `old_logprobs` [m]: the trainer's at the batch's version; None: the behaviour policy's (`packed.logprob`).
    Metrics, sums over targets but for the maximum: targets, clipped, kl (k3 of π against π_old), mismatch
    (|logπ_old - logβ| where old is given, else |logπ - logβ|), mismatch_max, corrected (targets whose correction
    weight was cut or dropped), weight. Raises `BadRow` when shapes differ.
    """
    arrays = packed.arrays()
    m = packed.targets
    for name, given in (("logprobs", logprobs), ("old_logprobs", old_logprobs)):
        if given is not None and given.shape != (m,):
            raise BadRow(f"expected {name} of shape ({m},), one a target of the micro-step; got {tuple(given.shape)}")
    device = logprobs.device
    weight, advantage, behaviour = (
        torch.from_numpy(array.copy()).to(device, torch.float32)
        for array in (arrays.weight, arrays.advantage, arrays.logprob)
    )
    trajectory = torch.from_numpy(arrays.trajectory.astype("int64")).to(device)
    current = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    old = behaviour if old_logprobs is None else old_logprobs.detach().to(current.dtype)
    correction = correction_weights(config, old, behaviour)
    losses, clipped = policy_loss(config, current, old, advantage, trajectory, correction)
    loss = (weight * losses).sum()

    with torch.no_grad():
        mismatch = ((current if old_logprobs is None else old) - behaviour).abs()
        corrected = 0
        if correction is not None:
            plain = (old - behaviour).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
            corrected = int((correction != plain).sum())
        metrics = {
            "targets": float(m),
            "clipped": float(clipped.sum()),
            "kl": float(_k3(current, old).sum()),
            "mismatch": float(mismatch.sum()),
            "mismatch_max": float(mismatch.max()) if m else 0.0,
            "corrected": float(corrected),
            "weight": float(weight.sum()),
        }
    return LossSum(loss, metrics)


def _k3(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-target estimate of KL(π, π_old), never negative (J. Schulman, "Approximating KL divergence", 2020)."""
    difference = (old_logprobs - logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return difference.exp() - difference - 1


def _sequence_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, trajectory: torch.Tensor) -> torch.Tensor:
    """Mean log-ratio of each target's trajectory [m]; its gradient flows through the target itself alone, so that a
    trajectory's gradient is spread over its targets as GSPO's token form has it."""
    _, group = torch.unique(trajectory, return_inverse=True)
    size = int(group.max()) + 1 if len(group) else 0
    difference = (logprobs - old_logprobs).detach()
    total = torch.zeros(size, dtype=difference.dtype, device=difference.device).index_add(0, group, difference)
    count = torch.zeros_like(total).index_add(0, group, torch.ones_like(difference))
    mean = (total / count)[group]
    return logprobs - logprobs.detach() + mean.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
