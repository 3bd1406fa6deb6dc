"""The proxy process: puts the parts together, serves until SIGTERM, stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from gyre_agent_proxy.client import EngineClient
from gyre_agent_proxy.config import ModelConfig, ProxyConfig, socket_path
from gyre_agent_proxy.dialects.base import Defaults
from gyre_agent_proxy.engines import Pool
from gyre_agent_proxy.errors import LinkFailed, ListenError
from gyre_agent_proxy.generate import Engines
from gyre_agent_proxy.keys import load_secret
from gyre_agent_proxy.link import Link, static_routes
from gyre_agent_proxy.metrics import Metrics
from gyre_agent_proxy.pages import PageMoves
from gyre_agent_proxy.probe import probe
from gyre_agent_proxy.recorder import Recorder
from gyre_agent_proxy.render import context_of, load_renderer
from gyre_agent_proxy.roles import Roles
from gyre_agent_proxy.server import Server
from gyre_agent_proxy.service import Service
from gyre_transport.config import section
from gyre_transport.keys import load_token
from gyre_transport.process import ready
from gyre_transport.run import BusConfig, Context
from gyre_transport.sockets import loopback_host

log = logging.getLogger(__name__)


class Proxy:
    """A running proxy."""

    def __init__(self, url: str, pool: Pool, service: Service, link: asyncio.Task[None] | None) -> None:
        self.url = url  # without /v1
        self.pool = pool
        self.service = service
        self.link = link  # follows the scheduler and does not end by itself; None without one


@contextlib.asynccontextmanager
async def proxy(
    config: ProxyConfig,
    model: ModelConfig,
    *,
    calls: Path,
    secret: bytes | None = None,
    metrics: Path | None = None,
    bus: BusConfig | None = None,
) -> AsyncIterator[Proxy]:
    """Serve while the context is open.

    calls: folder of the call logs. secret: signs API keys (None: open mode). metrics: file for the counters.
    bus: where the scheduler is; None uses `config.engines`.
    Raises `ModelError`, `RoleTableError`, `UnfitEngine`, `ListenError`.
    """
    if secret is None and not loopback_host(config.host):
        raise ListenError(
            f"others can reach {config.host!r}, and without a secret the proxy takes any key: name a file that signs "
            "keys (--secret), or listen on a loopback address"
        )
    token = load_token(Path(config.engine_key), "proxy.engine_key") if config.engine_key else ""
    renderer = load_renderer(model.path, config.template, model.name)
    if not config.context:
        config = msgspec.structs.replace(config, context=context_of(Path(model.path)))
    roles = Roles.load(config.roles)
    pool = Pool(backoff=config.backoff, backoff_limit=config.backoff_limit)
    pool.update(0, static_routes(config.engines))
    counters = Metrics(metrics)
    # Engines close idle connections after 5 seconds; a request that met such a close would look like a lost engine.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        )
        client = EngineClient(
            session, renderer.stop_ids, connect=config.connect_timeout, silence=config.silence, token=token
        )
        pages = PageMoves(counters, config.kv_wait)
        stack.push_async_callback(pages.close)
        engines = Engines(pool, client, config, counters, renderer.vocabulary, pages=pages)
        if bus is None and config.probe_wait:
            prompt = renderer.vocabulary.encode("The engine is asked for a few tokens.")
            await asyncio.gather(
                *(probe(client, r.url, prompt, config.probe_wait) for r in static_routes(config.engines))
            )
        recorder = Recorder(calls, model=model.name, tokenizer_hash=renderer.vocabulary.hash, metrics=counters)
        service = Service(renderer, engines, recorder, roles)
        server = Server(
            service,
            renderer,
            secret,
            model=model.name,
            defaults=Defaults(
                max_tokens=config.default_max_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                media=config.media,
            ),
            keepalive=config.keepalive,
            max_body=config.max_body,
        )
        runner = web.AppRunner(
            server.app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0, keepalive_timeout=3600.0
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        url = await _listen(runner, config)
        if config.socket:
            await _listen_at(runner, Path(config.socket))
        counters.start()
        stack.push_async_callback(counters.stop)
        stack.push_async_callback(service.stop)
        following: asyncio.Task[None] | None = None
        if bus is not None:
            link = Link(bus, pool, url)
            engines.lost = link.lost
            following = asyncio.create_task(link.run(), name="link")
            stack.push_async_callback(_cancel, following)
        yield Proxy(url, pool, service, following)


async def serve(context: Context) -> None:
    """The run's proxy: section [proxy] and [model] of the resolved config; returns after SIGTERM or SIGINT.

    Raises `LinkFailed` and what `proxy` raises.
    """
    config = section(context.data, "proxy", ProxyConfig)
    model = section(context.data, "model", ModelConfig)
    bus = None if config.engines else context.bus
    config = msgspec.structs.replace(config, socket=str(socket_path(config, context.bus) or ""))
    engine = context.data.get("engine", {})
    config = msgspec.structs.replace(config, engine_key=config.engine_key or str(engine.get("key") or ""))
    if not config.context:
        config = msgspec.structs.replace(config, context=int(engine.get("context_length") or 0))
    async with proxy(
        config,
        model,
        calls=context.dir.calls,
        secret=load_secret(context.dir.secret),
        metrics=context.dir.metrics / "proxy.json",
        bus=bus,
    ) as running:
        await until_stopped(running)


async def until_stopped(running: Proxy) -> None:
    """Say that the proxy serves, and wait for SIGTERM or SIGINT. Raises `LinkFailed` when its routes are frozen."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # What was loaded stays: the collector need not look at it again, nor at every few calls.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    ready(url=running.url)
    log.info("serving at %s", running.url)
    if running.link is not None:
        running.link.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if running.link is not None and running.link.done():
        e = running.link.exception()
        log.critical("the link to the scheduler failed", exc_info=e)
        raise LinkFailed(
            f"the link to the scheduler failed, so routes could not change any more and the proxy stops: "
            f"{type(e).__name__}: {e}; see its log, then start it again"
        ) from e
    log.info("stopping")


async def _listen(runner: web.AppRunner, config: ProxyConfig) -> str:
    site = web.TCPSite(runner, config.host, config.port, backlog=1024)
    try:
        await site.start()
    except OSError as e:
        why = "the port is in use" if e.errno == errno.EADDRINUSE else (e.strerror or str(e))
        raise ListenError(
            f"cannot listen on {config.host}:{config.port}: {why}; set proxy.port to a free port, or to 0"
        ) from e
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


async def _listen_at(runner: web.AppRunner, path: Path) -> None:
    """Listen on a unix socket that any user may connect to: what they may ask for, their API key says."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        await web.UnixSite(runner, path, backlog=1024).start()
        path.chmod(0o666)
    except OSError as e:
        raise ListenError(
            f"cannot listen on the unix socket {str(path)!r}: {e.strerror or e}; set proxy.socket to another path"
        ) from e


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
