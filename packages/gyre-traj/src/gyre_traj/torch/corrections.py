"""Corrections between the trainer's probabilities and the engine's: weights, rejection and veto.

Both compute the same model, and differ: in kernels, in precision, in version. With r_t = exp(logp_t - logβ_t), where p
is the trainer's policy (π_old where the trainer recomputed it, else the current one) and β the behaviour policy:

    level       ratio R of a target
    token       r_t
    sequence    Π r over the targets of its trajectory                      unbiased, of large variance
    geometric   the geometric mean of r over them                           does not grow with length

    bound       weight c of a target
    truncate    min(R, high)                    token: TIS, fengyao.notion.site/off-policy-rl, after Ionides, 2008
    mask        R inside [low, high], else 0    token: IcePop, arXiv 2510.18855; sequence: richardli.xyz/rl-collapse
    (reject)    c = 0 where R, at a level of its own, is outside [reject_low, reject_high], else c as it was
    (veto)      c = 0 in the whole trajectory when one of its tokens has r < veto

Weights multiply the policy's loss alone, carry no gradient, and do not change w_t: a rejected target stays in the
denominator, as it must where a batch is a stream of sums. (verl takes rejected tokens out of its means.)
Log-ratios are clamped to ±20 after they are summed over a trajectory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gyre_traj.errors import BadRow
from gyre_traj.loss_config import LossConfig
from gyre_traj.torch.sequences import Sequences

LOG_RATIO_LIMIT = 20.0  # a ratio beyond e^20 says nothing more, and overflows


class Correction(NamedTuple):
    """All [m], without gradient."""

    weight: torch.Tensor  # c
    truncated: torch.Tensor  # bool: the weight was cut to its bound
    rejected: torch.Tensor  # bool: the weight became 0, by mask, reject or veto
    vetoed: torch.Tensor  # bool: by veto


def correction_weights(
    config: LossConfig, logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, sequences: Sequences | None = None
) -> Correction | None:
    """Weights of targets from the trainer's and the engine's log-probabilities [m]; None where the config has none.

    `sequences` may be left out where the config looks at tokens alone. Raises `BadRow`.
    """
    unbounded = config.kind == "decoupled" and config.bounded is None
    if not (unbounded or config.bounded or config.reject != "none" or config.veto is not None):
        return None
    log_ratio = (logprobs - behaviour_logprobs).detach()
    weight = torch.ones_like(log_ratio)
    none = torch.zeros_like(log_ratio, dtype=torch.bool)
    truncated = rejected = vetoed = none
    if unbounded:
        weight = _ratio(log_ratio, "token", sequences)
    elif config.bounded:
        level, bound = config.bounded
        weight = _ratio(log_ratio, level, sequences)
        above = weight > config.correction_high
        if bound == "truncate":
            weight, truncated = weight.clamp(max=config.correction_high), above
        else:
            rejected = above | (weight < config.correction_low)
    if config.reject != "none":
        ratio = _ratio(log_ratio, config.reject, sequences)
        rejected = rejected | (ratio < config.reject_low) | (ratio > config.reject_high)
    if config.veto is not None:
        whole = _whole(sequences, "veto")
        vetoed = whole.spread(whole.any(log_ratio < math.log(config.veto)))
    rejected = rejected | vetoed
    return Correction(weight.masked_fill(rejected, 0.0), truncated & ~rejected, rejected, vetoed)


def _ratio(log_ratio: torch.Tensor, level: str, sequences: Sequences | None) -> torch.Tensor:
    if level != "token":
        whole = _whole(sequences, level)
        level_sum = whole.sum(log_ratio) if level == "sequence" else whole.mean(log_ratio)
        log_ratio = whole.spread(level_sum).to(log_ratio.dtype)
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _whole(sequences: Sequences | None, what: str) -> Sequences:
    if sequences is None:
        raise BadRow(
            f"{what!r} looks at whole trajectories: give sequences=Sequences(trajectory number of each target)"
        )
    return sequences
