"""One generation, wherever it runs: sampled tokens are kept, whatever happens to the engine that sampled them.

    choose engine ─▶ POST /generate {input_ids: prompt + got, max_new_tokens: max - len(got), rid} ─▶ read the stream
        ▲                      │ finished                                             ─▶ done
        │                      │ told to move (drain) ─▶ /abort_request until the stream has ended ─┐
        │                      │ aborted by the engine, connection lost, engine dead ───────────────┤
        └──────────────────────┴──────────── with the tokens at hand ◀────────────────────────────────┘

An engine looks for stop strings in its own output only, so after a move the joined text is looked at here; a stop that
spans the cut ends the generation at the token that completes it. Nor can it take up a constrained answer in its middle:
such a call begins again, and its client is told nothing before the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from gyre_agent_proxy.client import EngineClient
from gyre_agent_proxy.config import ProxyConfig
from gyre_agent_proxy.conversation import Sampling
from gyre_agent_proxy.engines import EngineState, Pool
from gyre_agent_proxy.errors import EngineError, EngineRefused, NoEngine
from gyre_agent_proxy.metrics import Metrics
from gyre_agent_proxy.output import Output
from gyre_agent_proxy.pages import PageMoves
from gyre_agent_proxy.stops import stop_across, stop_at_end
from gyre_agent_proxy.stream import Reader, StreamError, Versions, version_number
from gyre_agent_proxy.vocabulary import Vocabulary
from gyre_traj.records import Attempt, Span

log = logging.getLogger(__name__)


class Engines:
    """What every generation needs: the pool, a client, limits, counters and whom to tell of a lost engine."""

    def __init__(
        self,
        pool: Pool,
        client: EngineClient,
        config: ProxyConfig,
        metrics: Metrics,
        vocabulary: Vocabulary,
        lost: Callable[[str, str], None] = lambda engine, detail: None,
        pages: PageMoves | None = None,
    ) -> None:
        self.pool = pool
        self.client = client
        self.config = config
        self.metrics = metrics
        self.vocabulary = vocabulary
        self.lost = lost
        self.pages = pages or PageMoves(metrics, 0)


class Generation:
    """One call's sampling; `output` may be read while it runs, `progress` is called whenever it grew."""

    def __init__(
        self,
        engines: Engines,
        execution: str,
        prompt: NDArray[np.uint32],
        sampling: Sampling,
        progress: Callable[[], None] = lambda: None,
        interval: int = 1,
        computed: int = 0,
    ) -> None:
        """interval: tokens that an engine may keep back to send them in one event; lost with it if it dies.

        computed: tokens the prompt begins with that engines have computed for an earlier call of the execution.
        """
        self.output = Output()
        self._e = engines
        self._execution = execution
        self._prompt = prompt
        self._sampling = sampling
        self._progress = progress
        self._interval = interval
        self._computed = computed
        self._request: tuple[str, str, asyncio.Timeout] | None = None  # url, rid, limit of the one that is open
        self._leaving: asyncio.Task[None] | None = None  # aborts it
        self._certain: int | None = None  # as `Reader.certain`, of the last attempt
        self._came_from: str | None = None  # the execution's last engine, when the next attempt is at another
        self._left: EngineState | None = None  # the drained engine whose pages are not fetched yet
        self._cached: tuple[int, int] | None = None  # tokens the engine had or restored, and the restored ones
        self._reason = ""
        self._abandoned = False

    def move(self, reason: str) -> None:
        """Leave the present engine and go on elsewhere."""
        self._leave(self._reason or reason)

    def _tokens(self) -> list[int]:
        """Prompt and output so far."""
        ids: list[int] = self._prompt.tolist()
        return ids + self.output.ids if self.output.ids else ids

    @property
    def abandoned(self) -> bool:
        """Whether the answer is no longer wanted."""
        return self._abandoned

    def abandon(self) -> None:
        """Nobody wants the answer: abort at the engine and end with finish "abort"."""
        self._abandoned = True
        self._leave("abort")  # also when it was about to move: nothing goes on elsewhere

    def _leave(self, reason: str) -> None:
        self._reason = reason
        if self._request is not None and self._leaving is None:
            self._leaving = asyncio.create_task(self._abort(*self._request), name=f"leave {self._request[1]}")

    async def run(self) -> Output:
        """Sample to the end. Raises `EngineRefused`, `EngineError`, `NoEngine`; `output` then holds what there is."""
        try:
            return await self._run()
        finally:
            await self._gone()

    async def _run(self) -> Output:
        out, failures = self.output, 0
        while not out.finish:
            if self._abandoned:
                out.finish = "abort"
            elif len(out.ids) >= self._sampling.max_tokens:
                out.finish = "length"
            else:
                state = await self._engine()
                if state is None:
                    continue
                await self._bring(state)
                if state.draining or not state.routed:
                    continue  # it began to leave meanwhile, and may have been told that nothing more comes
                if (detail := await self._attempt(state)) is None:
                    self._e.pool.succeeded(state)
                    continue
                failures += 1
                self._e.metrics.add("engine_failures")
                self._e.pool.failed(state, asyncio.get_running_loop().time())
                self._e.lost(state.route.name, detail)
                log.warning("engine %s lost a request of %s: %s", state.route.name, self._execution, detail)
                if failures >= self._e.config.attempts:
                    raise EngineError(
                        f"engines failed this call {failures} times, the last was {state.route.name!r}: {detail}; "
                        "look at their logs, or raise proxy.attempts"
                    )
        return out

    async def _engine(self) -> EngineState | None:
        """Wait for an engine; None when abandoned meanwhile. Raises `NoEngine` after `route_wait` seconds."""
        pool, loop = self._e.pool, asyncio.get_running_loop()
        end = loop.time() + self._e.config.route_wait
        while not self._abandoned:
            now = loop.time()
            if (state := pool.choose(self._execution, now)) is not None:
                self._came_from = pool.assign(self._execution, state)
                return state
            await self._gone()  # nobody is there to fetch what was left behind
            if now >= end:
                raise NoEngine(
                    f"no engine took the call within {self._e.config.route_wait:g} s "
                    f"(known: {sorted(pool.engines)!r}); look at engines and scheduler, or raise proxy.route_wait"
                )
            wait = min(end - now, pool.next_try(now) or 1.0, 1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait), pool.changed:
                    await pool.changed.wait()
        return None

    async def _bring(self, state: EngineState) -> None:
        """Have `state` fetch the KV pages that the execution's last engine has of these tokens."""
        if self._came_from is not None:
            source = self._e.pool.pages_at(self._came_from)
            await self._e.pages.bring(source, state.route.kv, self._tokens())
        await self._gone()

    async def _gone(self) -> None:
        """A drained engine need not keep anything for this call any more."""
        if (left := self._left) is not None:
            self._left = None
            left.leaving.discard(self)
            await self._e.pool.notify()

    async def _attempt(self, state: EngineState) -> str | None:
        """One request to one engine; returns why it failed, or None (finished, moved or abandoned)."""
        out, base = self.output, len(self.output.ids)
        rid = f"gyre-{secrets.token_hex(16)}"
        if self._abandoned:  # between the choice and here
            return None
        self._reason = ""
        self._e.metrics.add("attempts")
        state.active.add(self)
        self._cached = None
        context = len(self._prompt) + base
        end = "error: cancelled"
        try:
            end = await self._exchange(state, rid, base)
            if self._reason and end.startswith("error"):
                end = self._reason  # it was leaving anyway
        except EngineRefused:
            end = "error: refused"
            raise
        finally:
            state.active.discard(self)
            cached = self._cached[0] if self._cached is not None else None
            out.attempts.append(
                Attempt(
                    engine=state.route.name,
                    rid=rid,
                    tokens=len(out.ids) - base,
                    end=end,
                    context=context,
                    cached=cached,
                )
            )
            self._count_relocation(context)
            if len(out.ids) > base:  # else nobody knows how far it came
                self._computed = len(self._prompt) + len(out.ids)
            self._check_versions(base)
            self._check_stops(base)
            if self._sampling.constraint and out.ids and not (out.finish or self._abandoned):
                self._e.metrics.add("restarts")
                out.truncate(0)
                out.logprobs = []
                end = "error: aborted a constrained answer" if end == "abort" else end
            if self._reason == "drain" and not out.finish:
                state.moved += 1
                self._e.metrics.add("moves")
                if state.route.kv:
                    self._left = state
                    state.leaving.add(self)
            await self._e.pool.notify()
        return end.removeprefix("error: ") if end.startswith("error") and not out.finish else None

    def _count_relocation(self, context: int) -> None:
        """What is new in a call is computed wherever it goes, and counts for nothing here."""
        if self._came_from is not None and self._cached is not None:
            cached, restored = self._cached
            computed = min(self._computed, context)  # a constrained answer begins again
            self._e.metrics.add("relocated")
            self._e.metrics.add("relocated_tokens", max(0, computed - (cached - restored)))
            self._e.metrics.add("relocated_recomputed", max(0, computed - cached))

    async def _exchange(self, state: EngineState, rid: str, base: int) -> str:
        """Send the request and read its stream; returns how it ended, in `Attempt.end`'s words."""
        url = state.route.url
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._request = (url, rid, limit)
                return await self._read(state, rid, base)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self._e.client.abort(url, rid)
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            # Closing the connection, which the end of the limit does, aborts at the engine too.
            return self._reason if limit.expired() else f"error: {type(e).__name__}: {e}"
        except StreamError as e:
            with contextlib.suppress(Exception):
                await self._e.client.abort(url, rid)
            return f"error: {e}"
        finally:
            self._request = None
            if (leaving := self._leaving) is not None:
                self._leaving = None
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)

    async def _read(self, state: EngineState, rid: str, base: int) -> str:
        out, reader, default = self.output, Reader(), state.route.version
        spans = list(out.versions)
        versions: Versions = ()
        left = self._sampling.max_tokens - base
        events = self._e.client.generate(
            state.route.url,
            rid,
            self._tokens(),
            self._sampling,
            left,
            interval=self._interval,
            fresh=base == 0,
        )
        try:
            async for event in events:
                piece = reader.read(event)
                if piece.finish is not None and _refusal(piece.finish):
                    return self._refused(piece.finish)
                versions = piece.versions
                self._cached = piece.cached, piece.restored
                if base == 0 and piece.cached:
                    out.cached = piece.cached
                out.ids += piece.ids
                if piece.logprobs is None:
                    out.logprobs = None
                elif out.logprobs is not None:
                    out.logprobs += piece.logprobs
                if piece.finish is not None:
                    return self._finished(piece.finish, base)
                if piece.ids:
                    stops, decode = self._sampling.stop, self._e.vocabulary.decode
                    if stop_across(out.ids, base, stops, decode, looked=len(out.ids) - len(piece.ids)) is not None:
                        await self._e.client.abort(state.route.url, rid)
                        return "stop"
                    self._progress()
        finally:
            self._certain = reader.certain
            out.versions = spans + [
                Span(version_number(v, default), base + a, base + b) for v, a, b in versions if b > a
            ]
        return "error: the stream ended without a finish reason"

    def _refused(self, finish: dict[str, Any]) -> str:
        """An engine samples a token even for a request that it refuses, from a prompt of its own: it is not taken."""
        if not self.output.ids:
            raise EngineRefused(f"the engine refused the request: {finish.get('message')}")
        return f"error: refused by the engine: {finish.get('message')}"

    def _finished(self, finish: dict[str, Any], base: int) -> str:
        """Take over the engine's finish reason; returns `Attempt.end`."""
        out, kind = self.output, str(finish.get("type"))
        if kind == "abort":
            if self._reason or len(out.ids) > base:
                return self._reason or "abort"
            return f"error: aborted by the engine: {finish.get('message') or 'no reason given'}"
        if kind not in ("stop", "length"):
            return f"error: unknown finish reason {finish!r}"
        if kind == "stop" and len(out.ids) == 0:
            return "error: finished without a token"
        out.finish, out.matched = kind, finish.get("matched")
        return kind

    async def _abort(self, url: str, rid: str, limit: asyncio.Timeout) -> None:
        """Abort `rid` at its engine until its stream has ended, which cancels this; end `limit` after `abort_wait`.

        Repeated, because an engine ignores the abort of a request that has not reached its scheduler yet.
        """
        end = time.monotonic() + self._e.config.abort_wait
        while time.monotonic() < end:
            try:
                await self._e.client.abort(url, rid)
            except (aiohttp.ClientError, OSError, TimeoutError):
                return  # the engine is gone; its connection will say so
            await asyncio.sleep(0.25)
        limit.reschedule(asyncio.get_running_loop().time())

    def _check_versions(self, base: int) -> None:
        """Give up tokens of an engine that was lost before it said which weights sampled them; no told one, though."""
        out = self.output
        if self._certain is not None and not out.finish:
            kept = max(base + self._certain, out.told)
            log.warning("%s: %d tokens of unknown weights are sampled again", self._execution, len(out.ids) - kept)
            out.truncate(kept)

    def _check_stops(self, base: int) -> None:
        out, stops, decode = self.output, self._sampling.stop, self._e.vocabulary.decode
        if (found := stop_across(out.ids, base, stops, decode)) is not None:
            out.truncate(found[0])
            out.finish, out.matched = "stop", found[1]
        elif not out.finish and base == 0 and (stop := stop_at_end(out.ids, stops, decode)) is not None:
            # The engine was stopped between sampling the end of a stop string and looking for it.
            out.finish, out.matched = "stop", stop


def _refusal(finish: dict[str, Any]) -> bool:
    return finish.get("type") == "abort" and finish.get("status_code") == 400
