"""The learning rate as a pure function of the step: nothing to advance twice, nothing to save."""

from __future__ import annotations

import math

from gyre_train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (the first is 0) in a run of `steps`.

    It climbs linearly to `lr` over `warmup_steps` (step 0 already takes lr / warmup_steps), then decays from `lr` and
    would reach `min_lr` at step `steps`; beyond that it stays there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    span = max(1, steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left
