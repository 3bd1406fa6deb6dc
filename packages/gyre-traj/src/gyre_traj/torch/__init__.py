"""Losses and attention masks for packed micro-steps, in torch. Import it only where torch is installed."""

from gyre_traj.loss_config import LossConfig
from gyre_traj.torch.corrections import Correction, correction_weights
from gyre_traj.torch.inputs import input_ids, position_ids
from gyre_traj.torch.kl import kl_estimate, kl_term
from gyre_traj.torch.logprobs import target_logprobs
from gyre_traj.torch.losses import LossSum, PolicyLoss, loss_sum, policy_loss
from gyre_traj.torch.masks import block_mask, dense_mask
from gyre_traj.torch.mismatch import mismatch_sums, staleness_sums
from gyre_traj.torch.sequences import Sequences, check_whole

__all__ = [
    "Correction",
    "LossConfig",
    "LossSum",
    "PolicyLoss",
    "Sequences",
    "block_mask",
    "check_whole",
    "correction_weights",
    "dense_mask",
    "input_ids",
    "kl_estimate",
    "kl_term",
    "loss_sum",
    "mismatch_sums",
    "policy_loss",
    "position_ids",
    "staleness_sums",
    "target_logprobs",
]
