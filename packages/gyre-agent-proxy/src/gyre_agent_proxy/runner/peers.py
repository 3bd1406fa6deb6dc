"""Who the runner talks to: the scheduler (bursts, water level), the feed's intake, the proxy.

A peer that is restarted is waited for: every request here may be sent twice, and is sent again until `within` seconds
have passed. A peer's refusal is an error at once, unless it asks for the same again later: a feed that is full does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from gyre_agent_proxy.runner.errors import RunnerError
from gyre_sched import protocol as sched
from gyre_traj import intake
from gyre_transport.bus import Client
from gyre_transport.errors import BusError, DeadlineExceeded, RemoteError
from gyre_transport.run import BusConfig

log = logging.getLogger(__name__)

_DEADLINE = 10.0  # seconds for one try
_CLOSE_DEADLINE = 60.0  # seconds for closing an execution: the proxy aborts its calls at the engines first
_PAUSE = 0.5  # seconds before the next


class PeerError(RunnerError):
    """A peer refused a request, or gave no answer for as long as the runner waits."""


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """What the proxy says of an execution that was closed."""

    calls: int | None = None  # answered; None: it does not say
    failing: str = ""  # why its last call failed, if it did and not by its own fault


class Peers:
    """Connections to the runner's peers; an asynchronous context manager."""

    def __init__(self, bus: BusConfig, proxy_url: str, *, within: float = 300.0) -> None:
        self._scheduler = Client(bus.address("scheduler"), sched.Reply)
        self._intake = Client(bus.address("feed.intake"), intake.Reply)
        self._proxy_url = proxy_url.rstrip("/")
        self._within = within
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Peers:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CLOSE_DEADLINE))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._scheduler.close()
        await self._intake.close()
        if self._http is not None:
            await self._http.close()

    async def grant(self, burst: int, executions: int, tasks: Sequence[str], within: float) -> sched.Granted:
        """Wait for the scheduler to grant `burst`, whose groups are of `tasks`; says how many harnesses may be alive at
        a time, and which groups start first."""
        end = time.monotonic() + within
        request = sched.OpenBurst(burst=burst, executions=executions, tasks=tuple(tasks))
        while True:
            reply = await self._call("scheduler", self._scheduler, request)
            if isinstance(reply, sched.Granted):
                if reply.order and sorted(reply.order) != list(range(len(tasks))):  # a group left out would be skipped
                    raise PeerError(
                        f"the scheduler ordered the groups of burst {burst}: expected each of 0 to {len(tasks) - 1} "
                        f"once, got {reply.order!r}; is it of another run, or another version of Gyre?"
                    )
                return reply
            if not isinstance(reply, sched.NotYet):
                raise PeerError(f"the scheduler answered OpenBurst with {reply!r}; is it another version of Gyre?")
            if time.monotonic() + reply.retry > end:
                raise PeerError(
                    f"burst {burst} was not granted in {within:g} s; the scheduler says: {reply.reason}; "
                    "see its log, or raise runner.grant_within"
                )
            await asyncio.sleep(reply.retry)

    async def started(self, execution: str, task: str) -> None:
        """Tell the scheduler."""
        await self._call("scheduler", self._scheduler, sched.Started(execution=execution, task=task))

    async def terminated(self, execution: str, *, again: bool) -> None:
        """Tell the scheduler.

        again: it may have been told before, so one that has begun anew since and counts nothing may refuse it.
        """
        try:
            await self._call("scheduler", self._scheduler, sched.Terminated(execution=execution))
        except PeerError as e:
            if not again or not isinstance(e.__cause__, RemoteError):
                raise
            log.warning("%s; going on, since its end is not news", e)

    async def replace(self, execution: str, by: str, burst: int) -> str:
        """Have the scheduler count `execution` as ended and `by` as dispatched; returns why it declines, if so."""
        request = sched.Replace(execution=execution, by=by, burst=burst)
        reply = await self._call("scheduler", self._scheduler, request)
        if isinstance(reply, sched.Declined):
            return reply.reason
        if not isinstance(reply, sched.Ack):
            raise PeerError(f"the scheduler answered Replace with {reply!r}; is it another version of Gyre?")
        return ""

    async def submit(self, submission: intake.Submit) -> None:
        """Hand a finished execution to the feed."""
        reply = await self._call("feed", self._intake, submission)
        if not isinstance(reply, intake.Accepted):
            raise PeerError(f"the feed answered Submit with {reply!r}; is it another version of Gyre?")

    async def fates(self, since: int) -> intake.FateList:
        """The fates decided after the first `since`."""
        reply = await self._call("feed", self._intake, intake.Fates(since=since))
        if not isinstance(reply, intake.FateList):
            raise PeerError(f"the feed answered Fates with {reply!r}; is it another version of Gyre?")
        return reply

    async def close_execution(self, execution: str, key: str) -> Closed:
        """End the execution at the proxy: its open calls are aborted and its call log is complete when this returns."""
        assert self._http is not None, "use as a context manager"  # noqa: S101
        url = f"{self._proxy_url}/gyre/executions/{execution}/close"
        end = time.monotonic() + self._within
        while True:
            try:
                async with self._http.post(url, headers={"Authorization": f"Bearer {key}"}) as response:
                    text = await response.text()
                    if response.status == 404:  # it never made a call
                        return Closed(calls=0)
                    if response.status < 300:
                        return _closed(text)
                    problem = f"HTTP {response.status}: {text[:200]}"
                    if response.status < 500:
                        raise PeerError(f"the proxy refused to close execution {execution!r}: {problem}")
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                problem = f"{type(e).__name__}: {e}"
            if time.monotonic() > end:
                raise PeerError(
                    f"the proxy at {self._proxy_url} did not close execution {execution!r} in {self._within:g} s: "
                    f"{problem}; see its log"
                )
            log.warning("closing %s at the proxy: %s; trying again", execution, problem)
            await asyncio.sleep(_PAUSE)

    async def _call(self, name: str, client: Client, request: Any) -> Any:
        end = time.monotonic() + self._within
        while True:
            try:
                return await client.call(request, deadline=_DEADLINE)
            except DeadlineExceeded as e:
                if time.monotonic() > end:
                    raise PeerError(f"the {name} gave no answer for {self._within:g} s: {e}") from e
                log.warning("%s; trying again", e)
            except BusError as e:
                if _later(e) and time.monotonic() < end:
                    log.warning("the %s: %s; trying again", name, e)
                    await asyncio.sleep(_PAUSE)
                    continue
                raise PeerError(f"the {name} refused {type(request).__name__}: {e}") from e


def _later(e: BusError) -> bool:
    """Whether the refusal is one of the moment."""
    return isinstance(e, RemoteError) and e.kind == "FeedError" and "again later" in e.message


def _closed(text: str) -> Closed:
    try:
        return msgspec.json.decode(text, type=Closed)
    except msgspec.DecodeError:
        return Closed()
