"""One call on its way to an answer. Several connections may wait for it: a harness repeats a request it lost.

running ─ the engine finished ─▶ recorded ─▶ answered ─ written to a connection whole ─▶ delivered
   │ nobody waits for `disconnect_grace` seconds ─▶ aborted at the engine, recorded, undelivered
   └ engines or log failed ─▶ failed
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from gyre_agent_proxy.conversation import Conversation, Reply, Request
from gyre_agent_proxy.generate import Generation

_NOTHING = Conversation(messages=())


class Attempt:
    """`reply` is set exactly once, to a `Reply` or a `ProxyError`."""

    def __init__(
        self, call: str, request: Request, role: str, created: int, *, grace: float = 0.0, gather: float = 0.0
    ) -> None:
        """grace, gather: `disconnect_grace` and `gather` of `ProxyConfig`."""
        self.call = call
        self.request = request
        self.role = role
        self.created = created  # unix seconds
        self.started = round(time.time(), 3)
        self.generation: Generation | None = None
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.reply.add_done_callback(lambda f: f.cancelled() or f.exception())  # a failure nobody waits for is logged
        self.recorded = False  # its call is in the log
        self.delivered = False
        self.prompt_tokens = 0
        self.thinking = False  # the prompt opened the reasoning
        self.unattended = asyncio.Event()  # no connection waits, or is written to, any more
        self.unattended.set()
        self._grew = asyncio.Event()
        self._waiting = 0
        self._grace = grace
        self._gather = gather
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ids(self) -> Sequence[int]:
        """Sampled so far."""
        return self.generation.output.ids if self.generation is not None else ()

    def tell(self) -> Sequence[int]:
        """Sampled so far, for a client: none of it will be taken back."""
        if self.generation is None:
            return ()
        output = self.generation.output
        output.told = len(output.ids)
        return output.ids

    @property
    def joinable(self) -> bool:
        """Whether an equal request may wait for this answer."""
        if self.reply.done():
            return not self.delivered and self.reply.exception() is None
        return self.generation is None or not self.generation.abandoned

    def progress(self) -> None:
        """More was sampled."""
        self._grew.set()

    def settle(self, result: Reply | BaseException) -> None:
        """Set the reply, and let go of what led to it: answers that were not delivered may be kept for long."""
        if not self.reply.done():
            if isinstance(result, BaseException):
                self.reply.set_exception(result)
            else:
                self.reply.set_result(result)
        self.generation = None
        self.request = msgspec.structs.replace(self.request, conversation=_NOTHING, other={}, echo=None)
        self.progress()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a connection that waits; when the last one goes too early, the call is abandoned after the grace."""
        self._waiting += 1
        self.unattended.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self.unattended.set()
            if self._waiting == 0 and not self.reply.done() and self.generation is not None:
                self._timer = asyncio.get_running_loop().call_later(self._grace, self.generation.abandon)

    async def changed(self, seen: int, timeout: float) -> bool:
        """Wait until there are other than `seen` tokens or the reply is there; False after `timeout` seconds."""
        if seen and self._gather:
            await asyncio.wait({self.reply}, timeout=min(self._gather, timeout))
        if len(self.ids) != seen or self.reply.done():
            return True
        self._grew.clear()  # others who wait and were woken look at the ids, not at this
        try:
            async with asyncio.timeout(timeout):
                await self._grew.wait()
        except TimeoutError:
            return False
        return True
