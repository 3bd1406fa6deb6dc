"""Corrections between trainer and engine: closed forms, and what verl 0.9.1 and TRL 1.16.0 make of the same inputs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from gyre_traj.errors import BadRow
from gyre_traj.torch import LossConfig, Sequences, correction_weights, loss_sum

FIXTURES = Path(__file__).parents[1] / "fixtures"
INPUTS = {case["seed"]: case for case in json.loads((FIXTURES / "losses.json").read_text())["cases"]}
ORACLE = json.loads((FIXTURES / "traj" / "corrections.json").read_text())["cases"]


def cut(case: dict, name: str) -> list[list[float]]:
    """An input of the oracle, its rows without padding."""
    inputs = INPUTS[case["seed"]]
    return [row[:n] for row, n in zip(inputs[name], inputs["lengths"], strict=True)]


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def sequences(rows: list[list[float]]) -> Sequences:
    return Sequences(torch.tensor([i for i, row in enumerate(rows) for _ in row]))


@pytest.fixture(params=ORACLE, ids=lambda case: f"seed{case['seed']}")
def case(request: pytest.FixtureRequest) -> dict:
    return request.param


# --- against verl -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ORACLE[0]["weights"]))
def test_weights_agree_with_verl(case: dict, name: str) -> None:
    low, high = case["bounds"]
    config = LossConfig(correction=name, correction_low=low, correction_high=high)
    old, behaviour = cut(case, "old_logprob"), cut(case, "behaviour_logprob")
    got = correction_weights(config, flat(old), flat(behaviour), sequences(old))
    assert got is not None
    torch.testing.assert_close(got.weight, flat(case["weights"][name]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("level", list(ORACLE[0]["kept"]))
def test_rejections_agree_with_verl(case: dict, level: str) -> None:
    low, high = case["bounds"]
    config = LossConfig(reject=level, reject_low=low, reject_high=high)
    old, behaviour = cut(case, "old_logprob"), cut(case, "behaviour_logprob")
    got = correction_weights(config, flat(old), flat(behaviour), sequences(old))
    assert got is not None
    assert got.weight.tolist() == flat(case["kept"][level]).tolist()
    assert got.rejected.tolist() == (got.weight == 0).tolist()


KINDS = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "gpg": "reinforce", "bypass-reinforce": "reinforce"}


@pytest.mark.parametrize("name", list(ORACLE[0]["policy"]))
def test_corrected_losses_agree_with_verl(case: dict, micro_step, name: str) -> None:
    """The whole way through `loss_sum`; every weight is 1, verl's mean is over tokens."""
    kind, correction = name.split("/")
    step = micro_step(cut(case, "behaviour_logprob"), INPUTS[case["seed"]]["grpo_advantage"])
    config = LossConfig(
        kind=KINDS[kind], dual_clip=3.0 if kind == "vanilla" else None, correction=correction, correction_high=1.5
    )
    current = step.pick(cut(case, "logprob")).requires_grad_()
    old = None if kind.startswith("bypass") else step.pick(cut(case, "old_logprob"))
    loss = loss_sum(config, step.packed, current, old).loss / step.packed.targets
    loss.backward()
    expected = case["policy"][name]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert flat(step.table(current.grad)).tolist() == pytest.approx(flat(expected["grad"]).tolist(), abs=1e-6)


def test_a_masked_loss_agrees_with_trl(case: dict, micro_step) -> None:
    lengths = INPUTS[case["seed"]]["lengths"]
    step = micro_step(
        cut(case, "behaviour_logprob"), INPUTS[case["seed"]]["grpo_advantage"], [1 / n / len(lengths) for n in lengths]
    )
    low, high = case["bounds"]
    current = step.pick(cut(case, "logprob")).requires_grad_()
    config = LossConfig(correction="token-mask", correction_low=low, correction_high=high)
    loss = loss_sum(config, step.packed, current, step.pick(cut(case, "old_logprob"))).loss
    loss.backward()
    expected = case["trl"]["token-mask"]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert flat(step.table(current.grad)).tolist() == pytest.approx(flat(expected["grad"]).tolist(), abs=1e-6)


