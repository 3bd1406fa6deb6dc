"""How many harnesses are alive at a time: places, taken first come, first served, whose number may change."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """`async with slots:` holds one place. `limit`: places in all; fewer than are held now takes none away."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._calm = asyncio.Event()
        self._calm.set()

    def resize(self, limit: int) -> None:
        """From now on there are `limit` places."""
        self._limit = limit
        self._pass_on()

    async def nobody_waits(self) -> None:
        """Return when everybody who wanted a place has one, or has had one."""
        await self._calm.wait()

    async def __aenter__(self) -> None:
        if self._held < self._limit and not self._waiting:
            self._held += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._calm.clear()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place came together with the end
                self._held -= 1
            self._pass_on()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self._held -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting and (self._waiting[0].done() or self._held < self._limit):
            turn = self._waiting.popleft()
            if not turn.done():  # else it is waited for no more
                self._held += 1
                turn.set_result(None)
        if not self._waiting:
            self._calm.set()
