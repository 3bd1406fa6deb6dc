"""Replays recorded traffic of a harness through a proxy: does every request pass, and what tree does it make?

A capture is a JSON list of exchanges, or JSON Lines of them: `{"method", "path", "headers", "body", "response"}`, as a
recording proxy in between writes them. Answers come from the engine, so they differ from those recorded; in later
requests the recorded answers and the ids of their tool calls are replaced by the ones this proxy gave, as a harness
would have sent them. A stream that is asked for again at once was cut: its repeat is sent while it runs, and joins it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gyre_agent_proxy.errors import CaptureError
from gyre_agent_proxy.substitute import Substitutes

_CALLS = {"function", "tool_use", "function_call", "custom_tool_call"}
_SOON = 5  # exchanges within which a stream that was cut is asked for again
_OWN = {"authorization", "x-api-key", "content-length", "host", "connection", "accept-encoding"}


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer as recorded; other fields are ignored."""

    path: str
    method: str = "POST"
    headers: dict[str, str] = {}
    body: Any = None
    response: Any = None


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """How an exchange went."""

    index: int
    method: str
    path: str
    status: int
    seconds: float
    detail: str = ""  # what the proxy said of a request it did not answer


def load_capture(path: Path) -> list[Exchange]:
    """Read a capture. Raises `CaptureError`."""
    try:
        raw = path.read_bytes()
        if raw.lstrip()[:1] == b"[":
            found = msgspec.json.decode(raw, type=list[Exchange])
        else:
            found = msgspec.json.Decoder(Exchange).decode_lines(raw)
    except OSError as e:
        raise CaptureError(f"cannot read the capture {str(path)!r}: {e.strerror}") from e
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CaptureError(
            f"{str(path)!r} is not a capture: {e}; expected a list of objects with path, headers, body and response"
        ) from e
    if not found:
        raise CaptureError(f"the capture {str(path)!r} holds no exchange")
    return found


async def replay(capture: list[Exchange], url: str, key: str, deadline: float = 600.0) -> AsyncIterator[Replayed]:
    """Send the exchanges in order to the proxy at `url` under API key `key`; yield how each went.

    deadline: seconds for one answer. Streams are asked for as they were.
    """
    timeout = aiohttp.ClientTimeout(total=deadline)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        player = _Player(session, url, key)
        sent: set[int] = set()
        for at in range(len(capture)):
            if at not in sent:
                group = _asked_again(capture, at)
                sent.update(group)
                for done in await asyncio.gather(*(player.send(i, capture[i]) for i in group)):
                    yield done


class _Player:
    """Sends exchanges and remembers what they were answered."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session = session
        self._url = url
        self._key = key
        self._ids: dict[str, str] = {}  # of tool calls: the capture's -> the proxy's
        self._turns = Substitutes()

    async def send(self, index: int, exchange: Exchange) -> Replayed:
        headers = {n: v for n, v in exchange.headers.items() if n.lower() not in _OWN}
        headers["authorization"] = f"Bearer {self._key}"
        data = None
        if exchange.body is not None:
            text = msgspec.json.encode(self._turns.apply(exchange.path, exchange.body)).decode()
            for theirs, ours in self._ids.items():
                text = text.replace(theirs, ours)
            data = text.encode()
            headers.setdefault("content-type", "application/json")
        begun = time.monotonic()
        status, detail, raw = 0, "", b""
        ask = self._session.request(exchange.method, self._url + exchange.path, data=data, headers=headers)
        try:
            async with ask as answer:
                raw, status = await answer.read(), answer.status
        except (aiohttp.ClientError, TimeoutError) as e:
            detail = f"{type(e).__name__}: {e}"
        if status == 200:
            self._ids |= dict(zip(_call_ids(exchange.response), _answered_ids(raw), strict=False))
            self._turns.note(exchange.path, exchange.body, exchange.response, raw)
        elif raw:
            detail = raw.decode(errors="replace")[:300]
        return Replayed(
            index=index,
            method=exchange.method,
            path=exchange.path,
            status=status,
            seconds=time.monotonic() - begun,
            detail=detail,
        )


def _asked_again(capture: list[Exchange], at: int) -> list[int]:
    """The exchange at `at` and those that repeat it: at once, or a little later where the capture says it was cut."""
    found = [at]
    cut = isinstance(said := capture[at].response, dict) and "cut_after" in said
    for i in range(at + 1, min(at + _SOON, len(capture))):
        if (cut or i == found[-1] + 1) and _repeats(capture[found[-1]], capture[i]):
            found.append(i)
    return found


def _repeats(exchange: Exchange, following: Exchange) -> bool:
    """Whether `following` asks again for the stream that `exchange` asked for."""
    one, other = exchange.body, following.body
    if not (isinstance(one, dict) and isinstance(other, dict) and one.get("stream")):
        return False
    return exchange.path == following.path and one == {**other, "stream": True}


def _answered_ids(raw: bytes) -> list[str]:
    """Ids of the tool calls in an answer, whole or streamed, each once."""
    found: list[str] = []
    for line in raw.splitlines() if raw.startswith((b"data:", b"event:", b":")) else [raw]:
        try:
            found += _call_ids(msgspec.json.decode(line.removeprefix(b"data:")))
        except msgspec.DecodeError:
            continue  # [DONE], names of events, comments
    return list(dict.fromkeys(found))


def _call_ids(value: Any) -> Iterator[str]:
    """Ids of tool calls anywhere in an answer, in order."""
    if isinstance(value, dict):
        call = value.get("call_id", value.get("id"))
        if value.get("type") in _CALLS and isinstance(call, str) and call:
            yield call
        for inner in value.values():
            yield from _call_ids(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _call_ids(inner)
