"""The proxy over real SGLang engines: exact records, a drain, an engine killed while it samples."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from gyre_agent_proxy.config import ModelConfig, ProxyConfig
from gyre_agent_proxy.engines import Route
from gyre_agent_proxy.errors import UnfitEngine
from gyre_agent_proxy.serve import proxy
from gyre_sched.engine.config import EngineConfig
from gyre_sched.engine.launch import command, has_cuda
from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids, unpack_logprobs
from gyre_transport.keys import make_token
from gyre_transport.process import Child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LIMIT = 300  # tokens of an answer: long enough to be caught while it is sampled


class Engine:
    """One real engine of these tests."""

    def __init__(self, child: Child, url: str, key: Path) -> None:
        self.child = child
        self.url = url
        self.key = str(key)
        self.headers = {"Authorization": f"Bearer {key.read_text().strip()}"}

    async def ask(self, ids: list[int], limit: int) -> dict[str, Any]:
        """Greedy, without the proxy."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": limit, "stop_token_ids": [2]},
            "return_logprob": True,
        }
        async with (
            aiohttp.ClientSession(headers=self.headers) as http,
            http.post(f"{self.url}/generate", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    async def kill(self) -> None:
        """SIGKILL everything this test started for the engine; the guard ends what the server started itself."""
        server = int(Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text().split()[0])
        os.kill(server, signal.SIGKILL)
        await self.child.wait()


async def start(folder: Path, model: Path, name: str, version: int, key: Path) -> Engine:
    """One that asks for the token in `key`, as where others can reach it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    config = EngineConfig(dtype="float32", max_tokens=8192, max_running=8, log_level="warning", key=str(key))
    argv, env = command(config, model, port, cuda=has_cuda())
    argv[argv.index("--weight-version") + 1] = str(version)
    child = await Child.start(name, argv, log=folder / f"{name}.log", env=env, ready_within=None, guarded=True)
    engine = Engine(child, f"http://127.0.0.1:{port}", key)
    async with aiohttp.ClientSession() as http, asyncio.timeout(400):
        while True:
            assert child.returncode is None, child.tail()
            try:
                async with http.get(f"{engine.url}/health") as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    await engine.ask([5, 6, 7], 2)  # the first request pays a warm-up
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[tuple[Engine, Engine]]:
    """(victim, survivor): the same weights in fp32, so that greedy answers are comparable, labelled 3 and 4."""
    if find_spec("sglang") is None:
        pytest.skip("needs SGLang: uv sync --group engine")
    folder = tmp_path_factory.mktemp("engines")
    key = folder / "engine.key"
    make_token(key)
    pair = await asyncio.gather(
        start(folder, tiny_model, "victim", 3, key), start(folder, tiny_model, "survivor", 4, key)
    )
    yield pair
    for engine in pair:
        await engine.child.stop()


async def long_prompt(engine: Engine, model: Path) -> tuple[str, list[int], dict[str, Any]]:
    """A user message whose greedy answer fills the limit; (message, prompt ids, the engine's answer)."""
    from gyre_agent_proxy.conversation import Message
    from gyre_agent_proxy.render import load_renderer

    renderer = load_renderer(model)
    for n in range(50):
        text = f"Tell me about number {n}."
        ids = renderer.render([Message(role="user", text=text)], ())
        answer = await engine.ask(ids, LIMIT)
        if answer["meta_info"]["finish_reason"]["type"] == "length":
            return text, ids, answer
    raise AssertionError("no prompt with a long greedy answer")


async def interrupted(engines: tuple[Engine, Engine], model: Path, folder: Path, how: str) -> None:
    """A greedy call that must leave its engine midway equals the uninterrupted one."""
    victim, survivor = engines
    text, prompt, whole = await long_prompt(survivor, model)
    config = ProxyConfig(context=4096, backoff=0.05, engine_key=survivor.key)
    async with (
        proxy(config, ModelConfig(path=str(model)), calls=folder) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0, timeout=120) as api,
    ):
        pool = running.pool
        pool.update(1, [Route("victim", victim.url, 4, 3, 1), Route("survivor", survivor.url, 4, 4, 0)])

        async def ask() -> tuple[str, str | None]:
            got, finish = "", None
            stream = await api.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": text}],
                temperature=0,
                max_tokens=LIMIT,
                stream=True,
            )
            async for chunk in stream:
                got += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            return got, finish

        asking = asyncio.create_task(ask())
        async with asyncio.timeout(60):
            while not any(len(g.output.ids) > 40 for g in pool.engines["victim"].active):  # type: ignore[attr-defined]
                await asyncio.sleep(0.002)
        if how == "drain":
            pool.update(2, [Route("survivor", survivor.url, 4, 4, 0)], ["victim"])
            pool.drain("victim")
        else:
            await victim.kill()
        got, finish = await asyncio.wait_for(asking, 120)
        counts = running.service.metrics.counts
        assert (counts["calls_failed"], counts["calls_moved"]) == (0, 1)

    (path,) = folder.glob("*.gtraj")
    log = read_log(path)
    (call,) = log.calls
    assert log.full_prompt(call.call).tolist() == prompt
    output = unpack_ids(call.output).tolist()
    first, second = call.attempts
    assert 40 < first.tokens < LIMIT
    assert first.tokens + second.tokens == len(output) == LIMIT
    assert (first.engine, second.engine) == ("victim", "survivor")
    assert [(s.version, s.start, s.end) for s in call.versions] == [(3, 0, first.tokens), (4, first.tokens, LIMIT)]
    assert output == whole["output_ids"], "greedy, moved = greedy, uninterrupted"
    logprobs = [entry[0] for entry in whole["meta_info"]["output_token_logprobs"]]
    assert unpack_logprobs(call.logprobs).tolist() == pytest.approx(logprobs, abs=1e-3)
    assert finish == call.finish == "length"
    assert got == running_text(model, output)
    assert log.delivered[call.call]


def running_text(model: Path, ids: list[int]) -> str:
    from gyre_agent_proxy.vocabulary import Vocabulary

    return Vocabulary(model).decode(ids)


@pytest.mark.asyncio(loop_scope="module")
async def test_turns_over_a_real_engine(engines, tiny_model, tmp_path):
    _, survivor = engines
    config = ProxyConfig(engines=(survivor.url,), engine_key=survivor.key, context=4096)
    async with (
        proxy(config, ModelConfig(path=str(tiny_model)), calls=tmp_path) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0, timeout=120) as api,
    ):
        messages = [{"role": "user", "content": "hi"}]
        for turn in range(3):
            done = await api.chat.completions.create(model="m", messages=messages, max_tokens=12, temperature=1.0)
            answer = {"role": "assistant", "content": done.choices[0].message.content}
            messages = [*messages, answer, {"role": "user", "content": f"and {turn}"}]
        stopped = await api.chat.completions.create(model="m", messages=messages, max_tokens=40, stop=["a", "e", "i"])
        assert not set(stopped.choices[0].message.content) & set("aei")
        with pytest.raises(openai.BadRequestError):
            await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "x y " * 3000}])
    (path,) = tmp_path.glob("*.gtraj")
    log = read_log(path)
    assert [c.parent for c in log.calls] == [None, *(c.call for c in log.calls[:-1])]
    for call in log.calls:
        assert len(unpack_logprobs(call.logprobs)) == len(unpack_ids(call.output))
        assert all(x <= 0 for x in unpack_logprobs(call.logprobs))
        assert [(s.version, s.start, s.end) for s in call.versions] == [(4, 0, len(unpack_ids(call.output)))]
        if call.parent is not None:
            before = log.full_ids(call.parent)
            assert log.full_prompt(call.call)[: len(before)].tolist() == before.tolist()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_asks_for_a_token_is_told_of_before_any_call(engines, tiny_model, tmp_path):
    _, survivor = engines
    async with aiohttp.ClientSession() as http, http.post(f"{survivor.url}/generate", json={}) as response:
        assert response.status == 401
    config = ProxyConfig(engines=(survivor.url,), context=4096, probe_wait=60.0)
    with pytest.raises(UnfitEngine, match=r"another token \(401"):
        async with proxy(config, ModelConfig(path=str(tiny_model)), calls=tmp_path):
            pass


