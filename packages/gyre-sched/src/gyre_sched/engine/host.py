"""The life of one engine process, from its start to its last restart.

    start ──▶ serving ── release ──▶ released ── come_back ──▶ serving      (the same process throughout)
                │  ▲                    │
              ends  └ restart, refresh, probe    ends: started again by come_back only, its memory is the trainer's

`watch` notices ends and restarts; the other methods wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gyre_sched.attempts import Attempts
from gyre_sched.engine import launch
from gyre_sched.engine.client import EngineClient
from gyre_sched.engine.config import EngineConfig
from gyre_sched.engine.pages import Pages
from gyre_sched.engine.refresh import decode, label, refresh, same_weights
from gyre_sched.errors import EngineError, EngineStartError, RefreshError, WeightsUnknown
from gyre_transport.errors import ProcessError
from gyre_transport.keys import load_token
from gyre_transport.process import Child
from gyre_transport.snapshot import Manifest

log = logging.getLogger(__name__)

_BASE = 0  # the version of the model folder an engine starts from


class EngineHost:
    """Owns one engine. `changed` is called whenever `alive`, `released`, `version` or `detail` does."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        model: Path,
        log_file: Path,
        changed: Callable[[], None] = lambda: None,
        pages: Pages | None = None,
    ) -> None:
        """pages: how KV pages move with requests; None: they do not."""
        self.name = name
        self.url = ""  # the same for the engine's whole life
        self.alive = False  # healthy and warm
        self.released = False
        self.version = _BASE  # weights it serves
        self.detail = ""  # why it is not alive
        self._config = config
        self._model = model
        self._log_file = log_file
        self._changed = changed
        self._pages = pages
        self._attempts = Attempts(config.attempts, config.attempts_window)
        self._given_up = False
        self._manifest: Manifest | None = None  # the last one seen
        self._held: Manifest | None = None  # the one the engine's weights came from; None: the model folder
        self._port = 0
        self._held_port: socket.socket | None = None
        self._child: Child | None = None
        self._started = asyncio.Event()  # a child is there to be watched
        self._client: EngineClient | None = None
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the engine's guard; None while there is no engine."""
        return self._child.pid if self._child else None

    @property
    def client(self) -> EngineClient:
        """The engine's control API. Raises `EngineError` before `start`."""
        if self._client is None:
            raise EngineError(f"engine {self.name} was not started")
        return self._client

    # --- start and stop ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Launch, wait until healthy, warm up; `url` is then set. Raises `EngineStartError`, nothing left running."""
        async with self._lock:
            launch.check(self._config, self._model, moves=self._pages is not None)
            if self._held_port is None:
                self._held_port = launch.hold_port(self._config)
            port = int(self._held_port.getsockname()[1])
            host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
            self.url = f"http://{host}:{port}"
            self._client = EngineClient(
                self.name,
                self.url,
                timeout=self._config.call_timeout,
                token=load_token(Path(self._config.key), "engine.key") if self._config.key else "",
            )
            self._port = port
            await self._launch()
            self.alive = True
        self._changed()

    async def _launch(self) -> None:
        cuda = launch.uses_cuda(self._config)
        argv, env = launch.command(
            self._config, self._model, self._port, cuda=cuda, kv=self._pages.linker if self._pages else None
        )
        began = time.monotonic()
        try:
            child = await Child.start(
                f"engine {self.name}", argv, log=self._log_file, env=env, ready_within=None, guarded=True
            )
        except ProcessError as e:
            raise EngineStartError(str(e)) from e
        try:
            await self._unless_ended(child, self._become_ready())
        except EngineError as e:
            told = f"{e}; {child.tail()}"
            await child.stop(self._config.stop_timeout)
            raise EngineStartError(told) from e
        except BaseException:
            await child.stop(self._config.stop_timeout)
            raise
        log.info("engine %s is ready at %s after %.1f s", self.name, self.url, time.monotonic() - began)
        self._child, self.version, self.released, self._held = child, _BASE, False, None
        self._started.set()

    async def _become_ready(self) -> None:
        await self.client.wait_healthy(deadline=self._config.start_timeout)
        await self.client.warm_up(deadline=self._config.warm_timeout)

    async def _unless_ended(self, child: Child, work: Awaitable[None]) -> None:
        """Carry out `work`; raise `EngineStartError` as soon as the process ends."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineStartError(f"engine {self.name} ended with exit code {ended.result()} while starting")
            task.result()
        finally:
            task.cancel()
            ended.cancel()
            await asyncio.gather(task, ended, return_exceptions=True)

    async def stop(self) -> None:
        """End the engine and its process tree; `watch` must have been cancelled."""
        async with self._lock:
            if self._child is not None:
                await self._child.stop(self._config.stop_timeout)
                self._child = None
            self.alive = False
            if self._client is not None:
                await self._client.close()
            if self._pages is not None:
                await self._pages.close()
            if self._held_port is not None:
                self._held_port.close()
                self._held_port = None

    # --- watching ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Notice an engine's end and start it again, for as long as this runs. Raises `EngineError` when it ended too
        often."""
        while not self._given_up:
            await self._started.wait()
            child = self._child
            if child is None:
                self._started.clear()
                continue
            reason = await self._end_of(child)
            self.alive, self.detail = False, reason
            log.warning("engine %s: %s", self.name, reason)
            self._changed()
            async with self._lock:
                await child.stop(self._config.stop_timeout)
                self._child = None
                self._started.clear()
                self._given_up = not self._attempts.again(time.monotonic())
                while not (self.released or self._given_up or self.alive):
                    await self._try_restart()
            self._changed()
        raise EngineError(f"engine {self.name} was given up: {self.detail}; see {str(self._log_file)!r}")

    async def _end_of(self, child: Child) -> str:
        """Wait until the process ends or stops answering; returns what happened."""
        ended = asyncio.ensure_future(child.wait())
        silent = 0
        try:
            while True:
                await asyncio.wait({ended}, timeout=self._config.health_interval)
                if ended.done():
                    return f"it ended with exit code {ended.result()}"
                try:
                    await self.client.health()
                    silent = 0
                except EngineError as e:
                    silent += 1
                    if silent >= self._config.health_failures:
                        return f"it did not answer {silent} health checks: {e}"
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def _try_restart(self) -> None:
        try:
            await self._restart()
        except EngineError as e:
            self.alive, self.detail = False, str(e)
            log.error("engine %s could not be restarted: %s", self.name, e)
            self._given_up = not self._attempts.again(time.monotonic())
            if self._given_up:
                self.detail = f"given up after {self._attempts.ends} ends: {e}"
            self._changed()

    async def _restart(self) -> None:
        """Launch again on the same port, take the last weights seen, probe."""
        await self._launch()
        if self._manifest is not None and self._manifest.version != self.version:
            try:
                await self._serve(self._manifest.version, self._manifest, time.monotonic() + self._config.start_timeout)
            except RefreshError as e:  # most likely replaced by a newer one: who asks for that one sends its manifest
                log.warning("engine %s is back with version %d only: %s", self.name, self.version, e)
            except BaseException:
                await self._discard()
                raise
        self.alive, self.detail = True, ""

    async def _discard(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.stop(self._config.stop_timeout)

    # --- role switches ----------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """Verify that the engine is idle, aborting what is not, and release its memory; new requests wait until
        `come_back`. An engine that is down stays down. Idempotent. Raises `EngineError`."""
        async with self._lock:
            if self.alive and not self.released:
                if self._pages is not None:
                    await self._pages.hold()  # what moved requests, and their executions' next ones, left here
                await self.client.pause("abort")
                await self.client.flush_cache()  # refused unless the engine is idle, and releasing would end it then
                await self.client.release_memory()
            self.released = True
        self._changed()

    async def come_back(self, version: int, manifest: bytes, *, deadline: float) -> None:
        """Resume, take `version` unless it is served already, probe. Starts an engine that is down. Idempotent.

        Raises `RefreshError` and other `EngineError`s.
        """
        end = time.monotonic() + deadline
        wanted = self._remember(version, manifest)
        async with self._lock:
            if self._given_up:
                raise EngineError(f"engine {self.name} was given up: {self.detail}; see {str(self._log_file)!r}")
            if self._child is None:
                await self._launch()
            elif self.released:
                await self.client.resume_memory()
            self.released = False
            await self._serve(version, wanted, end)
            self.alive, self.detail = True, ""
        self._changed()

    async def refresh(self, version: int, manifest: bytes, *, deadline: float) -> None:
        """Take `version` while serving: requests in flight are paused and go on with it. Raises as `come_back`."""
        end = time.monotonic() + deadline
        wanted = self._remember(version, manifest)
        async with self._lock:
            if not self.alive or self.released:
                raise EngineError(
                    f"engine {self.name} serves nothing that could be refreshed: {self.detail or 'released'}"
                )
            await self._serve(version, wanted, end)
        self._changed()

    def _remember(self, version: int, manifest: bytes) -> Manifest | None:
        if manifest:
            self._manifest = decode(manifest, version)
        elif version != self.version:
            decode(manifest, version)  # raises: a version without a manifest
        return self._manifest if manifest else None

    async def _serve(self, version: int, wanted: Manifest | None, end: float) -> None:
        other = self._held is not None and wanted is not None and not same_weights(self._held, wanted)
        if wanted is not None and (version != self.version or other):
            await self._update(wanted, deadline=end - time.monotonic())
        await self.client.resume()
        served = await self.client.probe(deadline=max(end - time.monotonic(), 1.0))
        expected = label(self._held) if self._held is not None else str(_BASE)
        if served != expected:
            raise EngineError(f"engine {self.name} was probed: expected {expected!r}, it sampled with {served!r}")

    async def _update(self, manifest: Manifest, *, deadline: float) -> None:
        try:
            cuda = launch.uses_cuda(self._config)
            await refresh(self.client, manifest, self._model, self._config, cuda=cuda, deadline=deadline)
        except WeightsUnknown:
            if self._child is not None:  # `watch` sees its end and starts it again
                with contextlib.suppress(ProcessError):
                    await self._child.stop(self._config.stop_timeout)
            raise
        self.version, self._held = manifest.version, manifest