def test_no_entry_of_the_oracle_goes_unused(case: dict) -> None:
    """`kl` and the two other entries of `trl` are used in test_kl.py, `metrics` in test_mismatch.py."""
    assert set(case) == {"seed", "bounds", "weights", "kept", "policy", "kl", "trl", "metrics"}
    assert set(case["weights"]) == {f"{a}-{b}" for a in ("token", "sequence") for b in ("truncate", "mask")}
    assert set(case["kept"]) == {"token", "sequence", "geometric"}
    assert {name.split("/")[0] for name in case["policy"]} == set(KINDS)
    assert set(case["trl"]) == {"kl-plain", "kl-ratio", "token-mask"}


# --- closed forms -------------------------------------------------------------------------------------------------

# Ratios of two trajectories: [0.5, 3] has product 1.5 and geometric mean 1.22; [0.9, 0.001, 1] 0.0009 and 0.097.
RATIOS = [[0.5, 3.0], [0.9, 0.001, 1.0]]


def of_ratios(config: LossConfig, ratios: list[list[float]] = RATIOS) -> tuple[list[float], dict[str, list[bool]]]:
    log_ratios = flat(ratios).log()
    got = correction_weights(config, log_ratios - 2, torch.full_like(log_ratios, -2.0), sequences(ratios))
    assert got is not None
    flags = {name: getattr(got, name).tolist() for name in ("truncated", "rejected", "vetoed")}
    return got.weight.tolist(), flags


@pytest.mark.parametrize(
    ("correction", "weights", "truncated", "rejected"),
    [
        ("tis", [0.5, 1.4, 0.9, 0.001, 1], [1], []),
        ("token-truncate", [0.5, 1.4, 0.9, 0.001, 1], [1], []),
        ("icepop", [0.5, 0, 0.9, 0, 1], [], [1, 3]),
        ("token-mask", [0.5, 0, 0.9, 0, 1], [], [1, 3]),
        ("sequence-truncate", [1.4, 1.4, 9e-4, 9e-4, 9e-4], [0, 1], []),
        ("sequence-mask", [0, 0, 0, 0, 0], [], [0, 1, 2, 3, 4]),
        ("geometric-truncate", [1.5**0.5, 1.5**0.5, *[9e-4 ** (1 / 3)] * 3], [], []),
        ("geometric-mask", [1.5**0.5, 1.5**0.5, 0, 0, 0], [], [2, 3, 4]),
    ],
)
def test_the_table_of_corrections(correction: str, weights: list, truncated: list, rejected: list) -> None:
    config = LossConfig(correction=correction, correction_low=0.4, correction_high=1.4)
    got, flags = of_ratios(config)
    assert got == pytest.approx(weights, rel=1e-12)
    assert [i for i, flag in enumerate(flags["truncated"]) if flag] == truncated
    assert [i for i, flag in enumerate(flags["rejected"]) if flag] == rejected
    assert not any(flags["vetoed"])


@pytest.mark.parametrize(
    ("reject", "kept"), [("token", [1, 0, 1, 0, 1]), ("sequence", [0, 0, 0, 0, 0]), ("geometric", [1, 1, 0, 0, 0])]
)
def test_a_rejection_leaves_the_weights_of_what_it_keeps(reject: str, kept: list[int]) -> None:
    bounds = {"reject": reject, "reject_low": 0.4, "reject_high": 1.4}
    assert of_ratios(LossConfig(**bounds))[0] == kept
    weighted, flags = of_ratios(LossConfig(correction="tis", correction_high=2.0, **bounds))
    assert weighted == pytest.approx([k * w for k, w in zip(kept, [0.5, 2.0, 0.9, 0.001, 1.0], strict=True)])
    assert flags["rejected"] == [not k for k in kept]
    assert flags["truncated"] == [False, bool(kept[1]), False, False, False]


@pytest.mark.parametrize(("veto", "vetoed"), [(0.002, [2, 3, 4]), (0.0005, [])])
def test_one_token_vetoes_its_trajectory(veto: float, vetoed: list[int]) -> None:
    weights, flags = of_ratios(LossConfig(veto=veto))
    assert [i for i, weight in enumerate(weights) if not weight] == vetoed
    assert [i for i, flag in enumerate(flags["vetoed"]) if flag] == vetoed
    assert flags["rejected"] == flags["vetoed"]


def test_bounds_are_inside() -> None:
    config = LossConfig(correction="token-mask", correction_low=1.0, correction_high=1.0)
    assert of_ratios(config, [[1.0, 0.999, 1.001]])[0] == [1.0, 0.0, 0.0]


def test_weights_carry_no_gradient() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    got = correction_weights(LossConfig(correction="tis"), logprobs, torch.zeros(2))
    assert got is not None
    assert not got.weight.requires_grad


