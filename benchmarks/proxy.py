"""What the agent proxy costs: added latency and throughput beside other gateways, and CPU as a conversation grows.

    uv run python benchmarks/proxy.py [--peers FOLDER] [--calls 400] [--json]

--peers: the `bin` folder of an environment with `litellm[proxy]` and `smg`; without it they are looked for on PATH and
otherwise left out. Every gateway stands in front of one scripted engine (`proxy_engine.py`) in the same run; the rounds
are interleaved and medians reported. The proxy renders, tokenises, records every call's ids and log-probabilities to
its log before it answers, and parses the sampled ids; the others forward text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

HERE = Path(__file__).parent
CLIENTS = (1, 16, 64)
SIZES = (10_000, 100_000, 700_000)
ASK = "Look into the repository, find why the second test fails, and say what you would change. " * 8


class Gateway:
    """A running gateway: where it is, and its processes."""

    def __init__(self, name: str, url: str, processes: list[subprocess.Popen[str]]) -> None:
        self.name = name
        self.url = url
        self.processes = processes


def model_folder(folder: Path) -> Path:
    """A ChatML model folder with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = [p.read_text() for p in HERE.parent.rglob("packages/*/src/**/*.py")]
    bpe.train_from_iterator(sources, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def started(arguments: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    with log.open("w") as out:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=out, text=True, env=os.environ | environment
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def our_proxy(engine: str, model: Path, scratch: Path) -> Iterator[Gateway]:
    """`gyre-agent-proxy serve`, alone."""
    command = [sys.executable, "-m", "gyre_agent_proxy.cli", "serve", "--engine", engine, "--model", str(model)]
    command += ["--template", "chatml", "--port", "0", "--calls", str(scratch / "calls")]
    with started(command, scratch / "proxy.log") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serving at" in line, (scratch / "proxy.log").read_text()
        yield Gateway("gyre-agent-proxy", line.split()[-1].removesuffix("/v1"), [process])


@contextlib.contextmanager
def litellm(engine: str, program: str, scratch: Path) -> Iterator[Gateway]:
    """litellm's proxy with one worker and no database."""
    config = scratch / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: policy\n  litellm_params:\n"
        f"    model: openai/policy\n    api_base: {engine}/v1\n    api_key: none\n"
        "litellm_settings:\n  telemetry: false\n  drop_params: true\n"
    )
    port = free_port()
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True"}
    quiet["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # no key, as the others
    with started(command, scratch / "litellm.log", **quiet) as process:
        yield Gateway("litellm", f"http://127.0.0.1:{port}", [process])


@contextlib.contextmanager
def smg(engine: str, program: str, scratch: Path) -> Iterator[Gateway]:
    """The smg gateway (Rust) as a router in front of the engine."""
    port = free_port()
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", engine]
    command += ["--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(free_port())]
    command += ["--disable-tokenizer-autoload"]
    with started(command, scratch / "smg.log") as process:
        yield Gateway("smg", f"http://127.0.0.1:{port}", [process])


def body(stream: bool, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A Chat Completions request."""
    return {"model": "policy", "messages": messages, "max_tokens": 400, "temperature": 1.0, "stream": stream}


async def call(session: aiohttp.ClientSession, url: str, data: bytes, key: str) -> float:
    """Seconds of one call, read to its end."""
    begun = time.perf_counter()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as response:
        raw = await response.read()
        assert response.status == 200, raw[:500]
    return time.perf_counter() - begun


async def ready(gateway: Gateway, deadline: float = 120.0) -> None:
    """Wait until a gateway answers a call."""
    end = time.monotonic() + deadline
    data = json.dumps(body(False, [{"role": "user", "content": "hi"}])).encode()
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                await call(session, gateway.url, data, "warm")
                return
            except (aiohttp.ClientError, AssertionError):
                if time.monotonic() > end or any(p.poll() is not None for p in gateway.processes):
                    print(f"{gateway.name} does not answer", file=sys.stderr)
                    raise
                await asyncio.sleep(0.3)


def cpu_seconds(gateway: Gateway) -> float:
    """CPU time of the gateway's processes, and of those they started, so far."""
    parents = [psutil.Process(p.pid) for p in gateway.processes]
    pids = [p.pid for parent in parents for p in (parent, *parent.children(recursive=True))]
    threads = (t for pid in pids for t in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((t / "schedstat").read_text().split()[0]) for t in threads) / 1e9


class Round(NamedTuple):
    """One gateway's share of a round."""

    times: list[float]  # seconds of each answered call
    rate: float  # answered calls a second
    failed: int
    cpu: float  # seconds of the gateway's processes a call


async def load(gateway: Gateway, clients: int, calls: int, stream: bool, round_: int) -> Round:
    """`calls` calls by `clients` clients at once."""
    times: list[float] = []
    left = iter(range(calls))

    async def one(client: int) -> None:
        for i in left:
            messages = [{"role": "user", "content": f"{gateway.name} {round_} {client} {i}. {ASK}"}]
            data = json.dumps(body(stream, messages)).encode()
            try:
                times.append(await call(session, gateway.url, data, f"c{round_}-{clients}-{client}-{stream}"))
            except (aiohttp.ClientError, AssertionError) as e:
                print(f"{gateway.name}: {type(e).__name__}: {e}"[:500], file=sys.stderr)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun, used = time.perf_counter(), cpu_seconds(gateway)
        await asyncio.gather(*(one(c) for c in range(clients)))
        rate = len(times) / (time.perf_counter() - begun)
        return Round(times, rate, calls - len(times), (cpu_seconds(gateway) - used) / calls)


async def grow(gateway: Gateway, sizes: tuple[int, ...], encode: Any, calls: int) -> list[dict[str, float]]:
    """CPU a call of one conversation as it passes each size; every call adds a tool result of about 500 tokens."""
    found: list[dict[str, float]] = []
    words = " ".join(p.read_text() for p in sorted((HERE.parent / "packages").rglob("*.py")))
    per_token = len(words[:100_000]) / len(encode(words[:100_000]))
    at, tokens = 0, 0

    def text(n: int) -> str:
        nonlocal at
        size = int(n * per_token)
        at = 0 if at + size > len(words) else at
        at += size
        return words[at - size : at]

    messages: list[dict[str, Any]] = [{"role": "user", "content": text(500)}]
    async with aiohttp.ClientSession() as session:

        async def ask() -> tuple[int, int]:
            data = json.dumps(body(False, messages)).encode()
            headers = {"content-type": "application/json", "authorization": "Bearer grow"}
            async with session.post(f"{gateway.url}/v1/chat/completions", data=data, headers=headers) as response:
                answer = json.loads(await response.read())
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            return int(answer["usage"]["prompt_tokens"]), len(data)

        for size in sizes:
            while tokens < size:
                step = min(20_000, size - tokens)
                messages.append({"role": "user", "content": text(max(200, step))})
                tokens, _ = await ask()
            used, spent, sent = cpu_seconds(gateway), time.perf_counter(), 0
            for _ in range(calls):
                messages.append({"role": "user", "content": text(500)})
                tokens, sent = await ask()
            found.append(
                {
                    "tokens": tokens,
                    "body_mb": sent / 1e6,
                    "cpu_ms": 1e3 * (cpu_seconds(gateway) - used) / calls,
                    "wall_ms": 1e3 * (time.perf_counter() - spent) / calls,
                }
            )
    return found


async def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run everything."""
    from tokenizers import Tokenizer

    model = model_folder(scratch / "model")
    encode = Tokenizer.from_file(str(model / "tokenizer.json"))
    peers: dict[str, Any] = {"litellm": litellm, "smg": smg}
    where = {n: shutil.which(n, path=str(options.peers) if options.peers else None) for n in peers}
    report: dict[str, Any] = {"calls": options.calls, "tokens": options.tokens, "load": [], "left_out": []}
    async with contextlib.AsyncExitStack() as stack:
        engine_process = stack.enter_context(
            started(
                [sys.executable, str(HERE / "proxy_engine.py"), "--tokens", str(options.tokens)], scratch / "engine.log"
            )
        )
        assert engine_process.stdout is not None
        engine = f"http://127.0.0.1:{int(engine_process.stdout.readline())}"
        gateways = [Gateway("engine", engine, [])]
        gateways.append(stack.enter_context(our_proxy(engine, model, scratch)))
        for name, start in peers.items():
            if program := where[name]:
                gateways.append(stack.enter_context(start(engine, program, scratch)))
            else:
                report["left_out"].append(name)
        for gateway in gateways:
            await ready(gateway)
        async for row in rounds(gateways, options):
            report["load"].append(row)
            print("{gateway} {clients} {calls_per_s:.0f}/s {cpu_ms:.2f} ms CPU".format(**row), file=sys.stderr)
        ours = gateways[1]
        report["growth"] = await grow(
            ours, tuple(options.sizes), lambda t: encode.encode(t).ids, max(3, options.calls // 40)
        )
    return report


async def rounds(gateways: list[Gateway], options: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Interleaved rounds; the median over them."""
    for stream in (False, True):
        for clients in options.clients:
            taken: dict[str, list[Round]] = {g.name: [] for g in gateways}
            for round_ in range(options.rounds):
                for gateway in gateways:
                    taken[gateway.name].append(await load(gateway, clients, options.calls, stream, round_))
            base = statistics.median(statistics.median(r.times) for r in taken["engine"])
            for gateway in gateways:
                runs = taken[gateway.name]
                p50 = statistics.median(statistics.median(r.times) for r in runs)
                yield {
                    "gateway": gateway.name,
                    "stream": stream,
                    "clients": clients,
                    "p50_ms": 1e3 * p50,
                    "p99_ms": 1e3 * statistics.median(statistics.quantiles(r.times, n=100)[98] for r in runs),
                    "added_p50_ms": 1e3 * (p50 - base),
                    "calls_per_s": statistics.median(r.rate for r in runs),
                    "cpu_ms": 1e3 * statistics.median(r.cpu for r in runs),
                    "failed": sum(r.failed for r in runs),
                }


def show(report: dict[str, Any]) -> None:
    """Tables."""
    print(f"answers of {report['tokens']} tokens, {report['calls']} calls a round")
    names = (("mode", 8), ("clients", 9), ("p50 ms", 10), ("p99 ms", 10), ("added p50", 11), ("calls/s", 10))
    print(f"{'':18}" + "".join(f"{name:>{width}}" for name, width in (*names, ("CPU ms", 9), ("failed", 8))))
    for row in report["load"]:
        mode = "stream" if row["stream"] else "whole"
        print(
            f"{row['gateway']:18}{mode:>8}{row['clients']:>9}{row['p50_ms']:>10.2f}{row['p99_ms']:>10.2f}"
            f"{row['added_p50_ms']:>11.2f}{row['calls_per_s']:>10.1f}"
            f"{row['cpu_ms']:>9.2f}{row['failed']:>8}"
        )
    for name in report["left_out"]:
        print(f"{name}: not found; install it in an environment and name its bin folder by --peers")
    print("one conversation:", *(f"{g['tokens']:,} tokens {g['cpu_ms']:.1f} ms CPU a call" for g in report["growth"]))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="What the agent proxy costs, beside other gateways.")
    parser.add_argument("--peers", type=Path, help="bin folder with litellm and smg (default: PATH)")
    parser.add_argument("--calls", type=int, default=400, help="calls a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="*", default=list(CLIENTS), help="clients at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="sizes of the grown conversation")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = asyncio.run(measure(options, Path(scratch)))
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)


if __name__ == "__main__":
    main()
