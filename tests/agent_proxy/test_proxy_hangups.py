"""Clients that hang up at any moment: nothing stays open, nothing is lost, and who asks again is answered."""

from __future__ import annotations

import asyncio
import json
import random

from gyre_agent_proxy.executions import Execution
from gyre_agent_proxy.history import History
from gyre_traj.log import read_log
from gyre_traj.records import unpack_ids

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "QUESTION"}]},
    "/v1/messages": {"max_tokens": 100, "messages": [{"role": "user", "content": "QUESTION"}]},
    "/v1/responses": {"input": "QUESTION"},
}


def body_of(path, question, **fields):
    return json.loads(json.dumps(BODIES[path] | fields).replace("QUESTION", question))


async def test_hanging_up_at_any_moment(bench, http, caplog):
    engines = [await bench.engine() for _ in range(2)]
    bench.brain.echo = True
    rng = random.Random(7)

    async def ask(proxy, path, body):
        async with http.post(proxy.url + path, json=body, headers={"Authorization": "Bearer k"}) as response:
            await response.read()
            return response.status

    async def hang_up(proxy):
        path, question = rng.choice(list(BODIES)), f"question {rng.randrange(30)}"
        asking = asyncio.create_task(ask(proxy, path, body_of(path, question, stream=rng.random() < 0.5)))
        await asyncio.wait([asking], timeout=rng.random() * 0.3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async with bench.proxy(disconnect_grace=0.01, keepalive=0.005) as proxy, asyncio.timeout(60):
        for _ in range(8):
            await asyncio.gather(*(hang_up(proxy) for _ in range(20)))
        (execution,) = proxy.service._executions.values()
        while proxy.service.stats["open_calls"] or any(e.running for e in engines) or execution.tasks:
            await asyncio.sleep(0.01)
        assert not any(state.active for state in proxy.pool.engines.values())
        assert all(a.unattended.is_set() for a in execution.attempts.values())
        for path in BODIES:
            assert await ask(proxy, path, body_of(path, "question 0")) == 200
    (path,) = bench.calls.glob("*.gtraj")
    log = read_log(path)
    sampled = {rid: [token for token, _ in tokens] for e in engines for rid, tokens in e.sampled.items()}
    for call in log.calls:
        output = unpack_ids(call.output).tolist()
        assert [t for a in call.attempts for t in sampled.get(a.rid, [])[: a.tokens]] == output
    assert not [r.getMessage() for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


async def test_answers_that_wait_for_a_repeat_are_not_displaced_by_aborted_calls(bench, renderers):
    from gyre_agent_proxy.attempt import Attempt
    from gyre_agent_proxy.conversation import Conversation, Reply, Request, Sampling
    from gyre_agent_proxy.errors import NoEngine

    execution = Execution("e", History(bench.renderer))

    def add(name, result):
        request = Request(
            conversation=Conversation(messages=()), sampling=Sampling(max_tokens=1), dialect="chat", model=""
        )
        attempt = Attempt(name, request, "main", 0)
        if result is not None:
            attempt.settle(result)
        execution.attempts[name] = attempt

    add("running", None)
    add("answered", Reply(call="answered", text="x"))
    for n in range(100):
        add(f"aborted {n}", NoEngine("aborted"))
    execution.trim()
    assert set(execution.attempts) == {"running", "answered"}
    for n in range(100):
        add(f"answered {n}", Reply(call="a", text="x"))
    execution.trim()
    assert len(execution.attempts) == 65
    assert "answered 99" in execution.attempts
