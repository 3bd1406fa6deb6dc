"""Settings that would do nothing are refused, not ignored."""

import pytest

from gyre_train.config import LossConfig


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"correction": "tis"}, "does nothing with old='behaviour'"),
        ({"correction": "icepop"}, "does nothing with old='behaviour'"),
        ({"correction": "sequence-mask", "kind": "gspo"}, "does nothing with old='behaviour'"),
        ({"kind": "decoupled"}, "use old='recompute'"),
        ({"kl_coef": 0.1, "old": "recompute"}, "does nothing with old='recompute'"),
        ({"kl_coef": 0.1, "kl_against": "reference"}, "no cell holds"),
        ({"entropy_coef": 0.1}, "compute no entropies"),
        ({"clip_low": -0.1}, "clip_low"),
    ],
)
def test_a_loss_setting_without_effect_is_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LossConfig(**settings)  # type: ignore[arg-type]


def test_settings_that_have_an_effect_are_taken() -> None:
    assert LossConfig(correction="tis", old="recompute").correction == "tis"
    assert LossConfig(kl_coef=0.1).kl_coef == 0.1
    assert LossConfig(kind="reinforce", correction="token-truncate").old == "behaviour"
    assert LossConfig(kind="decoupled", old="recompute", veto=1e-4).veto == 1e-4
