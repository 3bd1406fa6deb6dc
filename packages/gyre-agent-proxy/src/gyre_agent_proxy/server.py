"""The HTTP server.

POST /v1/chat/completions          OpenAI Chat Completions
POST /v1/messages                  Anthropic Messages, and POST /v1/messages/count_tokens
POST /v1/responses, /responses     OpenAI Responses
GET /v1/models, /v1/models/{id}    in the shape of the client that asks
GET /   GET /health   GET /gyre/stats   POST /gyre/executions/{id}/close
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from gyre_agent_proxy.attempt import Attempt
from gyre_agent_proxy.conversation import Reply
from gyre_agent_proxy.dialects import chat, messages, responses
from gyre_agent_proxy.dialects.base import Defaults, Dialect, Encoder, Opening
from gyre_agent_proxy.errors import BadRequest, EngineError, ProxyError, Unauthorized
from gyre_agent_proxy.keys import execution_of
from gyre_agent_proxy.render import Renderer
from gyre_agent_proxy.service import Service
from gyre_agent_proxy.text import GrowingText
from gyre_agent_proxy.unfolding import Said, Unfolding

log = logging.getLogger(__name__)

_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/responses": responses,
}
_COUNT = "/v1/messages/count_tokens"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The HTTP face of a `Service`."""

    def __init__(
        self,
        service: Service,
        renderer: Renderer,
        secret: bytes | None,
        *,
        model: str,
        defaults: Defaults,
        keepalive: float,
        max_body: int,
    ) -> None:
        self._service = service
        self._renderer = renderer
        self._secret = secret
        self._model = model
        self._defaults = defaults
        self._keepalive = keepalive
        self._created = int(time.time())
        self.app = web.Application(client_max_size=max_body, middlewares=[_errors(service)])
        for path, dialect in _DIALECTS.items():
            self.app.router.add_post(path, partial(self._call, dialect))
        self.app.router.add_post(_COUNT, self._count)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/v1/models/{id:.+}", self._one_model)
        for path in ("/", "/health"):
            self.app.router.add_get(path, self._health)
        self.app.router.add_get("/gyre/stats", self._stats)
        self.app.router.add_post("/gyre/executions/{id}/close", self._close)

    def _execution(self, request: web.Request) -> str:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            key = request.headers.get("x-api-key", "")
        if not key.strip():
            raise Unauthorized("no API key: send `Authorization: Bearer <the execution's key>`")
        return execution_of(self._secret, key.strip())

    async def _call(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        execution = self._execution(request)
        asked = dialect.read_request(await request.read(), self._defaults)
        attempt = self._service.submit(execution, asked, request.headers)
        with attempt.waiting():
            if not asked.stream:
                reply = await asyncio.shield(attempt.reply)
                answer = dialect.answer(reply, asked, asked.model or self._model)
                response = web.Response(
                    body=msgspec.json.encode(answer), content_type="application/json", headers=_names(attempt)
                )
                with self._delivery(execution, attempt):
                    await response.prepare(request)
                    await response.write_eof()
                return response
            opening = Opening(
                call=attempt.call,
                created=attempt.created,
                model=asked.model or self._model,
                prompt_tokens=attempt.prompt_tokens,
            )
            return await self._stream(request, execution, attempt, dialect.stream(opening, asked))

    async def _stream(
        self, request: web.Request, execution: str, attempt: Attempt, encoder: Encoder
    ) -> web.StreamResponse:
        # An error that comes before anything had to be sent gets its own status.
        await attempt.changed(0, self._keepalive)
        if attempt.reply.done() and (early := attempt.reply.exception()) is not None:
            raise early
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                **_names(attempt),
            }
        )
        loop, seen, telling = asyncio.get_running_loop(), 0, _Telling(attempt, self._renderer)
        with self._delivery(execution, attempt):
            await response.prepare(request)
            if head := encoder.begin():
                await response.write(head)
            due = loop.time() + self._keepalive
            while not attempt.reply.done():
                grew = await attempt.changed(seen, max(0.0, due - loop.time()))
                if attempt.reply.done():
                    break
                seen, said = len(attempt.ids), telling.more()
                out = encoder.reasoning(said.reasoning) if said.reasoning else b""
                out += encoder.delta(said.text) if said.text else b""
                if not out and (not grew or loop.time() >= due):  # much may be sampled that cannot be sent yet
                    out = encoder.keepalive
                if out:
                    await response.write(out)
                    due = loop.time() + self._keepalive
            error = attempt.reply.exception()
            if isinstance(error, ProxyError):
                self._service.metrics.add("calls_failed")
                await response.write(encoder.failure(error))
            else:
                reply: Reply = attempt.reply.result()
                await response.write(encoder.finish(reply, telling.rest(reply)))
            await response.write_eof()
        return response

    @contextlib.contextmanager
    def _delivery(self, execution: str, attempt: Attempt) -> Iterator[None]:
        """Record whether the answer was written whole; an attempt without an answer is recorded by the service."""
        ok = False
        try:
            yield
            ok = True
        finally:
            if attempt.reply.done() and not attempt.reply.cancelled() and attempt.reply.exception() is None:
                self._service.delivered(execution, attempt, ok=ok)

    async def _models(self, request: web.Request) -> web.Response:
        self._execution(request)
        if _anthropic(request):
            return web.json_response(messages.models(self._model, self._created, self._service.context))
        return web.json_response(chat.models(self._model, self._created))

    async def _one_model(self, request: web.Request) -> web.Response:
        """The one model, under whatever name it is asked for: calls are answered under any name too."""
        self._execution(request)
        name = request.match_info["id"]
        if _anthropic(request):
            return web.json_response(messages.model(name, self._created, self._service.context))
        return web.json_response(chat.model(name, self._created))

    async def _count(self, request: web.Request) -> web.Response:
        execution = self._execution(request)
        asked = messages.read_request(await request.read(), self._defaults)
        return web.json_response(messages.count(self._service.count(execution, asked)))

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _stats(self, request: web.Request) -> web.Response:
        if self._secret is not None:
            self._execution(request)
        return web.json_response(self._service.stats)

    async def _close(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if self._execution(request) != name:
            raise Unauthorized(f"this key is another execution's, not {name!r}'s")
        failing = self._service.failing(name)  # before: what is still open fails by being closed
        calls = await self._service.close(name)
        return web.json_response({"execution": name, "calls": calls, "failing": failing})


class _Telling:
    """What one connection is told of an answer while it is sampled: each part once, whenever it began to listen."""

    def __init__(self, attempt: Attempt, renderer: Renderer) -> None:
        asked = attempt.request
        self._attempt = attempt
        self._unfolds = renderer.plain and not asked.sampling.constraint
        self._text = GrowingText(renderer.vocabulary, renderer.stop_ids)
        self._turn = Unfolding(tools=bool(asked.callable_tools), stops=asked.sampling.stop, thinking=attempt.thinking)
        self._told: list[Said] = []

    def more(self) -> Said:
        """What is sure by now and was not told yet.

        A turn that only its renderer can read, or that may have to begin again, is told at the end.
        """
        said = self._turn.feed(self._text.feed(self._attempt.tell())) if self._unfolds else Said()
        if any(said):
            self._told.append(said)
        return said

    def rest(self, reply: Reply) -> Said:
        """What was not told of the whole answer."""
        reasoning, text = ("".join(parts) for parts in zip(Said(), *self._told, strict=True))
        if not ((reply.reasoning or "").startswith(reasoning) and reply.text.startswith(text)):
            log.error("call %s: what was streamed is not the beginning of the answer", self._attempt.call)
        return Said((reply.reasoning or "")[len(reasoning) :], reply.text[len(text) :])


def _anthropic(request: web.Request) -> bool:
    """Whether an Anthropic client asks."""
    return "anthropic-version" in request.headers


def _names(attempt: Attempt) -> dict[str, str]:
    """Headers that name the call, as the clients of either kind look for them."""
    return {"request-id": f"req_{attempt.call}", "x-request-id": f"req_{attempt.call}"}


def _errors(service: Service) -> Middleware:
    """Every error in the dialect's shape, and counted."""

    @web.middleware
    async def middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge as e:
            error: ProxyError = BadRequest(f"the body is too large: {e.text}; raise proxy.max_body")
            error.status = 413
        except web.HTTPException as e:
            error = BadRequest(
                f"{request.method} {request.path}: {e.reason}; see the package's README for what is served"
            )
            error.status = e.status
        except ProxyError as e:
            error = e
        except web.RequestPayloadError as e:
            error = BadRequest(f"the body cannot be read: {e}; check its content-encoding")
        except RecursionError:
            error = BadRequest("the body is nested too deeply; send less than a few hundred levels")
        except ConnectionError:  # the client's: engines are not talked to here
            log.info("%s %s: the client hung up", request.method, request.path)
            return web.Response()
        except asyncio.CancelledError:
            raise
        except Exception as e:
            log.exception("%s %s failed", request.method, request.path)
            error = EngineError(f"the proxy failed: {type(e).__name__}: {e}")
            error.status = 500
        refused = error.status < 500 and error.status != 429
        if request.path.startswith("/v1/") or request.path in _DIALECTS:
            service.metrics.add("calls_refused" if refused else "calls_failed")
        log.warning("%s %s: %d %s", request.method, request.path, error.status, error)
        dialect = _DIALECTS.get(request.path) or (messages if _anthropic(request) or request.path == _COUNT else chat)
        body, headers = dialect.error_body(error), {}
        if retry := getattr(error, "retry_after", None):
            headers["Retry-After"] = str(retry)
        if "request_id" in body:
            headers["request-id"] = body["request_id"]
        return web.json_response(body, status=dialect.status(error), headers=headers)

    return middleware
