"""The control side of one engine's HTTP API.

    async with EngineClient("cell-0", "http://127.0.0.1:31000") as engine:
        await engine.wait_healthy(deadline=300)
        await engine.warm_up(deadline=120)

Deadlines are seconds from the call. Every method raises `EngineUnreachable`, `EngineTimeout` or `EngineRefused`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import aiohttp

from gyre_sched.errors import EngineRefused, EngineTimeout, EngineUnreachable

_POLL = 0.25  # seconds between looks at a server that is starting


class EngineClient:
    """One engine, named `name` in errors, at `url`."""

    def __init__(self, name: str, url: str, *, timeout: float = 60.0, token: str = "") -> None:
        """timeout: deadline of the calls that take none. token: what the engine asks for; "": nothing."""
        self.name = name
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Close the connections, for good: later calls raise `EngineUnreachable`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _call(self, method: str, path: str, body: Any = None, *, deadline: float | None = None) -> Any:
        """The decoded JSON answer, or None for an answer that is not JSON."""
        seconds = self._timeout if deadline is None else max(deadline, 0.001)
        if self._closed:
            raise EngineUnreachable(f"engine {self.name} at {self.url} was stopped; {path} was not sent")
        if self._session is None:
            # An engine closes idle connections: a request that met such a close would look like a lost engine.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                text = await response.text()
                if response.status >= 400:
                    raise EngineRefused(
                        f"engine {self.name} refused {path}: {response.status} {text[:500]!r}; see its log",
                        response.status,
                    )
                return await response.json() if response.content_type == "application/json" else None
        except TimeoutError as e:
            raise EngineTimeout(
                f"engine {self.name} did not answer {path} in {seconds:g} s; is it overloaded or hung? see its log"
            ) from e
        except (aiohttp.ClientError, ConnectionError) as e:
            raise EngineUnreachable(f"engine {self.name} at {self.url} cannot be reached: {e}; is it up?") from e

    # --- health -----------------------------------------------------------------------------------------------------

    async def health(self, *, deadline: float | None = None) -> None:
        """Return when the server says it is healthy; it says so once it has started."""
        await self._call("GET", "/health", deadline=deadline)

    async def wait_healthy(self, *, deadline: float) -> None:
        """Ask until healthy. Raises `EngineTimeout` with the last reason at the deadline."""
        end = time.monotonic() + deadline
        while (left := end - time.monotonic()) > 0:
            try:
                return await self.health(deadline=left)
            except (EngineUnreachable, EngineRefused) as e:
                reason: Exception = e
            except EngineTimeout:
                break
            await asyncio.sleep(min(_POLL, left))
        else:
            raise EngineTimeout(f"engine {self.name} was not healthy in {deadline:g} s: {reason}")
        raise EngineTimeout(f"engine {self.name} was not healthy in {deadline:g} s: it did not answer /health")

    async def warm_up(self, *, deadline: float) -> None:
        """Generate for the first time, which is slow, and take what is loaded by then out of garbage collection."""
        end = time.monotonic() + deadline
        await self.probe(deadline=deadline)
        await self._call("POST", "/freeze_gc", deadline=max(end - time.monotonic(), 1.0))

    async def probe(self, *, deadline: float) -> str:
        """Generate two tokens; returns the weight version that sampled them. Raises `EngineRefused` if it cannot."""
        answer = await self.generate([1, 2, 3], max_new_tokens=2, deadline=deadline)
        try:
            version, finish = answer["meta_info"]["weight_version"], answer["meta_info"]["finish_reason"]
        except (KeyError, TypeError):
            version = finish = None
        if not isinstance(version, str) or not answer["output_ids"] or (finish or {}).get("type") == "abort":
            raise EngineRefused(f"engine {self.name} answered a probe with {answer!r}; see its log", 200)
        return version

    async def generate(
        self, input_ids: list[int], *, max_new_tokens: int, deadline: float, temperature: float = 0.0, **more: Any
    ) -> dict[str, Any]:
        """`/generate` as SGLang answers it, end-of-text ignored. more: further fields of the request."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": True}
        body = {"input_ids": input_ids, "sampling_params": sampling, **more}
        answer: dict[str, Any] = await self._call("POST", "/generate", body, deadline=deadline)
        return answer

    # --- requests in flight -----------------------------------------------------------------------------------------

    async def abort_all(self) -> None:
        """Abort whatever is in flight; each request returns what it has, with finish reason `abort`."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def pause(self, mode: Literal["abort", "retract", "in_place"], *, deadline: float | None = None) -> None:
        """Hold new requests back until `resume`; those in flight are aborted, put back into the queue, or stopped.

        abort returns when none is left.
        """
        await self._call("POST", "/pause_generation", {"mode": mode}, deadline=deadline)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def flush_cache(self) -> None:
        """Empty the prefix cache. Raises `EngineRefused` unless the engine is idle or paused with `retract`."""
        await self._call("POST", "/flush_cache")

    # --- memory and weights -----------------------------------------------------------------------------------------

    async def release_memory(self) -> None:
        """Give KV pool and weights back. The engine must be idle (it ends itself otherwise), and not released yet."""
        await self._call("POST", "/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        """Take the memory again. The engine must be released (it ends itself otherwise)."""
        await self._call("POST", "/resume_memory_occupation", {})

    async def update_weights_from_disk(
        self, folder: str, label: str, *, flush: bool, deadline: float | None = None
    ) -> None:
        """Load a Hugging Face folder in place and call what is sampled from now on `label`; flush: the cache, too.

        Nothing is aborted. Raises `EngineRefused` when loading failed: what the engine serves is then unknown.
        """
        body = {"model_path": folder, "weight_version": label, "flush_cache": flush, "abort_all_requests": False}
        await self._call("POST", "/update_weights_from_disk", body, deadline=deadline)

    async def begin_weight_update(self) -> None:
        """Before the first `update_weights_from_tensor`."""
        await self._call("POST", "/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """After the last."""
        await self._call("POST", "/end_weight_update", {})

    async def update_weights_from_tensor(
        self, payloads: list[str], label: str | None, *, flush: bool, deadline: float | None = None
    ) -> None:
        """Load tensors that lie in shared memory; label, flush: as `update_weights_from_disk`, None keeps the label.

        payloads: how each rank opens them, see `loading`.
        """
        body = {
            "serialized_named_tensors": payloads,
            "weight_version": label,
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        await self._call("POST", "/update_weights_from_tensor", body, deadline=deadline)

    async def weight_version(self) -> str:
        """The label of the weights."""
        info = await self._call("GET", "/model_info")
        return str(info["weight_version"])

    async def checksum(self) -> Any:
        """A checksum of every weight, one mapping a rank."""
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"})
        return answer["ranks"]
