"""[train]: how a replica computes, what it minimises and how it steps.

    [train]
    dtype = "bf16"
    [train.optimizer]
    lr = 3e-5
    [train.loss]
    kind = "ppo"

The number of optimizer steps is [run].steps, the model is [model].
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from gyre_traj import loss_config


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[model], as far as the trainer reads it."""

    path: str  # Hugging Face folder
    name: str = "policy"


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[train.optimizer]: AdamW with a warm-up and a decay."""

    lr: float = 1e-6
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0  # not applied to biases and norms
    clip_grad: float = 1.0  # L2 norm of the whole gradient; 0 does not clip
    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "eps", "weight_decay", "clip_grad", "warmup_steps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must not exceed lr={self.lr!r}, got {self.min_lr!r}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas!r}")


class LossConfig(loss_config.LossConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[train.loss]: the policy loss per sampled token, as of `gyre_traj.loss_config`, and what pi_old is."""

    old: Literal["behaviour", "recompute"] = (
        "behaviour"  # pi_old: the engine's, or the trainer's at the batch's version
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        recompute = self.old == "recompute"
        if self.kl_coef and self.kl_against == "old" and recompute:
            raise ValueError(
                "kl_coef does nothing with old='recompute', which is the policy itself; use old='behaviour'"
            )
        if self.bounded and not recompute and self.kind != "reinforce":
            raise ValueError(
                f"correction={self.correction!r} does nothing with old='behaviour', whose ratio holds it already; "
                "use old='recompute'"
            )
        if self.kind == "decoupled" and not recompute:
            raise ValueError("kind='decoupled' needs a proximal policy beside the behaviour's; use old='recompute'")
        if self.kl_coef and self.kl_against == "reference":
            raise ValueError("kl_against='reference' needs a reference policy, which no cell holds; use 'old'")
        if self.entropy_coef:
            raise ValueError(f"entropy_coef must be 0: trainers compute no entropies, got {self.entropy_coef!r}")


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[train]"""

    dtype: Literal["bf16", "fp32"] = "bf16"  # of parameters and activations; gradients and optimizer state are fp32
    threads: int = 1  # CPU threads a trainer computes with
    seed: int = 0
    recompute: bool = False  # recompute activations in the backward pass: about half the memory, a third slower
    max_length: int = 0  # longest position a micro-step may hold; 0: the model's own limit
    logit_chunk: int = 512  # target positions whose [chunk, vocab] logits exist at a time
    tensor_parallel: int = 1
    checkpoint_every: int = 1  # optimizer steps; 0: only the last
    keep_checkpoints: int = 2
    agent_deadline: float = 120.0  # seconds without an answer of the cell agent or the feed before the trainer exits
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()

    def __post_init__(self) -> None:
        if self.tensor_parallel != 1:
            raise ValueError(f"tensor_parallel must be 1 in this version, got {self.tensor_parallel!r}")
        for name in ("threads", "logit_chunk", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.checkpoint_every < 0 or self.max_length < 0:
            raise ValueError("checkpoint_every and max_length must be >= 0")
