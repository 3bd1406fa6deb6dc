import json
from pathlib import Path

import pytest

RUN = """
[model]
source = "model"
[runner]
tasks = "tasks"
harness = ["{python}", "{folder}/harness.py"]
[run]
steps = 4
"""

MODEL = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    """A run's config beside a model folder and one task; nothing in it can be started."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    task = tmp_path / "tasks" / "one"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text("")
    (task / "instruction.md").write_text("do it")
    (task / "tests" / "verify.py").write_text("")
    (tmp_path / "harness.py").touch()
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path