@pytest.mark.asyncio(loop_scope="module")
async def test_a_drain_while_a_real_engine_samples(engines, tiny_model, tmp_path):
    await interrupted(engines, tiny_model, tmp_path, "drain")
    async with aiohttp.ClientSession(headers=engines[0].headers) as http, asyncio.timeout(60):
        while True:  # no orphan keeps decoding at the engine that was left
            async with http.get(f"{engines[0].url}/v1/loads") as response:
                loads = (await response.json())["loads"]
            if all(load["num_running_reqs"] == 0 for load in loads):
                break
            await asyncio.sleep(0.2)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_is_killed_while_it_samples(engines, tiny_model, tmp_path):
    await interrupted(engines, tiny_model, tmp_path, "kill")


async def test_an_answer_has_the_form_that_is_demanded(tiny_engine: str, tiny_model: Path, tmp_path: Path) -> None:
    title = {"enum": ["one", "another"]}
    schema = {"type": "object", "properties": {"title": title}, "required": ["title"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("bash", "read")]
    named = {"type": "function", "function": {"name": "read"}}
    config = ProxyConfig(engines=(tiny_engine,), context=4096, template="chatml")
    async with (
        proxy(config, ModelConfig(path=str(tiny_model)), calls=tmp_path) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0, timeout=120) as api,
    ):

        async def ask(**fields: Any) -> Any:
            messages = [{"role": "user", "content": "Name it."}]
            got = await api.chat.completions.create(model="m", messages=messages, max_tokens=2000, **fields)
            return got.choices[0]

        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        got = await ask(response_format=form)
        assert json.loads(got.message.content)["title"] in title["enum"]
        for choice, names in (("required", ("bash", "read")), (named, ("read",))):
            got = await ask(tools=tools, tool_choice=choice, parallel_tool_calls=False)
            if got.finish_reason == "length":  # a model without sense may find no end of its arguments
                assert got.message.content.startswith(tuple(f'<tool_call>\n{{"name": "{n}"' for n in names))
            else:
                (call,) = got.message.tool_calls
                assert call.function.name in names
        assert running.service.metrics.counts["engine_failures"] == 0
    (log,) = tmp_path.glob("*.gtraj")
    assert all(len(unpack_logprobs(c.logprobs)) == len(unpack_ids(c.output)) > 0 for c in read_log(log).calls)
