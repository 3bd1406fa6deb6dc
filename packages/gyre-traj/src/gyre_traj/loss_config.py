"""Which loss: names, bounds, and which of them go together. Needs no torch, so that configs are read anywhere.

The formulas are in `gyre_traj.torch.losses`, `gyre_traj.torch.corrections` and `gyre_traj.torch.kl`.
"""

from __future__ import annotations

import msgspec

from gyre_traj.errors import BadChoice

KINDS = ("ppo", "decoupled", "gspo", "cispo", "reinforce")
LEVELS = ("token", "sequence", "geometric")
CORRECTIONS = {f"{level}-{bound}": (level, bound) for level in LEVELS for bound in ("truncate", "mask")}
ALIASES = {"tis": "token-truncate", "icepop": "token-mask"}
ESTIMATORS = ("k1", "k2", "k3")
GRADIENTS = ("plain", "k2", "ratio")


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which loss. Defaults: PPO-clip with asymmetric bounds, no correction, no KL term. Raises `BadChoice`."""

    kind: str = "ppo"  # ppo | decoupled | gspo | cispo | reinforce
    clip_low: float = 0.2  # ratio >= 1 - clip_low; reinforce has no ratio to clip
    clip_high: float = 0.28  # ratio <= 1 + clip_high
    dual_clip: float | None = None  # ppo, decoupled: ℓ <= -A·dual_clip for A < 0, > 1; None: off
    correction: str = "none"  # none | (token | sequence | geometric)-(truncate | mask); tis, icepop: the two of tokens
    correction_low: float = 0.5  # mask: weights below become 0
    correction_high: float = 2.0  # truncate: weights are cut to it; mask: weights above become 0
    reject: str = "none"  # none | token | sequence | geometric: leave out what lies outside the two bounds
    reject_low: float = 0.5
    reject_high: float = 2.0
    veto: float | None = None  # leave out trajectories with a token whose ratio is below it, in (0, 1); None: off
    kl_coef: float = 0.0
    kl_estimator: str = "k3"  # k1 | k2 | k3
    kl_gradient: str = "plain"  # plain | k2 | ratio: see gyre_traj.torch.kl
    kl_against: str = "old"  # old | reference: the log-probabilities of a reference policy, passed in
    entropy_coef: float = 0.0  # bonus; entropies are passed in

    def __post_init__(self) -> None:
        for name, choices in (
            ("kind", KINDS),
            ("correction", ("none", *CORRECTIONS, *ALIASES)),
            ("reject", ("none", *LEVELS)),
            ("kl_estimator", ESTIMATORS),
            ("kl_gradient", GRADIENTS),
            ("kl_against", ("old", "reference")),
        ):
            if (value := getattr(self, name)) not in choices:
                said = "loss kind" if name == "kind" else name
                raise BadChoice(f"unknown {said} {value!r}; choose one of {list(choices)}")
        if not (self.clip_low >= 0 and self.clip_high >= 0):
            raise BadChoice(f"clip_low and clip_high must be >= 0, got {self.clip_low!r} and {self.clip_high!r}")
        if self.dual_clip is not None and (self.kind not in ("ppo", "decoupled") or not self.dual_clip > 1):
            raise BadChoice(
                f"dual_clip is for kind 'ppo' or 'decoupled' and above 1, got {self.dual_clip!r} for {self.kind!r}"
            )
        for name in ("correction", "reject"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if not 0 <= low <= high:
                raise BadChoice(f"expected 0 <= {name}_low <= {name}_high, got {low!r} and {high!r}")
        if self.correction_high == 0:
            raise BadChoice("correction_high=0.0 would take every weight; choose a bound above 0, usually above 1")
        if self.veto is not None and not 0 < self.veto < 1:
            raise BadChoice(f"veto is a ratio in (0, 1), usually about 1e-4, got {self.veto!r}; None turns it off")
        for name in ("kl_coef", "entropy_coef"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadChoice(f"{name} must be a finite number >= 0, got {getattr(self, name)!r}")
        if self.kl_coef and self.kl_estimator == "k1" and self.kl_gradient == "plain":
            raise BadChoice(
                "the gradient of the plain k1 estimator is 0 on average, whatever the divergence; with "
                "kl_estimator='k1' take kl_gradient='k2' or 'ratio', or estimate by 'k2' or 'k3'"
            )

    @property
    def bounded(self) -> tuple[str, str] | None:
        """Level and bound of the correction's weights; None without a correction."""
        return CORRECTIONS.get(ALIASES.get(self.correction, self.correction))

    @property
    def by_sequence(self) -> bool:
        """Whether the loss of a target depends on the other targets of its trajectory."""
        levels = {self.reject, self.bounded[0] if self.bounded else "none"}
        return self.kind == "gspo" or self.veto is not None or not levels <= {"none", "token"}

    def check_policies(self, *, recomputed: bool) -> None:
        """Raise `BadChoice` when something would be counted twice, or nothing be left to correct.

        recomputed: whether π_old is the trainer's own, so that π_old / β is the mismatch of trainer and engine. Where
        it is β itself, the ratio of ppo, gspo and cispo holds that mismatch already.
        """
        if self.kind == "decoupled" and not recomputed:
            raise BadChoice(
                "kind 'decoupled' needs the proximal policy's log-probabilities (old_logprobs), recomputed by the "
                "trainer; without them it is kind 'ppo'"
            )
        if self.bounded and not recomputed and self.kind != "reinforce":
            raise BadChoice(
                f"correction {self.correction!r} needs old_logprobs recomputed by the trainer: the ratio of "
                f"{self.kind!r} against the behaviour policy holds the mismatch already; leave the correction out, or "
                "use reject or veto, which only leave out"
            )
