"""What is read from and written to Hugging Face folders, and what is refused. No Megatron."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from gyre_train import architecture
from gyre_train.config import LossConfig, OptimizerConfig, TrainConfig
from gyre_train.errors import UnsupportedModel, WeightsError
from gyre_train.schedule import learning_rate
from gyre_transport.config import section
from gyre_transport.errors import ConfigError

Policies = Callable[..., Path]
FullDisk = Callable[[], AbstractContextManager[None]]


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mamba"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"quantization_config": {"bits": 4}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(policies: Policies, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = changed(policies("qwen3"), tmp_path / "m", **changes)
    with pytest.raises(UnsupportedModel) as caught:
        architecture.read(folder)
    key, value = next(iter(changes.items()))
    assert "support" in str(caught.value)
    assert (repr(value) in str(caught.value)) if key != "rope_parameters" else ("yarn" in str(caught.value))


def test_an_unknown_model_names_what_is_supported(policies: Policies, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="llama, qwen2, qwen3"):
        architecture.read(changed(policies("llama"), tmp_path / "m", model_type="gpt2"))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        architecture.read(tmp_path)


def test_the_older_spelling_of_rope_reads_alike(policies: Policies, tmp_path: Path) -> None:
    folder = policies("llama-scaled")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    older = {**config, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert architecture.read(tmp_path) == architecture.read(folder)


def test_writing_a_folder_that_exists_replaces_it(policies: Policies, tmp_path: Path) -> None:
    from gyre_train import hf

    folder = policies("llama")
    tensors = hf.read_folder(folder)
    out = tmp_path / "policy"
    for scale in (1.0, 2.0):
        hf.write_folder(folder, out, {n: t * scale for n, t in tensors.items()})
    assert (out / "tokenizer_config.json").is_file()
    again = hf.read_folder(out)
    assert all((again[n] == t * 2.0).all() for n, t in tensors.items())
    assert os.listdir(tmp_path) == ["policy"]


def test_a_folder_that_cannot_be_written_leaves_nothing(policies: Policies, tmp_path: Path) -> None:
    from gyre_train import hf

    folder = policies("llama")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(WeightsError, match="policy"):
        hf.write_folder(folder, blocked / "policy", hf.read_folder(folder))
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_folder_that_was_there(policies: Policies, tmp_path: Path, full_disk: FullDisk) -> None:
    from gyre_train import hf

    folder = policies("llama")
    tensors = hf.read_folder(folder)
    out = hf.write_folder(folder, tmp_path / "policy", tensors)
    with full_disk(), pytest.raises(WeightsError, match="policy"):
        hf.write_folder(folder, out, {n: t * 2.0 for n, t in tensors.items()})
    assert os.listdir(tmp_path) == ["policy"]
    assert all((hf.read_folder(out)[n] == t).all() for n, t in tensors.items())


def test_a_folder_without_safetensors_says_what_is_needed(policies: Policies, tmp_path: Path) -> None:
    from gyre_train import hf

    with pytest.raises(WeightsError, match="safetensors"):
        hf.read_folder(changed(policies("llama"), tmp_path / "m"))


def test_the_learning_rate_warms_up_and_decays() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay="linear")
    rates = [learning_rate(config, step, 10) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[10] == rates[11] == pytest.approx(0.1)
    cosine = OptimizerConfig(lr=1.0, decay="cosine")
    assert learning_rate(cosine, 5, 10) == pytest.approx(0.5)
    assert learning_rate(cosine, 2, 10) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.2)))
    assert {learning_rate(OptimizerConfig(lr=0.3), step, 10) for step in range(20)} == {0.3}


def test_the_learning_rate_of_a_step_depends_on_nothing_else() -> None:
    """slime#1761: a resumed run advanced its schedule twice. Here there is nothing to advance."""
    config = OptimizerConfig(lr=1.0, warmup_steps=3, decay="cosine")
    straight = [learning_rate(config, step, 9) for step in range(9)]
    resumed = [learning_rate(config, step, 9) for step in range(4)] + [
        learning_rate(config, step, 9) for step in range(4, 9)
    ]
    assert straight == resumed


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ({"optimiser": {}}, "optimizer"),
        ({"optimizer": {"lr": -1.0}}, "lr"),
        ({"optimizer": {"lr": 1e-6, "min_lr": 1e-3}}, "min_lr"),
        ({"loss": {"kind": "dpo"}}, "dpo"),
        ({"dtype": "fp16"}, "fp16"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_a_wrong_config_names_the_key(table: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        section({"train": table}, "train", TrainConfig)


def test_loss_settings_are_those_of_the_losses() -> None:
    """[train.loss] takes every setting of gyre-traj's losses, with its default, and pi_old beside them."""
    from gyre_traj.torch import LossConfig as Theirs

    ours, theirs = LossConfig(), Theirs()
    assert set(LossConfig.__struct_fields__) == {*Theirs.__struct_fields__, "old"}
    assert {n: getattr(ours, n) for n in Theirs.__struct_fields__} == {
        n: getattr(theirs, n) for n in Theirs.__struct_fields__
    }
