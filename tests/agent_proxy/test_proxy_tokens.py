"""Endpoints that others can reach: who is asked for a token, and who sends one."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from gyre_agent_proxy import keys
from gyre_agent_proxy.client import EngineClient
from gyre_agent_proxy.conversation import Sampling
from gyre_agent_proxy.errors import ListenError
from gyre_agent_proxy.stream import StreamError
from gyre_transport.errors import ConfigError
from gyre_transport.keys import make_token

SECRET = b"s" * 64


@pytest.mark.parametrize("token", ["t" * 40, ""])
async def test_an_engines_token_goes_with_every_request(http, token):
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization")))
        return web.Response(status=401)

    app = web.Application()
    for path in ("/generate", "/abort_request"):
        app.router.add_post(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = EngineClient(http, (), connect=30.0, silence=30.0, token=token)
    with pytest.raises(StreamError, match="401"):
        async for _ in client.generate(url, "r", [1], Sampling(max_tokens=1), 1, interval=1, fresh=True):
            pass
    await client.abort(url, "r")
    await runner.cleanup()
    given = f"Bearer {token}" if token else None
    assert seen == [("/generate", given), ("/abort_request", given)]


async def test_the_proxy_reads_its_engines_token_from_a_file(bench, tmp_path):
    await bench.engine()
    with pytest.raises(ConfigError, match=r"proxy\.engine_key"):
        async with bench.proxy(engine_key=str(tmp_path / "none")):
            pass
    make_token(tmp_path / "engine.key")
    async with bench.proxy(engine_key=str(tmp_path / "engine.key")):
        pass


async def test_a_proxy_that_takes_any_key_is_for_this_machine_only(bench):
    await bench.engine()
    with pytest.raises(ListenError, match=r"without a secret the proxy takes any key.*--secret"):
        async with bench.proxy(host="0.0.0.0"):  # noqa: S104
            pass
    async with bench.proxy(SECRET, host="0.0.0.0"):  # noqa: S104
        pass


async def test_counters_are_for_those_who_have_a_key(bench, http: aiohttp.ClientSession):
    await bench.engine()
    async with bench.proxy(SECRET) as proxy:
        async with http.get(f"{proxy.url}/gyre/stats") as response:
            assert response.status == 401
        key = {"Authorization": f"Bearer {keys.make_key(SECRET, 'e1')}"}
        async with http.get(f"{proxy.url}/gyre/stats", headers=key) as response:
            assert response.status == 200
    async with bench.proxy() as proxy, http.get(f"{proxy.url}/gyre/stats") as response:
        assert response.status == 200
