"""Policy losses over flat targets: Σ w_t · ℓ_t, so that it does not matter how a batch is cut into micro-steps."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from gyre_traj.packing import Packed


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which loss. Defaults: PPO-clip with asymmetric bounds, no correction, no KL term."""

    kind: str = "ppo"  # ppo | gspo | cispo
    clip_low: float = 0.2  # ratio >= 1 - clip_low
    clip_high: float = 0.28  # ratio <= 1 + clip_high
    dual_clip: float | None = None  # ppo: bound on -A·ratio for A < 0, > 1; None: off
    correction: str = "none"  # none | tis | icepop: weights exp(logπ_old - logβ)
    correction_low: float = 0.5  # icepop: below it a target is dropped
    correction_high: float = 2.0  # tis: truncated to it; icepop: above it a target is dropped


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-target losses ℓ [m], and which targets were clipped, bool [m]."""
    raise NotImplementedError


def correction_weights(
    config: LossConfig, old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor
) -> torch.Tensor:
    """Importance weights [m] between trainer and engine probabilities, without gradient."""
    raise NotImplementedError


def loss_sum(
    config: LossConfig, packed: Packed, logprobs: torch.Tensor, old_logprobs: torch.Tensor | None = None
) -> LossSum:
    """Σ w·ℓ over a micro-step. `logprobs` [m]: the model's, at `source` for `target`, in the packed order.

    `old_logprobs` [m]: the trainer's at the batch's version; None: the behaviour policy's (`packed.logprob`).
    Metrics (sums over targets): targets, clipped, kl (k3 of old against new), mismatch (|new - behaviour|),
    mismatch_max (a maximum), corrected (weights changed by the correction), weight.
    """
    raise NotImplementedError
