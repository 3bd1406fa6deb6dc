"""Engines drained, killed, cut and brought back at random under many executions: nothing shows, nothing is lost."""

from __future__ import annotations

import asyncio
import random

import openai
import pytest

from gyre_agent_proxy.engines import Route
from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids, unpack_logprobs

EXECUTIONS, CALLS, EVENTS = 12, 8, 60


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_events(bench, seed):
    rng = random.Random(seed)
    engines = [await bench.engine() for _ in range(3)]
    for i, engine in enumerate(engines):
        engine.incremental = i == 1
        engine.pace = 0.001
    up = set(range(3))
    epoch = 1

    async def harness(proxy, n):
        messages = [{"role": "user", "content": f"execution {n}"}]
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=f"k{n}", max_retries=0, timeout=60) as api:
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
        nonlocal epoch
        for _ in range(EVENTS):
            await asyncio.sleep(0.01)
            i = rng.randrange(3)
            epoch += 1
            match rng.choice(["drain", "die", "cut", "abort"]):
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
        troubling.cancel()
        await asyncio.gather(troubling, return_exceptions=True)
        counts = proxy.service.metrics.counts
        assert (counts["calls_failed"], counts["calls_refused"], counts["forks"]) == (0, 0, 0)
        assert counts["calls"] == EXECUTIONS * CALLS
        assert counts["calls_moved"] > 0
        assert not any(s.active for s in proxy.pool.engines.values())
        async with asyncio.timeout(10):
            while any(e.running for e in engines):  # no orphan
                await asyncio.sleep(0.01)

    sent = {r["rid"]: r for e in engines for r in e.requests}
    for path in bench.calls.glob("*.gtraj"):
        log = read_log(path)
        assert len(log.calls) == CALLS
        for call in log.calls:
            prompt, output = log.full_prompt(call.call).tolist(), unpack_ids(call.output).tolist()
            got = 0
            for attempt in call.attempts:
                if attempt.rid in sent:  # a connection that was refused sent nothing
                    assert sent[attempt.rid]["input_ids"] == prompt + output[:got]
                got += attempt.tokens
            assert got == len(output) == len(unpack_logprobs(call.logprobs))
            assert output == bench.brain.rest(prompt), "what the engines sampled, in one piece"
            assert [s.start for s in call.versions] == [0, *(s.end for s in call.versions[:-1])]
            assert call.versions[-1].end == len(output)
            if call.parent is not None:
                before = log.full_ids(call.parent).tolist()
                assert prompt[: len(before)] == before
            assert log.delivered[call.call]