def test_nothing_to_correct_is_none() -> None:
    assert correction_weights(LossConfig(), torch.zeros(2), torch.zeros(2)) is None


def test_a_long_product_neither_overflows_nor_vanishes() -> None:
    ratios = [[2.0] * 5000, [0.5] * 5000]
    weights, _ = of_ratios(LossConfig(correction="sequence-truncate", correction_high=math.inf), ratios)
    assert weights[0] == pytest.approx(math.exp(20))
    assert weights[-1] == pytest.approx(math.exp(-20))


@pytest.mark.parametrize("changes", [{"correction": "sequence-mask"}, {"reject": "geometric"}, {"veto": 0.1}])
def test_whole_trajectories_need_to_be_told(changes: dict) -> None:
    with pytest.raises(BadRow, match="looks at whole trajectories"):
        correction_weights(LossConfig(**changes), torch.zeros(2), torch.zeros(2))


# --- three policies -----------------------------------------------------------------------------------------------


def three_policies(config: LossConfig, micro_step, *, recomputed: bool = True) -> tuple[float, float]:
    """Loss and gradient of one target: A = -1, β = e^-2, π_old = 1.5 β, π = 1.2 π_old."""
    step = micro_step([[-2.0]], [-1.0])
    old = torch.tensor([-2.0 + math.log(1.5)], dtype=torch.float64)
    current = (old + math.log(1.2)).requires_grad_()
    loss = loss_sum(config, step.packed, current, old if recomputed else None).loss
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad.item()


@pytest.mark.parametrize(
    ("changes", "recomputed", "loss", "gradient"),
    [
        # Without π_old the ratio is π / β = 1.8, once.
        ({}, False, 1.8, 1.8),
        # With it the ratio is π / π_old = 1.2, and the rest of the weight is dropped, bounded, or whole: 1.5 · 1.2.
        ({}, True, 1.2, 1.2),
        ({"correction": "tis", "correction_high": 1.25}, True, 1.25 * 1.2, 1.25 * 1.2),
        ({"kind": "decoupled"}, True, 1.8, 1.8),
        ({"kind": "decoupled", "correction": "tis", "correction_high": 1.25}, True, 1.25 * 1.2, 1.25 * 1.2),
        ({"kind": "decoupled", "correction": "icepop", "correction_high": 1.25}, True, 0.0, 0.0),
        # The clip is around π_old, not β: 1.8 would be far outside.
        ({"kind": "decoupled", "dual_clip": 1.1}, True, 1.5 * 1.1, 0.0),
        ({"kind": "reinforce"}, True, -2 + math.log(1.8), 1.0),
        ({"kind": "reinforce", "correction": "tis"}, True, 1.5 * (-2 + math.log(1.8)), 1.5),
        ({"kind": "reinforce", "correction": "tis"}, False, 1.8 * (-2 + math.log(1.8)), 1.8),
        ({"kind": "cispo", "correction": "tis"}, True, 1.5 * 1.2 * (-2 + math.log(1.8)), 1.5 * 1.2),
        # What is left out is measured on π / β = 1.8 without π_old, on π_old / β = 1.5 with it.
        ({"reject": "token", "reject_high": 1.6}, False, 0.0, 0.0),
        ({"reject": "token", "reject_high": 1.6}, True, 1.2, 1.2),
    ],
)
def test_the_importance_weight_is_counted_once(
    micro_step, changes: dict, recomputed: bool, loss: float, gradient: float
) -> None:
    got = three_policies(LossConfig(**changes), micro_step, recomputed=recomputed)
    assert got == pytest.approx((loss, gradient), abs=1e-12)


def test_what_is_left_out_stays_in_the_denominator_and_in_the_metrics(micro_step) -> None:
    step = micro_step([[-2.0, -2.0], [-2.0, -2.0]], [-1.0, -1.0], 0.25)
    old = step.pick([[-2.0, -1.0], [-2.0, -12.0]])
    config = LossConfig(correction="tis", correction_high=2.0, veto=1e-3)
    loss, metrics = loss_sum(config, step.packed, old.clone(), old)
    assert loss.item() == pytest.approx((1 + 2.0) / 4)
    counts = {name: metrics[name] for name in ("targets", "weight", "corrected", "rejected", "vetoed")}
    assert counts == {"targets": 4.0, "weight": 1.0, "corrected": 3.0, "rejected": 2.0, "vetoed": 2.0}
