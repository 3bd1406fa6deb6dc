"""SGLang's HTTP API, as far as a generation needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from gyre_agent_proxy.conversation import Sampling
from gyre_agent_proxy.errors import EngineRefused
from gyre_agent_proxy.stream import Event, Events, StreamError

_EVENT = msgspec.json.Decoder(Event)


class EngineClient:
    """Requests to engines over one HTTP session; timeouts in seconds.

    silence: how long an engine may send nothing in the middle of an answer.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        stop_ids: tuple[int, ...],
        *,
        connect: float,
        silence: float,
        token: str = "",
    ) -> None:
        self.stop_ids = stop_ids
        self._session = session
        self._stream = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=silence)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._control = aiohttp.ClientTimeout(total=connect)

    async def generate(
        self, url: str, rid: str, input_ids: list[int], sampling: Sampling, limit: int, *, interval: int, fresh: bool
    ) -> AsyncIterator[Event]:
        """Yield the events of `/generate` for at most `limit` new tokens, after the first one every `interval` tokens.

        fresh: nothing of the call was sampled yet, so what the engine refuses with 400 before its first event is the
        request itself. Raises `EngineRefused` then, `StreamError` for any other answer that is no stream of events,
        aiohttp's errors when the connection fails.
        """
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": {**sampling_params(sampling, limit, self.stop_ids), "stream_interval": interval},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "rid": rid,
        }
        data = msgspec.json.encode(body)
        del input_ids, body  # ten times the size of the ids, and the answer may take minutes
        async with self._session.post(
            f"{url}/generate",
            data=data,
            headers={"content-type": "application/json", **self._headers},
            timeout=self._stream,
        ) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                if response.status == 400 and fresh:
                    raise EngineRefused(f"the engine refused the request: {_message(text)}")
                if response.status in (401, 403):
                    raise StreamError(f"the engine wants another token ({response.status}: {text}); see engine_key")
                raise StreamError(f"expected status 200 from the engine, got {response.status}: {text}")
            events = Events()
            async for raw in response.content.iter_any():
                for payload in events.feed(raw):
                    if payload == b"[DONE]":
                        return
                    try:
                        event = _EVENT.decode(payload)
                    except (msgspec.DecodeError, UnicodeDecodeError) as e:
                        raise StreamError(f"the engine's event is not one of /generate: {e}") from e
                    if event.error is not None:
                        if fresh and _code(event.error) == 400:
                            raise EngineRefused(f"the engine refused the request: {_message(payload.decode())}")
                        raise StreamError(f"the engine reported: {_message(payload.decode())}")
                    yield event
                    fresh = False

    async def abort(self, url: str, rid: str) -> None:
        """Ask the engine to end request `rid`; it answers alike whether it knows it or not."""
        async with self._session.post(
            f"{url}/abort_request", json={"rid": rid}, headers=self._headers, timeout=self._control
        ) as response:
            await response.read()


def sampling_params(sampling: Sampling, max_new_tokens: int, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    """SGLang's sampling parameters."""
    found: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # Neutral, so that no default of the model's folder changes the distribution that is recorded.
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    if stop_ids:
        found["stop_token_ids"] = list(stop_ids)
    for name in ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (value := getattr(sampling, name)) is not None:
            found[name] = value
    if sampling.seed is not None:
        found["sampling_seed"] = sampling.seed
    return found | sampling.constraint


def _code(error: Any) -> Any:
    """The status inside an error event, which itself comes with status 200; None if there is none."""
    return error.get("code") if isinstance(error, dict) else None


def _message(text: str) -> str:
    """The message inside an engine's error body."""
    try:
        error = msgspec.json.decode(text.encode()).get("error")
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (msgspec.DecodeError, AttributeError, KeyError):
        return text[:500]
