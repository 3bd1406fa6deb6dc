"""Engines drained, killed, cut, paused and refreshed at random under many executions: nothing shows or is lost."""

from __future__ import annotations

import asyncio
import random
import sys
from asyncio.subprocess import PIPE

import httpx
import openai
import pytest

from gyre_agent_proxy.engines import Route
from gyre_traj import Tree, read_log, unpack_ids, unpack_logprobs
from gyre_traj.check import check_log

EXECUTIONS, CALLS, EVENTS = 32, 20, 200


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_events(bench, seed):
    rng = random.Random(seed)
    engines = [await bench.engine() for _ in range(3)]
    for i, engine in enumerate(engines):
        engine.incremental = i == 1
        engine.pace = 0.001
    up = set(range(3))
    epoch, version, happened = 1, 0, 0

    async def harness(proxy, n):
        messages = [{"role": "user", "content": f"execution {n}"}]
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=f"k{n}", max_retries=0, timeout=240) as api:
            for turn in range(CALLS):
                stream = (n + turn) % 2 == 0
                answer = await api.chat.completions.create(model="m", messages=messages, stream=stream)
                if stream:
                    text = "".join([c.choices[0].delta.content or "" async for c in answer])
                else:
                    text = answer.choices[0].message.content
                kept = messages if turn % 4 == 3 else [*messages, {"role": "assistant", "content": text}]
                messages = [*kept, {"role": "user", "content": f"turn {turn}"}]

    def route():
        return [Route(f"e{i}", engines[i].url, 4, 0, i) for i in sorted(up)]

    async def trouble(proxy):
        nonlocal epoch, version, happened
        while happened < EVENTS:
            await asyncio.sleep(0.015)
            i = rng.randrange(3)
            epoch += 1
            happened += 1
            match rng.choice(["drain", "die", "cut", "abort", "pause", "refresh"]):
                case "drain" if len(up) > 1 and i in up:
                    up.discard(i)
                    proxy.pool.update(epoch, route(), [f"e{i}"])
                    proxy.pool.drain(f"e{i}")
                case "die":
                    port = int(engines[i].url.rpartition(":")[2])
                    await engines[i].die()
                    await engines[i].start(port)
                case "cut":
                    engines[i].cut = rng.choice([0, 1, 5])
                    await asyncio.sleep(0.01)
                    engines[i].cut = None
                case "pause" | "refresh" as kind:
                    engines[i].pause()
                    await asyncio.sleep(0.02)
                    version += kind == "refresh"
                    engines[i].resume(str(version))
                case "abort":
                    for event in list(engines[i].running.values()):
                        event.set()
                case _:
                    up.add(i)
            if len(up) < 3 and rng.random() < 0.5:
                up.update(range(3))
                epoch += 1
            proxy.pool.update(epoch, route(), [])
            await proxy.pool.notify()

    bench.brain.echo = True
    async with bench.proxy(attempts=1000) as proxy:
        proxy.pool.update(epoch, route(), [])
        troubling = asyncio.create_task(trouble(proxy))
        await asyncio.gather(*(harness(proxy, n) for n in range(EXECUTIONS)))
        await troubling
        counts = proxy.service.metrics.counts
        assert (counts["calls_failed"], counts["calls_refused"], counts["forks"]) == (0, 0, 0)
        assert counts["calls"] == EXECUTIONS * CALLS
        assert counts["calls_moved"] > 0
        assert not any(s.active for s in proxy.pool.engines.values())
        async with asyncio.timeout(60):
            while any(e.running for e in engines):  # no orphan
                await asyncio.sleep(0.01)

    assert sum(sum(read_log(path).delivered.values()) for path in bench.calls.glob("*.gtraj")) == EXECUTIONS * CALLS
    check_logs(bench, engines, EXECUTIONS)


@pytest.mark.timeout(900)  # a proxy is started eleven times
async def test_the_proxy_is_killed_ten_times(bench, free_port, tmp_path):
    """Clients only repeat what they lost: every call is answered, and recorded once."""
    engines = [await bench.engine() for _ in range(3)]
    for engine in engines:
        engine.pace = 0.001
    bench.brain.echo = True
    answered = asyncio.Condition()
    total = 0

    async def harness(n):
        nonlocal total
        messages = [{"role": "user", "content": f"execution {n}"}]
        url = f"http://127.0.0.1:{free_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=f"k{n}", max_retries=0, timeout=120) as api:
            for turn in range(CALLS):
                text = await repeated(api, messages, stream=(n + turn) % 2 == 0)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]
                async with answered:
                    total += 1
                    answered.notify_all()

    async def repeated(api, messages, *, stream):
        while True:
            try:
                answer = await api.chat.completions.create(model="m", messages=messages, stream=stream)
                if not stream:
                    return answer.choices[0].message.content
                chunks = [c async for c in answer]
                if chunks and chunks[-1].choices[0].finish_reason:
                    return "".join(c.choices[0].delta.content or "" for c in chunks)
            except (openai.APIConnectionError, httpx.HTTPError):
                await asyncio.sleep(0.1)  # a client's own pause between two tries

    async def start():
        arguments = ["serve", "--model", bench.folder, "--calls", bench.calls, "--port", str(free_port)]
        for engine in engines:
            arguments += ["--engine", engine.url]
        with (tmp_path / "proxy.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gyre_agent_proxy.cli", *map(str, arguments), stdout=PIPE, stderr=log
            )
        assert b"serving" in await asyncio.wait_for(process.stdout.readline(), 60)
        return process

    process = await start()
    try:
        harnesses = asyncio.gather(*(harness(n) for n in range(EXECUTIONS)))
        for kill in range(1, 11):
            async with answered:
                await answered.wait_for(lambda kill=kill: total >= kill * EXECUTIONS * CALLS // 12)
            process.kill()
            await process.wait()
            process = await start()
        await harnesses
    finally:
        process.terminate()
        await process.wait()
    async with asyncio.timeout(60):
        while any(e.running for e in engines):  # no orphan
            await asyncio.sleep(0.01)
    for path in bench.calls.glob("*.gtraj"):
        log = read_log(path)
        assert len(log.calls) == CALLS
        assert sum(call.parent is None for call in log.calls) == 1, "continued across every restart"
    check_logs(bench, engines, EXECUTIONS)


def check_logs(bench, engines, executions):
    """What is recorded is what the engines were sent and what they sampled, by which weights."""
    sent = {r["rid"]: r for e in engines for r in e.requests}
    sampled = {rid: tokens for e in engines for rid, tokens in e.sampled.items()}
    paths = list(bench.calls.glob("*.gtraj"))
    assert len(paths) == executions
    for path in paths:
        log = read_log(path)
        assert not [f for f in check_log(log) if f.level == "error"]
        for call in log.calls:
            prompt, output = log.full_prompt(call.call).tolist(), unpack_ids(call.output).tolist()
            tokens = []
            for attempt in call.attempts:
                if attempt.rid in sent:  # a connection that was refused sent nothing
                    assert sent[attempt.rid]["input_ids"] == prompt + output[: len(tokens)]
                tokens += sampled.get(attempt.rid, [])[: attempt.tokens]
            assert [t for t, _ in tokens] == output
            assert len(unpack_logprobs(call.logprobs)) == len(output)
            assert [int(v) for _, v in tokens] == [s.version for s in call.versions for _ in range(s.start, s.end)]
            assert output == bench.brain.rest(prompt)[: len(output)], "what the engines sampled, in one piece"
            if call.parent is not None:
                before = log.full_ids(call.parent).tolist()
                assert prompt[: len(before)] == before
        Tree.from_log(log).view()
