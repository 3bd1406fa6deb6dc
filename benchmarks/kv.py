"""A request that changes engines: its first token with its KV pages moved, beside its first token computed.

Two real engines of the same model. For each round, a context is sampled once on the first; then the second samples one
token after it, having fetched its pages, and one token after a context of the same length that nobody has.

    python benchmarks/kv.py [MODEL] [--tokens 1500] [--rounds 5] [--backend shm|tcp]     MODEL: default SmolLM2-135M
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gyre_launch import models
from gyre_sched.engine.config import EngineConfig
from gyre_sched.engine.host import EngineHost
from gyre_sched.engine.pages import Pages
from gyre_transport.bus import Client
from gyre_transport.kv import protocol as kv
from gyre_transport.kv.config import LinkerConfig, model_identity
from gyre_transport.run import TransportConfig

WAIT = 300.0  # seconds for anything


async def first_token(engine: EngineHost, context: list[int]) -> tuple[float, int]:
    """(seconds, tokens of the context that were not computed)."""
    began = time.perf_counter()
    answer = await engine.client.generate(context, max_new_tokens=1, deadline=WAIT)
    return time.perf_counter() - began, int(answer["meta_info"]["cached_tokens"])


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Start both engines, run the rounds, print the medians."""
    model = Path(arguments.model)
    config = EngineConfig(context_length=4096, max_tokens=32_768)
    transport = TransportConfig(backends=(arguments.backend,))

    def make(name: str) -> EngineHost:
        linker = LinkerConfig(model=model_identity(model), addresses=(f"ipc://{folder}/{name}",), transport=transport)
        return EngineHost(name, config, model, folder / f"{name}.log", pages=Pages(linker, 60.0))

    source, target = make("source"), make("target")
    dice = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"computed": [], "moved": [], "of which fetched": []}
    fetched: Any = None
    async with Client(f"ipc://{folder}/target", kv.Reply) as service:
        await asyncio.gather(source.start(), target.start())
        try:
            for number in range(arguments.rounds + 1):
                context, other = (dice.integers(10, 1000, arguments.tokens).tolist() for _ in range(2))
                await first_token(source, context)
                tokens = np.asarray(context, "<u4").tobytes()
                pull = kv.Pull(source=f"ipc://{folder}/source", tokens=tokens, deadline=WAIT)
                began = time.perf_counter()
                fetched = await service.call(pull, deadline=WAIT + 1)
                took = time.perf_counter() - began
                after, cached = await first_token(target, context)
                assert cached == fetched.fetched, (cached, fetched)
                computed, none = await first_token(target, other)
                assert not none
                if number:  # the first round warms up
                    for name, value in zip(seconds, (computed, took + after, took), strict=True):
                        seconds[name].append(value)
        finally:
            await asyncio.gather(source.stop(), target.stop())
    print(f"{arguments.tokens} tokens, {fetched.fetched} of them in {fetched.nbytes:,} bytes of pages")
    for name, values in seconds.items():
        ratio = statistics.median(values) / statistics.median(seconds["computed"])
        print(f"{name:18s} {statistics.median(values):8.3f} s   {ratio:5.2f}")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="", help="a Hugging Face folder")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", choices=("shm", "tcp"), default="shm")
    arguments = parser.parse_args()
    arguments.model = arguments.model or str(models.resolve("smollm2"))
    with tempfile.TemporaryDirectory(prefix="gyre-") as folder:
        asyncio.run(measure(arguments, Path(folder)))


if __name__ == "__main__":
    main()
