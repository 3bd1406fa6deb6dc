"""The engine's control API over a connection that the engine does not keep."""

from __future__ import annotations

import asyncio

from gyre_sched.engine.client import EngineClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n"


async def test_a_call_does_not_meet_the_end_of_an_idle_connection() -> None:
    """Engines close what was idle for some seconds; here as the next request arrives on it."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        writer.write(ANSWER)
        await reader.read(1)
        writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with EngineClient("e", f"http://127.0.0.1:{port}") as client:
            await client.flush_cache()
            await client.release_memory()
    assert asked == [b"/flush_cache", b"/release_memory_occupation"]
