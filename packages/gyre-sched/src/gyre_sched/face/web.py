"""The web page of a running scheduler: read-only, on loopback unless told otherwise, for whoever has the token.

    GET /?token=…     the page          GET /picture   the picture as JSON
    GET /events       newer pictures, as server-sent events        GET /metrics   for Prometheus

The token is made per run and lies in RUN/sched/web-token (0600). It is taken from the query or as a bearer token.
What is served is what `Follower` reads from the run directory, so looking at a run costs it nothing but the reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from gyre_sched.errors import SchedError
from gyre_sched.face.config import WebConfig
from gyre_sched.face.follow import Follower
from gyre_sched.face.page import render
from gyre_sched.face.picture import Picture

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_SEND = 10.0  # seconds a reader may take to accept one picture
_BEAT = 15.0  # seconds without news before a comment keeps the connection up
_KEPT = 0.2  # seconds a picture is served again before the run is looked at anew


class Web:
    """Serve one run's page. `start`, then `close`; `url` holds the token."""

    def __init__(self, run_dir: Path, config: WebConfig) -> None:
        """Raises `JournalError` when `run_dir` is no run directory, `SchedError` when the token cannot be kept."""
        self._config = config
        self._follower = Follower(run_dir)
        self._token = make_token(run_dir / "sched" / "web-token")
        self._looking = asyncio.Lock()
        self._picture: Picture | None = None
        self._body = b""  # of `_picture`, as JSON
        self._looked = 0.0
        self._readers = 0
        self._closing = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen. Raises `SchedError` when the address cannot be had."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/picture", self._json)
        app.router.add_get("/events", self._events)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port)
        try:
            await site.start()
        except OSError as e:
            await self._runner.cleanup()
            raise SchedError(
                f"the web page cannot listen on {self._config.host}:{self._config.port}: {e.strerror}; "
                "set sched.web.port to a free one, or sched.web.on = false"
            ) from e
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={self._token}"

    async def close(self) -> None:
        """End every stream and stop listening."""
        self._closing.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Web:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _is_local(request.host) and ipaddress.ip_address(self._config.host).is_loopback:
            # another site's name that resolves to this machine must not read the page through a visitor's browser
            raise web.HTTPForbidden(text="this page is served to loopback names only\n", headers=_HEADERS)
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else request.query.get("token", "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            text = "open the address that the run printed: its token is missing here, or is another run's\n"
            raise web.HTTPUnauthorized(text=text, headers=_HEADERS)
        try:
            return await handler(request)
        except SchedError as e:
            raise web.HTTPServiceUnavailable(text=f"{e}\n", headers=_HEADERS) from e

    async def _look(self) -> Picture:
        """The picture now. Readers share one: a thread folds what is new while the scheduler goes on."""
        async with self._looking:
            if self._picture is None or time.monotonic() - self._looked > _KEPT:
                picture = await asyncio.to_thread(self._follower.look)
                self._body = await asyncio.to_thread(msgspec.json.encode, picture)
                self._picture, self._looked = picture, time.monotonic()
            return self._picture

    async def _page(self, request: web.Request) -> web.Response:
        picture = await self._look()
        html = await asyncio.to_thread(render, picture, live=True)
        policy = "frame-ancestors 'none'"
        headers = {**_HEADERS, "Content-Security-Policy": policy}
        return web.Response(text=html, content_type="text/html", headers=headers)

    async def _json(self, request: web.Request) -> web.Response:
        await self._look()
        return web.Response(body=self._body, content_type="application/json", headers=_HEADERS)

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            from gyre_sched.face.prometheus import exposition
        except ImportError:
            raise web.HTTPNotImplemented(
                text="metrics need prometheus-client: install gyre-sched[face]\n", headers=_HEADERS
            ) from None
        text = await asyncio.to_thread(exposition, await self._look())
        return web.Response(body=text, headers={**_HEADERS, "Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._readers >= self._config.readers:
            raise web.HTTPServiceUnavailable(
                text=f"{self._readers} pages are open, which is all sched.web.readers allows\n",
                headers={**_HEADERS, "Retry-After": "10"},
            )
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        self._readers += 1
        try:
            await response.prepare(request)
            await self._stream(response)
        except (TimeoutError, ConnectionError):
            log.debug("a page was closed, or did not keep up")
        finally:
            self._readers -= 1
        return response

    async def _stream(self, response: web.StreamResponse) -> None:
        sent, sent_at = b"", time.monotonic()
        while not self._closing.is_set():
            await self._look()
            body = self._body
            if body != sent:
                await _send(response, b"data: " + body + b"\n\n")
                sent, sent_at = body, time.monotonic()
            elif time.monotonic() - sent_at > _BEAT:
                await _send(response, b": still here\n\n")
                sent_at = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.period):
                    await self._closing.wait()


async def _send(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(_SEND):
        await response.write(data)


def _is_local(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def make_token(path: Path) -> str:
    """The run's token: kept in `path` (0600), made when it is not there. Raises `SchedError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as f:
                f.write(secrets.token_urlsafe(24))
        token = path.read_text()
    except OSError as e:
        raise SchedError(f"the web page's token cannot be kept in {str(path)!r}: {e.strerror}") from e
    if len(token) < 24:
        raise SchedError(f"{str(path)!r} holds no token but {len(token)} characters; remove the file")
    return token
