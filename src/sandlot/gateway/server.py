"""The agent side over HTTP: every wire on one port, told apart by path, one secret per session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError
from aiohttp.typedefs import Middleware

from sandlot.gateway.call import Call, Told
from sandlot.gateway.keys import key_digest
from sandlot.gateway.models import model_entry, model_list
from sandlot.gateway.packing import unpacked
from sandlot.gateway.session import Session
from sandlot.gateway.wire import WIRES, ChatRequest, Wire, WireError, wire_for

if TYPE_CHECKING:
    from sandlot.gateway.gateway import Gateway

_JSON = "application/json"
_NO_KEY = "no API key came with this request; send the one that the session was opened with"
_UNKNOWN_KEY = "this API key opens no session here; send the one that the session was opened with"
_STRANGERS = frozenset({"authentication", "not_found"})
"""Errors after which a connection is closed: thousands that nobody may use could all ask at once."""
_LEAST = 512 << 10
"""Bytes that a request counts for at least while it waits: each takes its time, and a session may send thousands."""
_BODY_S = 60.0
"""How long a body may take to come once there is room for it."""


def agent_app(
    gateway: Gateway, bound: Session | None = None, middlewares: Sequence[Middleware] = ()
) -> web.Application:
    """The application agents talk to. With `bound`, it serves one session only: its socket belongs to a sandbox."""
    app = web.Application(client_max_size=gateway.limits.body_bytes, middlewares=middlewares)
    handler = _Handler(gateway, bound)
    for prefix in ("", "/s/{session}"):  # with the prefix, the path names the session that the key must open
        for wire in WIRES:
            for path in wire.paths:
                app.router.add_post(f"{prefix}{_pattern(path)}", handler.serving(wire))
            for path in wire.count_paths:
                app.router.add_post(f"{prefix}{_pattern(path)}", handler.counting(wire))
        for version in ("v1", "v1beta"):
            app.router.add_get(f"{prefix}/{version}/models", handler.models)
            app.router.add_get(f"{prefix}/{version}/models/{{model:[^:]+}}", handler.models)
        app.router.add_get(f"{prefix}/", handler.alive)
    app.router.add_route("*", "/{rest:.*}", handler.unknown)
    return app


def _pattern(path: str) -> str:
    """A wire's path for the router: names of models may hold slashes."""
    return path.replace("{model}", "{model:.+}")


class _Broken(WireError):
    """A body that breaks off or is framed wrongly; what follows on its connection cannot be read."""


