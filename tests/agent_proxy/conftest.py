"""Parts of the proxy's tests: a small ChatML model, scripted engines that speak SGLang's API, a running proxy."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gyre_agent_proxy.config import ModelConfig, ProxyConfig
from gyre_agent_proxy.render import Renderer, load_renderer
from gyre_agent_proxy.serve import Proxy, proxy
from gyre_agent_proxy.vocabulary import Vocabulary

# SmolLM2-135M-Instruct's template, as the model ships it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Behaves as Qwen3's: reasoning only after the last user turn, tool results gathered in a user turn.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- if loop.first and tools %}{% for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CORPUS = [
    "You are a helpful AI assistant. The user asks, the assistant answers, a system watches.",
    "def add(a, b):\n    return a + b\n",
    '{"name": "bash", "arguments": {"command": "echo hi"}} tool_call tool_response think',
]


def write_model(folder: Path, template: str | None) -> Path:
    """A folder with a byte-level BPE tokenizer, ChatML's special tokens and `template`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS * 3, trainer)
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    bpe.add_tokens([AddedToken(n, normalized=False, special=False) for n in names])
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """model_folder(template): the folder of a model with that chat template; "smollm2" and "thinking" are named."""
    made: dict[str | None, Path] = {}
    root = tmp_path_factory.mktemp("models")

    def folder(template: str | None) -> Path:
        if template not in made:
            text = {"smollm2": SMOLLM2, "thinking": THINKING}.get(template or "", template)
            made[template] = write_model(root / str(len(made)), text)
        return made[template]

    return folder


@pytest.fixture(scope="session")
def renderers(model_folder: Callable[[str | None], Path]) -> Callable[..., Renderer]:
    """renderers(template, kind="auto"): the renderer of such a model."""
    return lambda template, kind="auto": load_renderer(model_folder(template), kind)


