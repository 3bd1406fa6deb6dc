"""Policy losses over flat targets: Σ w_t · ℓ_t, so that it does not matter how a batch is cut into micro-steps.

ρ_t = exp(logπ_t - logπ_old_t), A the advantage, c_t the correction weight (1 without one), sg: no gradient.

    kind        ℓ
    ppo         c · max(-A ρ, -A clip(ρ, 1 - low, 1 + high))             Schulman et al., arXiv 1707.06347
                  bounds apart: DAPO, 2503.14476; for A < 0 at most -A · dual_clip: Ye et al., 1912.09729
    decoupled   as ppo, with c = π_old / β where no correction bounds it   Hilton et al., 2110.00641; AReaL, 2505.24298
    gspo        as ppo, with ρ the exponential of the mean log-ratio over the trajectory's targets, whose gradient is
                  spread over them (the paper's GSPO-token)                Zheng et al., 2507.18071
    cispo       -c · sg(clip(ρ, 1 - low, 1 + high)) · A · logπ            MiniMax-M1, 2506.13585
    reinforce   -c · A · logπ                                              Williams, 1992
    + kl_coef · KL estimate (`kl`), - entropy_coef · entropy; c (`corrections`) multiplies neither

Three policies can be at work: β, which sampled (the engine's log-probabilities, `Packed.logprob`); π_old, from which
the update is measured and clipped; and π, which is trained. The whole importance weight of a token is π/β, and it is
counted once, in one of two ways:

    π_old                       ρ          c corrects            so c · ρ is
    β (old_logprobs not given)  π / β      nothing: refused      π / β, clipped
    recomputed by the trainer   π / π_old  π_old / β             (π_old / β, bounded) · (π / π_old, clipped)

reinforce has no ratio, so that its c may correct sg(π) / β without π_old. A rejection or a veto only leaves targets
out, and goes with either; it reads π_old / β where π_old was recomputed, else sg(π) / β. With a correction, kind "ppo"
is decoupled PPO with the weight bounded: "decoupled" is the name of the unbounded one, and demands old_logprobs.

Log-ratios are clamped to ±20. Log-probabilities may come in bf16, and are then as coarse as that: compute them in
float32. gspo, and corrections over sequences, need all targets of a trajectory in one micro-step (`check_whole`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gyre_traj.errors import BadRow, NotFinite
from gyre_traj.loss_config import LossConfig
from gyre_traj.packing import Packed, PackedArrays
from gyre_traj.torch.corrections import LOG_RATIO_LIMIT, Correction, correction_weights
from gyre_traj.torch.kl import kl_estimate, kl_term
from gyre_traj.torch.mismatch import mismatch_sums, staleness_sums
from gyre_traj.torch.sequences import Sequences


class LossSum(NamedTuple):
    """`loss` = Σ w·ℓ (a scalar to call backward on), and the metrics that `loss_sum` names."""

    loss: torch.Tensor
    metrics: dict[str, float]


class PolicyLoss(NamedTuple):
    """All [m]."""

    loss: torch.Tensor  # ℓ without KL and entropy
    clipped: torch.Tensor  # bool: the clip decided the loss, and (but for cispo) took its gradient
    outside: torch.Tensor  # bool: ρ lies outside the clip's bounds


def policy_loss(
    config: LossConfig,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: Sequences | None = None,
    correction: torch.Tensor | None = None,
) -> PolicyLoss:
    """The policy's loss of each target; inputs are [m], `correction` the weights c. Raises `BadRow`.

    `sequences` says which targets belong together; gspo alone reads it.
    """
    if config.kind == "reinforce":
        none = torch.zeros_like(logprobs, dtype=torch.bool)
        return PolicyLoss(_corrected(-advantages * logprobs, correction), none, none)
    if config.kind == "gspo":
        log_ratio = _sequence_log_ratio(logprobs, old_logprobs, sequences)
    else:
        log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    outside = bounded.detach() != ratio.detach()
    if config.kind == "cispo":
        return PolicyLoss(_corrected(-bounded.detach() * advantages * logprobs, correction), outside, outside)
    plain, limited = -advantages * ratio, -advantages * bounded
    loss, clipped = torch.maximum(plain, limited), (limited > plain).detach()
    if config.dual_clip is not None:
        ceiling = -advantages * config.dual_clip
        over = (advantages < 0) & (loss.detach() > ceiling)
        loss, clipped = torch.where(over, ceiling, loss), clipped | over
    return PolicyLoss(_corrected(loss, correction), clipped, outside)


def loss_sum(
    config: LossConfig,
    packed: Packed,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None = None,
    *,
    reference_logprobs: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
    version: int | None = None,
) -> LossSum:
    """Σ w·ℓ over a micro-step. All tensors are [m], one number a target, in the packed order.

    `logprobs`: the model's at `source` for `target`. `old_logprobs`: the trainer's, π_old; None: the behaviour policy's
    (`packed.logprob`). `reference_logprobs`: for kl_against="reference", and for its metric. `entropies`: of the
    distributions the targets were drawn from, for the bonus and its metric. `version`: the batch's, for staleness.
    bf16 and float16 are widened to float32; float64 stays.

    Metrics, to be merged by `gyre_traj.metrics.merge_metrics`: `targets`; `weight` (Σ w); `clipped`; `outside`; `kl`
    (k3 of π against π_old); `reference_kl` (k3) and `entropy` where given; `corrected` (c was cut or became 0),
    `rejected` (c became 0), `vetoed` (by the veto): numbers of targets; and the sums of `gyre_traj.torch.mismatch`.

    Raises `NotFinite` for log-probabilities that are not, `BadRow` for shapes that do not fit and trajectories that do
    not hold together, `BadChoice` when config and inputs contradict each other.
    """
    arrays = packed.arrays()
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "reference_logprobs": reference_logprobs}
    _check(packed, arrays, {**given, "entropies": entropies})
    config.check_policies(recomputed=old_logprobs is not None)
    if config.kl_coef and config.kl_against == "reference" and reference_logprobs is None:
        raise BadRow("kl_against='reference' needs reference_logprobs, one a target; or take kl_against='old'")
    if config.entropy_coef and entropies is None:
        raise BadRow(f"entropy_coef={config.entropy_coef!r} needs entropies, one a target; or set it to 0")

    current = _widen(logprobs)
    weight, advantage, behaviour = (
        torch.from_numpy(array.copy()).to(current.device, current.dtype)
        for array in (arrays.weight, arrays.advantage, arrays.logprob)
    )
    old = behaviour if old_logprobs is None else old_logprobs.detach().to(current.dtype)
    reference = None if reference_logprobs is None else reference_logprobs.detach().to(current.dtype)
    trainer = current.detach() if old_logprobs is None else old
    sequences = _sequences(arrays, current.device) if config.by_sequence else None

    correction = correction_weights(config, trainer, behaviour, sequences)
    policy = policy_loss(config, current, old, advantage, sequences, correction and correction.weight)
    loss = policy.loss
    if config.kl_coef:
        against = reference if config.kl_against == "reference" and reference is not None else old
        loss = loss + config.kl_coef * kl_term(config, current, against, behaviour)
    if config.entropy_coef and entropies is not None:
        loss = loss - config.entropy_coef * _widen(entropies)

    with torch.no_grad():
        sums = {"weight": weight.double().sum(), "clipped": policy.clipped.sum(), "outside": policy.outside.sum()}
        sums["kl"] = kl_estimate("k3", current.double(), old).sum()
        if reference is not None:
            sums["reference_kl"] = kl_estimate("k3", current.double(), reference).sum()
        if entropies is not None:
            sums["entropy"] = entropies.double().sum()
        sums |= _correction_sums(correction, current.device) | mismatch_sums(trainer, behaviour)
        if version is not None:
            sums |= staleness_sums(torch.from_numpy(arrays.version).to(current.device), version)
        numbers = torch.stack([value.double() for value in sums.values()]).tolist()
    return LossSum((weight * loss).sum(), {"targets": float(packed.targets), **dict(zip(sums, numbers, strict=True))})


def _widen(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _corrected(loss: torch.Tensor, correction: torch.Tensor | None) -> torch.Tensor:
    return loss if correction is None else loss * correction


def _sequence_log_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: Sequences | None
) -> torch.Tensor:
    """Mean log-ratio of each target's trajectory [m]; its gradient flows through the target itself alone, so that a
    trajectory's gradient is spread over its targets as GSPO's token form has it."""
    if sequences is None:
        raise BadRow("gspo looks at whole trajectories: give sequences=Sequences(trajectory number of each target)")
    mean = sequences.mean((logprobs - old_logprobs).detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return logprobs - logprobs.detach() + sequences.spread(mean).to(logprobs.dtype)


def _correction_sums(correction: Correction | None, device: torch.device) -> dict[str, torch.Tensor]:
    if correction is None:
        zero = torch.zeros((), device=device)
        return {"corrected": zero, "rejected": zero, "vetoed": zero}
    return {
        "corrected": (correction.truncated | correction.rejected).sum(),
        "rejected": correction.rejected.sum(),
        "vetoed": correction.vetoed.sum(),
    }


def _sequences(arrays: PackedArrays, device: torch.device) -> Sequences:
    """Who belongs together; raises `BadRow` where trajectory numbers are not unique."""
    sequences = Sequences(torch.from_numpy(arrays.trajectory.astype("int64")).to(device))
    sequences.check("execution", torch.from_numpy(arrays.execution.astype("int64")).to(device))
    sequences.check("advantage", torch.from_numpy(arrays.advantage).to(device))
    return sequences


def _check(packed: Packed, arrays: PackedArrays, given: dict[str, torch.Tensor | None]) -> None:
    """Raise `BadRow` unless each tensor given has a number a target, `NotFinite` naming one that is not finite."""
    m = packed.targets
    for name, values in given.items():
        if values is None:
            continue
        if values.shape != (m,):
            raise BadRow(f"expected {name} of shape ({m},), one a target of the micro-step; got {tuple(values.shape)}")
        if not bool((finite := values.isfinite()).all()):
            at = int((~finite).int().argmax())
            raise NotFinite(
                f"{name} of target {at} is {values[at].item()!r}: token id {int(arrays.target[at])} predicted from "
                f"token {int(arrays.source[at])}, trajectory {int(arrays.trajectory[at])} of execution "
                f"{packed.executions[int(arrays.execution[at])]!r}; a sampled token has a probability: look for logits "
                "that are masked or overflow, or that were gathered at other places than the packed ones"
            )
