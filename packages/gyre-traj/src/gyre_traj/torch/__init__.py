"""Losses and attention masks for packed micro-steps, in torch. Import it only where torch is installed."""

from gyre_traj.torch.losses import LossConfig, LossSum, correction_weights, loss_sum, policy_loss
from gyre_traj.torch.masks import dense_mask

__all__ = ["LossConfig", "LossSum", "correction_weights", "dense_mask", "loss_sum", "policy_loss"]
