"""Parts that the tests of every package share: a tiny model, and real engines that serve it.

`tiny_model` and `tiny_engine` live as long as the session: ask for `second_engine` only where two are needed.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from gyre_sched.engine.host import EngineHost

# How long an example takes says something about the machine, and nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

T = TypeVar("T")

VOCABULARY = 1024
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = (
    "def add(a, b):\n    return a + b\n\n\ndef is_even(n):\n    return n % 2 == 0\n",
    "Write Python code. Define two functions. Only code in ```python, no examples, no explanation.",
    "The user asks, the assistant answers, a tool is called and its result is read: 0123456789.",
)


def _pseudo_words(count: int) -> Iterator[str]:
    """Made-up words, the same every time: enough of them to fill the vocabulary."""
    dice = random.Random(0)
    for _ in range(count):
        yield "".join(dice.choice("bdfgklmnprstv") + dice.choice("aeiou") for _ in range(dice.randint(1, 4)))


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer of `VOCABULARY` ids with a ChatML template and save it in `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*SENTENCES, " ".join(_pseudo_words(2000))], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) == VOCABULARY


def make_model(folder: Path, seed: int = 0) -> Path:
    """Save a random 2-layer Qwen3 (hidden 64, `VOCABULARY` ids, bf16) and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random 2-layer Qwen3 with a ChatML tokenizer, the same weights in every session."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny-qwen3")


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., Path]:
    """`make_tiny_model(folder, seed=1)`: such a folder with other weights."""
    return make_model


class _Background:
    """An event loop in a thread of its own, for parts that outlive a test's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="session-parts")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="session")
def _background() -> Iterator[_Background]:
    background = _Background()
    yield background
    background.close()


def _served(name: str, model: Path, background: _Background, folder: Path) -> Iterator[str]:
    if find_spec("sglang") is None:
        pytest.skip("needs SGLang: uv sync --group engine")
    from gyre_sched.engine.config import EngineConfig
    from gyre_sched.engine.host import EngineHost

    config = EngineConfig(context_length=4096, max_tokens=16_384, max_running=16)

    async def make() -> EngineHost:
        return EngineHost(name, config, model, folder / f"{name}.log")

    host = background.run(make(), 5)
    background.run(host.start(), config.start_timeout + config.warm_timeout)
    yield host.url
    background.run(host.stop(), 60)


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: Path, _background: _Background, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real SGLang engine that serves `tiny_model`, version 0. Leave its weights alone."""
    yield from _served("tiny", tiny_model, _background, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def second_engine(
    tiny_model: Path, _background: _Background, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """URL of another such engine."""
    yield from _served("second", tiny_model, _background, tmp_path_factory.mktemp("engine"))
