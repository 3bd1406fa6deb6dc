"""[feed]: from finished executions to micro-steps."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class FeedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[feed]"""

    j_max: int = 3  # trajectories kept an execution
    tokens: int = 1024  # a micro-step's budget
    advantage: Literal["mean_std", "mean"] = "mean_std"  # (score - mean) / std of the group, or score - mean
    counting: Literal["once", "per_trajectory"] = "once"  # how a sampled token shared by trajectories counts
    # Rows whose advantage is exactly 0 have exactly zero gradient under a clipped policy loss: they count in the
    # batch's denominator but are not computed. Wrong beside a KL or entropy term, which pulls on every target.
    skip_zero_advantage: bool = True
    lease_s: float = 15.0  # a trainer not heard for so long loses its micro-steps
    group_timeout: float | None = None  # seconds from a group's first member until it goes on without those missing
    layout: Literal["rows", "forests"] = "forests"  # forests: what trajectories share is computed once a micro-step
    max_groups: int = 4096  # groups held that no batch has trained yet; beyond, submissions are refused

    def __post_init__(self) -> None:
        for name in ("j_max", "tokens", "max_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if not (math.isfinite(self.lease_s) and self.lease_s > 0):
            raise ValueError(f"lease_s must be a positive number of seconds, got {self.lease_s!r}")
        if self.group_timeout is not None and not self.group_timeout > 0:
            raise ValueError(f"group_timeout must be a positive number of seconds, got {self.group_timeout!r}")
