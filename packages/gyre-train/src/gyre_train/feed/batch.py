"""One optimizer step's batch: groups in, micro-steps out, sums back.

group prepared ─▶ packer ─▶ micro-steps ─▶ leases ─▶ counted          open until it has all its groups ("full")
"""

from __future__ import annotations

from gyre_train.feed.leases import Leases
from gyre_train.feed.packer import PackedStep, Packer
from gyre_train.feed.prepare import Fated, PreparedGroup


class Batch:
    """Batch `index` (from 0), trained on the weights of `version`.

    size: groups it is made of. manifest: of the snapshot that satellites pull. opened: seconds on the caller's clock.
    """

    def __init__(
        self,
        index: int,
        *,
        version: int,
        manifest: bytes,
        size: int,
        packer: Packer,
        core: int,
        lease: float,
        now: float,
    ) -> None:
        self.index = index
        self.version = version
        self.manifest = manifest
        self.size = size
        self.packer = packer
        self.opened = now
        self.groups: list[PreparedGroup] = []
        self.leases = Leases(core=core, lease=lease, now=now)
        self.tokens_computed = 0
        self.targets_computed = 0
        self.largest = 0  # tokens of the largest micro-step
        self.resets = 0
        self._packed: list[bytes] = []

    @property
    def full(self) -> bool:
        """All groups are in."""
        return len(self.groups) == self.size

    @property
    def executions(self) -> int:
        """|E| of the groups so far: placeholders and zero advantages included, exclusions not."""
        return sum(e.fated is not Fated.EXCLUDED for g in self.groups for e in g.executions)

    def add(self, group: PreparedGroup, micro_steps: list[PackedStep]) -> None:
        """The next group, and the micro-steps that its arrival completed."""
        self.groups.append(group)
        for step in micro_steps:
            self.leases.add()
            self._packed.append(step.data)
            self.tokens_computed += step.tokens
            self.targets_computed += step.targets
            self.largest = max(self.largest, step.tokens)
        if self.full:
            self.leases.seal()

    def packed(self, micro_step: int) -> bytes:
        """`gyre_traj.Packed` of a micro-step, msgpack."""
        return self._packed[micro_step]

    def shrink(self) -> None:
        """The batch is closed: keep what late hand-overs ask about, not the data."""
        self._packed = []

    def reset(self, version: int, manifest: bytes, now: float) -> None:
        """The core opens the batch again: same executions, same micro-steps, nothing counted."""
        self.version, self.manifest = version, manifest
        self.leases.reset(now)
        self.resets += 1