class Brain:
    """What all engines of a test would sample: one answer a prompt, continued from wherever it was cut."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.queue: list[list[int] | str] = []  # answers to the next new prompts
        self.known: list[tuple[list[int], list[int]]] = []
        self.echo = False  # every prompt has one answer, a function of its last ids

    def says(self, *answers: list[int] | str) -> None:
        """Queue answers; text is encoded and ended by <|im_end|> (markup included)."""
        self.queue += answers

    def rest(self, input_ids: list[int]) -> list[int]:
        """The tokens that follow `input_ids`."""
        if self.echo:
            starts = [i for i, t in enumerate(input_ids) if t == 1]
            begin = starts[-1] + len(self.vocabulary.encode("<|im_start|>assistant\n"))
            prompt, got = input_ids[:begin], input_ids[begin:]
            seed = sum((i + 1) * t for i, t in enumerate(prompt)) % 9973
            answer = [3 + (seed * (k + 7)) % 200 for k in range(10 + seed % 25)]
            assert answer[: len(got)] == got, "continued from tokens it would not have sampled"
            return [*answer, 2][len(got) :]
        for prompt, answer in reversed(self.known):
            n = len(prompt)
            got = input_ids[n:]
            if input_ids[:n] == prompt and got and answer[: len(got)] == got:
                return answer[len(got) :]
        answer = self.queue.pop(0) if self.queue else f"answer {len(self.known)}"
        ids = [*self.vocabulary.encode(answer), 2] if isinstance(answer, str) else answer
        self.known.append((input_ids, ids))
        return ids


class ScriptedEngine:
    """An engine that speaks SGLang's `/generate` and `/abort_request`, with faults on demand.

    hold: tokens after which a request waits until `release` (None: never). incremental: fields hold only what is new.
    logprobs: whether there are any. version: label of the weights. spans: whether every event says what they sampled,
    not only the last. swap: (tokens, version): other weights after so many tokens. cut: tokens after which the
    connection is broken.
    """

    def __init__(self, brain: Brain) -> None:
        self.brain = brain
        self.hold: int | None = None
        self.cut: int | None = None
        self.incremental = False
        self.logprobs = True
        self.version = "0"
        self.spans = True
        self.cached = {"device": 0, "host": 0}
        self.swap: tuple[int, str] | None = None
        self.refuse: str | None = None
        self.self_abort: int | None = None
        self.rejects: str | None = None  # why it refuses the next request in its stream, after a token out of nothing
        self.report: tuple[int, dict[str, Any]] | None = None  # after so many tokens: an error event
        self.pace = 0.0  # seconds a token
        self.requests: list[dict[str, Any]] = []
        self.sampled: dict[str, list[tuple[int, str]]] = {}  # by rid: (token, version of the weights)
        self.aborts: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.held = asyncio.Event()  # a request waits at `hold`
        self.url = ""
        self._released = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._transports: set[asyncio.BaseTransport] = set()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.release()
        self.resume()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def die(self) -> None:
        """Break every connection, answer nothing more."""
        for transport in list(self._transports):
            transport.abort()  # type: ignore[attr-defined]
        await self.stop()

    def release(self) -> None:
        """Let held requests go on, now and later."""
        self.hold = None
        self._released.set()

    def pause(self) -> None:
        """Sample nothing until `resume`; requests stay where they are."""
        self._unpaused.clear()

    def resume(self, version: str | None = None) -> None:
        """Go on sampling, with other weights if `version` names them."""
        self.version = version or self.version
        self._unpaused.set()

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        if rid in self.running:
            self.running[rid].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.refuse is not None:
            return web.json_response({"error": {"message": self.refuse}}, status=400)
        rid, params = body["rid"], body["sampling_params"]
        aborted = self.running[rid] = asyncio.Event()
        transport = request.transport
        assert transport is not None
        self._transports.add(transport)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            await self._sample(response, body, params, aborted, transport)
        finally:
            self._transports.discard(transport)
            self.running.pop(rid, None)
        return response

    async def _first(self, *events: asyncio.Event) -> None:
        """Wait for any of them."""
        if any(e.is_set() for e in events):
            return
        waits = [asyncio.create_task(e.wait()) for e in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for w in waits:
            w.cancel()

    async def _sample(
        self,
        response: web.StreamResponse,
        body: dict[str, Any],
        params: dict[str, Any],
        aborted: asyncio.Event,
        transport: asyncio.BaseTransport,
    ) -> None:
        ids: list[int] = []
        spans: list[list[Any]] = []
        rest = self.brain.rest(body["input_ids"])
        sent, interval = 0, params.get("stream_interval") or 1
        finish: dict[str, Any] | None = None
        while finish is None:
            await self._first(self._unpaused, aborted)
            if self.hold is not None and len(ids) >= self.hold:
                self.held.set()
                await self._first(self._released, aborted)
            if self.report is not None and len(ids) >= self.report[0]:
                error = {"error": self.report[1]}
                await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
                return
            if self.rejects is not None:
                ids.append(5)
                finish = {"type": "abort", "message": self.rejects, "status_code": 400}
                self.rejects = None
            elif aborted.is_set() or (self.self_abort is not None and len(ids) >= self.self_abort):
                finish = {"type": "abort", "message": "Abort before completion"}
            elif self.cut is not None and len(ids) >= self.cut:
                transport.abort()  # type: ignore[attr-defined]
                return
            else:
                if self.swap is not None and len(ids) == self.swap[0]:
                    self.version = self.swap[1]
                token = rest[len(ids)]
                ids.append(token)
                self.sampled.setdefault(body["rid"], []).append((token, self.version))
                if spans and spans[-1][0] == self.version:
                    spans[-1][2] = len(ids)
                else:
                    spans.append([self.version, len(ids) - 1, len(ids)])
                text = self.brain.vocabulary.decode(ids)
                stop = next((s for s in params.get("stop", []) if s in text), None)
                if token in params.get("stop_token_ids", []):
                    finish = {"type": "stop", "matched": token}
                elif stop is not None:
                    finish = {"type": "stop", "matched": stop}
                elif len(ids) >= params["max_new_tokens"]:
                    finish = {"type": "length", "length": len(ids)}
            if finish is None and sent and len(ids) - sent < interval:  # the first token goes out at once
                await asyncio.sleep(self.pace)
                continue
            shown, sent = ids[sent:] if self.incremental else ids, len(ids)
            meta: dict[str, Any] = {
                "id": body["rid"],
                "finish_reason": finish,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "cached_tokens": sum(self.cached.values()),
                "cached_tokens_details": self.cached,
                "weight_version": self.version,
            }
            if self.spans or finish is not None:
                meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
            if self.logprobs:
                base = len(ids) - len(shown)
                meta["output_token_logprobs"] = [[-0.001 * (base + i + 1), t, None] for i, t in enumerate(shown)]
            event = {"text": "", "output_ids": shown, "meta_info": meta}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(self.pace)
        await response.write(b"data: [DONE]\n\n")


class Bench:
    """One model, scripted engines, and proxies in front of them."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.folder = folder
        self.calls = tmp_path / "calls"
        self.metrics = tmp_path / "metrics" / "proxy.json"
        self.renderer = load_renderer(folder)
        self.brain = Brain(self.renderer.vocabulary)
        self.engines: list[ScriptedEngine] = []

    async def engine(self) -> ScriptedEngine:
        engine = ScriptedEngine(self.brain)
        await engine.start()
        self.engines.append(engine)
        return engine

    @contextlib.asynccontextmanager
    async def proxy(self, secret: bytes | None = None, **config: Any) -> AsyncIterator[Proxy]:
        """A proxy in front of all engines made so far; quick with failures."""
        settings: dict[str, Any] = {
            "engines": tuple(e.url for e in self.engines),
            "backoff": 0.01,
            "backoff_limit": 0.05,
            "abort_wait": 5.0,
            "disconnect_grace": 0.0,
            "gather": 0.0,
            "route_wait": 20.0,
            "probe_wait": 0.0,
        }
        model = ModelConfig(path=str(self.folder), name="policy")
        async with proxy(
            ProxyConfig(**(settings | config)), model, calls=self.calls, secret=secret, metrics=self.metrics
        ) as running:
            yield running


@pytest.fixture
async def bench(model_folder: Callable[[str | None], Path], tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench whose model has the built-in ChatML template (tools included)."""
    from gyre_agent_proxy.template import CHATML

    made = Bench(model_folder(CHATML), tmp_path)
    yield made
    for engine in made.engines:
        await engine.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="session")
def replay() -> Any:
    """`await replay(bench, http, capture)`: sends what a harness sent; see parts/replay.py."""
    return _part("replay").replay


@pytest.fixture(scope="session")
def wires() -> Any:
    """How each dialect's answers are read, by path; see parts/replay.py."""
    return _part("replay").WIRES


@pytest.fixture(scope="session")
def variations() -> Any:
    """Other serialisations of requests; see parts/variation.py."""
    return _part("variation")


@pytest.fixture(scope="session")
def talk() -> Any:
    """`talk(http, proxy)`: asks for responses; see parts/responses.py."""
    return _part("responses").Talk


@pytest.fixture(scope="session")
def scripted() -> Any:
    """Real harnesses with a scripted model; see parts/harness.py."""
    return _part("harness")


def _part(name: str) -> Any:
    full = f"gyre_test_agent_proxy_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / "parts" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]
