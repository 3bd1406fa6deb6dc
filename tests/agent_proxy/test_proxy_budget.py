"""How many tokens a call may sample: the context, and the budget of its execution."""

from __future__ import annotations

import asyncio

import openai
import pytest

from gyre_agent_proxy.budget import fit
from gyre_agent_proxy.conversation import Sampling
from gyre_agent_proxy.errors import BudgetSpent, TooBusy, TooLong


def client(proxy):
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0, timeout=30)


async def ask(api, text, **more):
    return await api.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **more)


@pytest.mark.parametrize(
    ("asked", "context", "sampled", "reserved", "budget", "limit"),
    [
        (500, 0, 9000, 9000, 0, 500),  # no bound
        (500, 300, 0, 0, 0, 200),  # 100 are the prompt's
        (500, 0, 8000, 0, 8300, 300),
        (5000, 0, 2000, 3000, 8000, 3000),
        (500, 0, 2000, 5500, 8000, 500),
        (501, 0, 2000, 5500, 8000, TooBusy),  # 500 left, and others may leave more
        (5000, 0, 2000, 5000, 8000, TooBusy),  # 1000 left: not worth it
        (5000, 1000, 2000, 5000, 8000, 900),
        (5000, 0, 2000, 0, 2001, 1),  # nothing will come back
        (5000, 0, 2000, 9, 2000, BudgetSpent),
        (5000, 100, 0, 0, 0, TooLong),
    ],
)
def test_what_a_call_may_sample(asked, context, sampled, reserved, budget, limit):
    def fitted():
        bounds = {"context": context, "sampled": sampled, "reserved": reserved, "budget": budget}
        return fit(Sampling(max_tokens=asked), prompt=100, **bounds).max_tokens

    if isinstance(limit, int):
        assert fitted() == limit
    else:
        with pytest.raises(limit):
            fitted()


async def test_an_execution_samples_no_more_than_its_budget(bench):
    await bench.engine()
    bench.brain.says("one two three four five six seven eight nine ten")
    async with bench.proxy(token_budget=8) as proxy, client(proxy) as api:
        first = await ask(api, "hi")
        assert (first.usage.completion_tokens, first.choices[0].finish_reason) == (8, "length")
        with pytest.raises(openai.PermissionDeniedError, match="8 tokens of the 8") as refused:
            await ask(api, "more")
        assert refused.value.code == "token_budget_exhausted"
    async with bench.proxy(token_budget=8) as proxy, client(proxy) as api:  # counted from the log after a restart
        with pytest.raises(openai.PermissionDeniedError):
            await ask(api, "more")


async def test_calls_under_way_share_what_their_execution_may_still_sample(bench):
    engine = await bench.engine()
    engine.hold = 3
    bench.brain.echo = True
    async with bench.proxy(token_budget=4000) as proxy, client(proxy) as api:
        first = asyncio.create_task(ask(api, "a", max_tokens=2500))
        await engine.held.wait()
        second = asyncio.create_task(ask(api, "b", max_tokens=2500))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.001)
        limits = [r["sampling_params"]["max_new_tokens"] for r in engine.requests]
        assert limits == [2500, 1500]
        with pytest.raises(openai.RateLimitError, match="may sample 4000 of the 4000 tokens") as refused:
            await ask(api, "c", max_tokens=10)
        assert refused.value.response.headers["Retry-After"] == "1"
        engine.release()
        used = sum([(await call).usage.completion_tokens for call in (first, second)])
        await ask(api, "c", max_tokens=4000)  # what they left is to be had again
        assert engine.requests[-1]["sampling_params"]["max_new_tokens"] == 4000 - used
