"""Losses and attention masks for packed micro-steps, in torch. Import it only where torch is installed."""

from gyre_traj.loss_config import LossConfig
from gyre_traj.torch.corrections import Correction, correction_weights
from gyre_traj.torch.kl import kl_estimate
from gyre_traj.torch.losses import LossSum, PolicyLoss, loss_sum, policy_loss
from gyre_traj.torch.masks import dense_mask
from gyre_traj.torch.mismatch import mismatch_sums, staleness_sums
from gyre_traj.torch.sequences import Sequences, check_whole

__all__ = [
    "Correction",
    "LossConfig",
    "LossSum",
    "PolicyLoss",
    "Sequences",
    "check_whole",
    "correction_weights",
    "dense_mask",
    "kl_estimate",
    "loss_sum",
    "mismatch_sums",
    "policy_loss",
    "staleness_sums",
]
