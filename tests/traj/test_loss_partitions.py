"""The loss of a batch, its gradient and its metrics do not depend on how rows are cut into micro-steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_traj import Packed, Row, mean_metrics, merge_metrics, pack_forests, pack_rows
from gyre_traj.errors import BadRow
from gyre_traj.torch import LossConfig, Sequences, check_whole, loss_sum, policy_loss

KINDS = ("ppo", "decoupled", "gspo", "cispo", "reinforce")
CORRECTIONS = ("none", *(f"{a}-{b}" for a in ("token", "sequence", "geometric") for b in ("truncate", "mask")))
Pack = Callable[[Sequence[Row], int], list[Packed]]


@dataclass
class Batch:
    """Random branching rows, and by (trajectory, place in its row) the log-probabilities of three more policies."""

    rows: list[Row]
    current: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray

    @classmethod
    def random(cls, seed: int, n_rows: int) -> Batch:
        random = np.random.default_rng(seed)
        trunk = random.integers(0, 50, 12)
        rows = []
        for number in range(n_rows):
            n = int(random.integers(2, 16))
            shared = int(random.integers(0, min(n, 12)))
            ids = np.concatenate([trunk[:shared], random.integers(50, 99, n - shared)]).astype(np.uint32)
            target = random.random(n) < 0.6
            target[0], target[-1] = False, True
            logprobs = (-random.exponential(1.0, n)).astype(np.float32)
            rows.append(
                Row(f"e{number % 3}", number, ids, target, logprobs, float(random.random()), float(random.normal()))
            )
        shape = (n_rows, 16)
        behaviour = np.zeros(shape)
        for row in rows:
            behaviour[row.trajectory, : len(row.ids)] = row.logprobs
        old = behaviour + random.normal(0, 0.3, shape)
        return cls(rows, old + random.normal(0, 0.3, shape), old, old + random.normal(0, 0.5, shape), -behaviour)

    def computed(self, config: LossConfig, packs: list[Packed], *, recomputed: bool) -> tuple[float, np.ndarray, dict]:
        """Σ over micro-steps of the loss, its gradient by (trajectory, place), and the merged metrics."""
        current = torch.tensor(self.current, requires_grad=True)
        total, parts = 0.0, []
        for packed in packs:
            arrays = packed.arrays()
            where = arrays.trajectory.astype("int64"), arrays.position[arrays.source].astype("int64") + 1
            got = loss_sum(
                config,
                packed,
                current[where],
                torch.tensor(self.old[where]) if recomputed else None,
                reference_logprobs=torch.tensor(self.reference[where]),
                entropies=torch.tensor(self.entropy[where]),
            )
            got.loss.backward()
            total += got.loss.item()
            parts.append(got.metrics)
        assert current.grad is not None
        return total, current.grad.numpy(), merge_metrics(parts)


def same(one: tuple[float, np.ndarray, dict], other: tuple[float, np.ndarray, dict]) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    np.testing.assert_allclose(one[1], other[1], atol=1e-10, rtol=0)
    assert one[2] == pytest.approx(other[2], rel=1e-9, abs=1e-9)


@st.composite
def configs(draw: st.DrawFn) -> tuple[LossConfig, bool]:
    """Any config there is, and whether π_old is recomputed."""
    recomputed = draw(st.booleans())
    kind = draw(st.sampled_from([kind for kind in KINDS if recomputed or kind != "decoupled"]))
    estimator, gradient = draw(
        st.sampled_from([*itertools.product(("k2", "k3"), ("plain", "k2", "ratio")), ("k1", "ratio"), ("k1", "k2")])
    )
    config = LossConfig(
        kind=kind,
        dual_clip=draw(st.sampled_from([None, 1.5])) if kind in ("ppo", "decoupled") else None,
        correction=draw(st.sampled_from(CORRECTIONS)) if recomputed or kind == "reinforce" else "none",
        correction_low=0.7,
        correction_high=1.4,
        reject=draw(st.sampled_from(["none", "token", "sequence", "geometric"])),
        veto=draw(st.sampled_from([None, 0.6])),
        kl_coef=draw(st.sampled_from([0.0, 0.1])),
        kl_estimator=estimator,
        kl_gradient=gradient,
        kl_against=draw(st.sampled_from(["old", "reference"])),
        entropy_coef=draw(st.sampled_from([0.0, 0.01])),
    )
    return config, recomputed


@st.composite
def partitions(draw: st.DrawFn, rows: list[Row]) -> list[Packed]:
    """Rows in any order, in any parts, each packed under any budget as rows or as forests."""
    order = draw(st.permutations(rows))
    cuts = sorted(draw(st.sets(st.integers(1, len(rows)), max_size=len(rows))) | {0, len(rows)})
    packs: list[Packed] = []
    for first, last in itertools.pairwise(cuts):
        pack: Pack = draw(st.sampled_from([pack_rows, pack_forests]))
        packs += pack(order[first:last], draw(st.integers(1, 80)))
    return draw(st.permutations(packs))


@settings(deadline=None, max_examples=200)
@given(st.data(), configs(), st.integers(0, 10_000), st.integers(1, 9))
def test_any_partition_gives_the_batch(
    data: st.DataObject, config: tuple[LossConfig, bool], seed: int, n_rows: int
) -> None:
    loss, recomputed = config
    batch = Batch.random(seed, n_rows)
    packs = data.draw(partitions(batch.rows))
    check_whole(packs)
    whole = pack_rows(batch.rows, 10_000)
    assert len(whole) == 1
    same(
        batch.computed(loss, packs, recomputed=recomputed),
        batch.computed(loss, whole, recomputed=recomputed),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_kind_with_every_correction(kind: str, correction: str) -> None:
    """One row a micro-step against all in one: rows and forests."""
    batch = Batch.random(7, 9)
    config = LossConfig(kind=kind, correction=correction, correction_low=0.8, correction_high=1.2, veto=0.6)
    apart = [packed for row in batch.rows for packed in pack_rows([row], 100)]
    expected = batch.computed(config, apart, recomputed=True)
    assert 0 < expected[2]["vetoed"] < expected[2]["targets"]
    for pack, budget in itertools.product((pack_rows, pack_forests), (20, 50, 10_000)):
        same(batch.computed(config, pack(batch.rows, budget), recomputed=True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    """cispo and reinforce with the weight held still; gspo by its sequence form, -A exp(mean log-ratio) a target."""
    random = np.random.default_rng(3)
    rows = torch.tensor([0, 0, 0, 1, 1, 2])
    old = torch.tensor(-random.exponential(1.0, 6))
    new = old + torch.tensor(random.normal(0, 0.05, 6))  # inside the clip
    advantages = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, 2.0], dtype=torch.float64)
    held = {"cispo": (new - old).exp()}.get(kind)
    config = LossConfig(kind=kind)

    def value(logprobs: torch.Tensor) -> float:
        if held is not None:
            return float((-held * advantages * logprobs).sum())
        return float(policy_loss(config, logprobs, old, advantages, Sequences(rows)).loss.sum())

    leaf = new.clone().requires_grad_()
    policy_loss(config, leaf, old, advantages, Sequences(rows)).loss.sum().backward()
    step = 1e-6
    for i in range(6):
        shift = torch.zeros(6, dtype=torch.float64)
        shift[i] = step
        assert leaf.grad is not None
        assert leaf.grad[i].item() == pytest.approx((value(new + shift) - value(new - shift)) / (2 * step), abs=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_on_a_gpu(kind: str) -> None:
    batch = Batch.random(7, 9)
    config = LossConfig(kind=kind, correction="sequence-truncate", reject="geometric", veto=0.1, kl_coef=0.1)
    for packed in pack_forests(batch.rows, 60):
        logprobs = -torch.rand(packed.targets)
        one, other = (
            loss_sum(config, packed, logprobs.to(device), (logprobs - 0.1).to(device), version=1)
            for device in ("cpu", "cuda")
        )
        torch.testing.assert_close(other.loss.cpu(), one.loss)
        assert other.metrics == pytest.approx(one.metrics, rel=1e-4)


# --- what a sequence-level loss takes for granted -------------------------------------------------------------------


def test_a_trajectory_in_two_micro_steps_is_told() -> None:
    batch = Batch.random(1, 4)
    packs = [packed for row in batch.rows for packed in pack_rows([row], 100)]
    check_whole(packs)
    with pytest.raises(BadRow, match="trajectory 2 has targets in micro-steps 2 and 4"):
        check_whole([*packs, packs[2]])


@pytest.mark.parametrize(("changes", "told"), [({"execution": 2}, "execution"), ({"advantage": 0.25}, "advantage")])
@pytest.mark.parametrize("config", [LossConfig(kind="gspo"), LossConfig(veto=0.1), LossConfig(reject="geometric")])
def test_a_trajectory_that_does_not_hold_together_is_told(config: LossConfig, changes: dict, told: str) -> None:
    """Two trajectories are numbered alike."""
    (packed,) = pack_rows(Batch.random(1, 4).rows, 1000)
    first, second, *others = packed.rows
    first = msgspec.structs.replace(first, execution=0)
    twin = msgspec.structs.replace(
        second, **{"trajectory": first.trajectory, "execution": 0, "advantage": first.advantage, **changes}
    )
    broken = msgspec.structs.replace(packed, rows=(first, twin, *others))
    logprobs = torch.from_numpy(packed.arrays().logprob.copy())
    with pytest.raises(BadRow, match=f"trajectory {first.trajectory} differ in {told}"):
        loss_sum(config, broken, logprobs)
    loss_sum(LossConfig(), broken, logprobs)  # a loss of single tokens does not care


def test_staleness_comes_with_the_versions() -> None:
    """Two rows, sampled by versions 3 and 5; one target's version is not known."""
    ids, logprobs = np.arange(3, dtype=np.uint32), np.zeros(3, np.float32)
    target = np.array([False, True, True])
    rows = [
        Row("a", 0, ids, target, logprobs, 1.0, 1.0, version=[-1, 3, 3]),
        Row("b", 1, ids + 9, target, logprobs, 1.0, 1.0, version=[-1, 5, -1]),
    ]
    parts = [loss_sum(LossConfig(), p, torch.zeros(2), version=5).metrics for row in rows for p in pack_rows([row], 9)]
    merged = merge_metrics(parts)
    assert (merged["staleness"], merged["staleness_max"], merged["versioned"]) == (4.0, 2.0, 3.0)
    assert mean_metrics(merged)["staleness"] == pytest.approx(4 / 3)
    assert "staleness" not in loss_sum(LossConfig(), pack_rows(rows, 9)[0], torch.zeros(4)).metrics
