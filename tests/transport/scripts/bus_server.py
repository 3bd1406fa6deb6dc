"""A bus server in a process of its own: adds numbers."""

import asyncio
import json
import sys

import msgspec

from gyre_transport.bus import Server


class Add(msgspec.Struct, frozen=True, tag="add"):
    a: int
    b: int


class Sum(msgspec.Struct, frozen=True, tag="sum"):
    value: int


async def main() -> None:
    async def handle(request: Add) -> Sum:
        return Sum(request.a + request.b)

    async with Server(sys.argv[1], Add, handle) as server:
        print(json.dumps(server.address), flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
