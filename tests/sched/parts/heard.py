"""The scheduler's end of a cell agent under test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gyre_sched import protocol as p


class Heard:
    """A scheduler that acknowledges every request and remembers it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._news = asyncio.Condition()

    async def handle(self, request: p.Request) -> p.Reply:
        """The server's handler."""
        async with self._news:
            self.messages.append(request)
            self._news.notify_all()
        return p.Registered(term=1, registration=1) if isinstance(request, p.CellHello) else p.Ack()

    async def state(self, true: Callable[[p.CellState], bool], since: int = 0, *, wait: float = 300.0) -> p.CellState:
        """The first CellState after the first `since` messages of which `true` holds; `wait`: seconds."""

        def found() -> p.CellState | None:
            return next((m for m in self.messages[since:] if isinstance(m, p.CellState) and true(m)), None)

        async with self._news, asyncio.timeout(wait):
            await self._news.wait_for(lambda: found() is not None)
            state = found()
            assert state is not None
            return state

    def hello(self) -> p.CellHello:
        """The first CellHello."""
        found: p.CellHello = next(m for m in self.messages if isinstance(m, p.CellHello))
        return found