class _Handler:
    def __init__(self, gateway: Gateway, bound: Session | None) -> None:
        self._gateway = gateway
        self._bound = bound

    def serving(self, wire: Wire) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                with contextlib.ExitStack() as waiting:
                    async with self._parsed(wire, session, request) as asked:
                        call = session.call(asked, wire.call_prefix)
                        if isinstance(call, Call):
                            waiting.enter_context(call)
                            await call.ready()
                    if asked.stream:
                        return await self._stream(wire, session, asked, call, request)
                    told = call if isinstance(call, Told) else await call.result()
            except (WireError, RecursionError) as error:
                return refused(wire, error)
            return await self._deliver(session, told, wire.body(told.answer, asked), {"Content-Type": _JSON}, request)

        return handle

    def counting(self, wire: Wire) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                async with self._parsed(wire, session, request) as asked:
                    count = await session.count_tokens(asked)
            except (WireError, RecursionError) as error:
                return refused(wire, error)
            return web.Response(body=wire.count_body(count), content_type=_JSON)

        return handle

    async def models(self, request: web.Request) -> web.StreamResponse:
        """The list, or what is told of one: every name that a request has is the policy's."""
        try:
            policy = self._session(request).policy
        except WireError as error:
            return refused(wire_of(request), error)
        asked = request.match_info.get("model")
        entry = model_entry(asked or policy.model, int(self._gateway.started), policy.max_context)
        return web.Response(body=msgspec.json.encode(entry if asked else model_list(entry)), content_type=_JSON)

    async def alive(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="sandlot gateway\n")

    async def unknown(self, request: web.Request) -> web.StreamResponse:
        wire = wire_of(request)
        if request.headers.get("Upgrade", "").lower() == "websocket":  # clients that try it first fall back at once
            error = WireError("invalid_request", "there are no WebSockets here; send the request with POST")
            body = wire.error(error)[1]
            return web.Response(status=426, body=body, content_type=_JSON, headers={"Upgrade": "HTTP/1.1"})
        return refused(wire, WireError("not_found", f"there is no {request.method} {request.path} here"))

    def _session(self, request: web.Request) -> Session:
        key = key_of(request)
        session = self._gateway.session_of_key(key)
        if session is None and key_digest(key) in self._gateway.lost:
            raise WireError("budget", "this session was lost with the process that had it; stop, do not retry")
        if session is None or (self._bound is not None and session is not self._bound):
            raise WireError("authentication", _UNKNOWN_KEY if key else _NO_KEY)
        if request.match_info.get("session", session.id) != session.id:
            raise WireError("authentication", "this API key opens another session than the one the path names")
        return session

    @contextlib.asynccontextmanager
    async def _parsed(self, wire: Wire, session: Session, request: web.Request) -> AsyncIterator[ChatRequest]:
        """What is asked. Its bytes count against the bounds of the session and of the gateway until the caller has made
        a prompt of it: what waits for its turn is held in memory as well."""
        cap = min(self._gateway.limits.body_bytes, session.limits.body_bytes or self._gateway.limits.body_bytes)
        packing = request.headers.get("Content-Encoding", "identity")
        length = request.content_length
        if length is not None and length > cap:
            raise _too_large(cap)
        size = length if length is not None and packing == "identity" else cap
        # A session waits for itself, so that one alone cannot take the room of all others.
        async with session.bodies.arriving.wait(max(size, _LEAST)):
            with self._gateway.reading.now(size, "bytes of requests"):
                yield await self._parse(wire, session, request, await self._read(session, request, packing, cap))

    async def _read(self, session: Session, request: web.Request, packing: str, cap: int) -> bytes:
        try:
            async with asyncio.timeout(_BODY_S):
                raw = await request.read()
            if packing != "identity":
                raw = await session.share.read(unpacked, raw, packing, cap + 1, size=len(raw))
        except web.HTTPRequestEntityTooLarge as error:
            raise _too_large(cap) from error
        except (PayloadEncodingError, web.RequestPayloadError) as error:
            request.content.feed_eof()  # the server would read on, fail, and break the answer off
            raise _Broken("invalid_request", f"the request body cannot be read: {error}") from error
        except TimeoutError as error:
            raise _Broken("invalid_request", f"the request body did not come within {_BODY_S:g} s") from error
        except ValueError as error:
            raise WireError("invalid_request", f"the request body cannot be unpacked: {error}") from error
        if len(raw) > cap:
            raise _too_large(cap)
        return raw

    async def _parse(self, wire: Wire, session: Session, request: web.Request, raw: bytes) -> ChatRequest:
        headers = {name.lower(): value for name, value in request.headers.items()}

        def read() -> ChatRequest:
            try:
                body = session.bodies.decode(raw, wire.name)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise WireError("invalid_request", f"the request body is no JSON: {error}") from error
            return replace(wire.parse(body, headers, request.path_qs, session.recall), size=len(raw))

        async with session.bodies.lock:
            if session.share.quick and session.bodies.quick(raw, wire.name):
                return await session.share.here(read)
            asked: ChatRequest = await session.share.read(lambda: _digested(read()), size=len(raw))
            return asked

    async def _stream(
        self, wire: Wire, session: Session, asked: ChatRequest, call: Call | Told, request: web.Request
    ) -> web.StreamResponse:
        kind = "text/event-stream" if asked.framing == "events" else _JSON
        headers = {"Content-Type": kind, "Cache-Control": "no-cache"}
        if isinstance(call, Told):
            events = wire.head(call.answer.head, asked) + wire.tail(call.answer, asked)
            return await self._deliver(session, call, events, headers, request)
        head = await call.ready()
        if await call.ended(self._gateway.limits.grace):
            told = await call.result()  # a fast failure still gets a true HTTP status
            events = wire.head(head, asked) + wire.tail(told.answer, asked)
            return await self._deliver(session, told, events, headers, request)
        response, beats = web.StreamResponse(headers=headers), 0
        await response.prepare(request)
        await response.write(wire.head(head, asked))
        while not await call.ended(self._gateway.limits.keepalive):
            await response.write(wire.keepalive(head, asked, beats))
            beats += 1
        try:
            told = await call.result()
        except WireError as error:
            if error.kind == "overloaded":  # the word by which clients know that asking again may help
                error = WireError("overloaded", f"overloaded: {error}")
            await response.write_eof(wire.error_event(error, head, asked, beats))
            return response
        with session.delivering(told.turn_id):
            await response.write_eof(wire.tail(told.answer, asked, beats))
        return response

    async def _deliver(
        self, session: Session, told: Told, body: bytes, headers: Mapping[str, str], request: web.Request
    ) -> web.StreamResponse:
        """Send a whole answer in one write."""
        response = web.Response(body=body, headers=headers)
        await response.prepare(request)
        with session.delivering(told.turn_id):
            await response.write_eof()
        return response


def _too_large(cap: int) -> WireError:
    return WireError("too_large", f"the request body is larger than {cap} bytes")


def _digested(asked: ChatRequest) -> ChatRequest:
    """The same, with digests and sizes made that a session asks for, letting others have their turn between."""
    for tool in asked.tools:
        _ = tool.digest, tool.size
    for message in asked.messages:
        _ = message.digest, message.size
    return asked


def key_of(request: web.Request) -> str:
    """The secret that a request carries, in whatever place its protocol has for it."""
    headers, bearer = request.headers, request.headers.get("Authorization", "")
    key = headers.get("x-api-key") or (bearer[7:] if bearer[:7].lower() == "bearer " else "")
    return key or headers.get("x-goog-api-key") or request.query.get("key", "")


def wire_of(request: web.Request) -> Wire:
    """The wire that a request points to, be it sent to where none is spoken."""
    if "x-goog-api-key" in request.headers or "/v1beta/" in request.path:
        return wire_for("/v1beta/models/m:generateContent")
    anthropic = "anthropic-version" in request.headers or "/messages" in request.path
    return wire_for("/v1/messages" if anthropic else "/v1/chat/completions")


def refused(wire: Wire, error: WireError | RecursionError) -> web.Response:
    """The answer that tells an error before anything else was answered."""
    if isinstance(error, RecursionError):
        error = WireError(
            "invalid_request", "the request is nested too deeply; send arguments and schemas that are flatter"
        )
    status, body = wire.error(error)
    headers = {"x-should-retry": "true" if error.kind == "overloaded" else "false"}
    response = web.Response(status=status, body=body, content_type=_JSON, headers=headers)
    if isinstance(error, _Broken) or error.kind in _STRANGERS:
        response.force_close()
    return response
