"""What no client library would send: broken bodies, headers that are no text. Refused, and never an error of ours."""

from __future__ import annotations

import asyncio
import json
import zlib

import pytest

from gyre_agent_proxy.conversation import Conversation
from gyre_agent_proxy.errors import Unauthorized
from gyre_agent_proxy.keys import execution_of, make_key
from gyre_agent_proxy.roles import Roles

BODY = b'{"messages": [{"role": "user", "content": "x"}]}'
KEY = b"Authorization: Bearer k\r\n"


def sized(body, *headers):
    return b"".join([*headers, b"Content-Length: %d\r\n\r\n" % len(body), body])


async def send(proxy, rest):
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + rest)
    async with asyncio.timeout(20):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (KEY + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (sized(b"abcde", KEY, b"Content-Encoding: gzip\r\n"), 400),
        (sized(zlib.compress(b" " * 100_000), KEY, b"Content-Encoding: deflate\r\n"), 400),
        (sized(zlib.compress(BODY), KEY, b"Content-Encoding: deflate\r\n"), 200),
        (sized(BODY.decode().encode("utf-16"), KEY), 400),
        (sized(BODY, b"Authorization: Bearer \x80\xff\r\n"), 200),
        (sized(BODY, KEY, b"x-gyre-role: \xff\xfe\r\n"), 200),
        (sized(BODY, KEY, b"x-session-id: \xff\xfe\r\n"), 200),
        (sized(BODY, KEY, b"x-codex-turn-metadata: \xff{\r\n"), 200),
    ],
)
async def test_odd_bytes(bench, rest, status):
    engine = await bench.engine()
    async with bench.proxy() as proxy:
        found, body = await send(proxy, rest)
        assert found == status, body
        assert proxy.service.metrics.counts["calls_failed"] == 0
    assert len(engine.requests) == (status == 200)
    if status == 200:
        assert json.loads(body)["choices"]


def test_keys_that_are_no_text_are_nobody_s():
    key = make_key(b"s" * 64, "e")
    for odd in (f"{key}\udcff", key.replace("e.", "e\udcff.")):
        with pytest.raises(Unauthorized):
            execution_of(b"s" * 64, odd)


@pytest.mark.parametrize("odd", ["", "a b", "\udcff", "x" * 65])
def test_a_role_that_is_no_name_is_not_taken(odd):
    roles, nothing = Roles.load(), Conversation(messages=())
    assert roles.role({"x-gyre-role": odd}, nothing) == ("main", False)
    assert roles.role({"x-gyre-role": "sub-agent"}, nothing) == ("sub-agent", True)
