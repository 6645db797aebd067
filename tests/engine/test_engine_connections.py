"""What becomes of calls when servers hang, restart, close kept connections or stand behind a router."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sandlot.engine import EngineInfo, Generation, SamplingParams, VersionSpan, client
from sandlot.engine.client import EngineClient, EngineUnreachableError
from sandlot.engine.replicas import ReplicatedEngine, placed
from sandlot.engine.resumable import ResumableEngine
from sandlot.engine.sglang import SglangEngine
from sandlot.engine.vllm import VllmEngine
from sandlot.errors import EngineError

VLLM: dict[str, Any] = {
    "choices": [
        {"finish_reason": "length", "token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]}}
    ]
}
SGLANG: dict[str, Any] = {
    "meta_info": {"prompt_tokens": 3, "finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7, None]]}
}
BOTH = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])


class Server:
    """Answers both kinds of requests; `hold` makes it wait, `silent` keeps it from answering anything, `breaks` has it
    close the connection of a ping."""

    def __init__(self) -> None:
        self.hold: asyncio.Event | None = None
        self.silent: asyncio.Event | None = None
        self.asked = asyncio.Event()
        self.versions = "v"
        self.aborted: list[str] = []
        self.pings = asyncio.Queue[None]()
        self.breaks = self.elsewhere = False

    async def answer(self, request: web.Request) -> web.Response:
        if self.silent is not None:
            await self.silent.wait()
        if request.path == "/ping":
            self.pings.put_nowait(None)
            if self.breaks and request.transport is not None:
                request.transport.close()
            return web.Response(status=307 if self.elsewhere else 404, headers={"Location": "/ping/"})
        body = await request.json()
        if "abort" in request.path:
            self.aborted += body["request_ids"] if "request_ids" in body else [body["rid"]]
            return web.Response()
        self.asked.set()
        if self.hold is not None:
            await self.hold.wait()
        if request.path == "/generate":
            return web.json_response({"meta_info": SGLANG["meta_info"] | {"weight_version": self.versions}})
        spans = [{"version": self.versions, "start": 0, "end": 1}]
        return web.json_response({"choices": [VLLM["choices"][0] | {"weight_versions": spans}]})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with TestServer(app, handler_cancellation=True) as server:
            try:
                yield str(server.make_url("")).rstrip("/")
            finally:
                for event in (self.hold, self.silent):
                    if event is not None:
                        event.set()


Make = Callable[..., Any]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """A client that takes what it must know of its server for known."""
    made: list[EngineClient] = []

    def one(kind: type[EngineClient], url: str, **more: Any) -> EngineClient:
        engine = kind(url, **more)
        engine._info = EngineInfo("e", "m", 100, "unknown")
        made.append(engine)
        return engine

    yield one
    for engine in made:
        await engine.close()


async def ask(engine: Any, session: str = "s", request: str = "r") -> Generation:
    generation: Generation = await engine.generate([1, 2, 3], SamplingParams(), request_id=request, session_id=session)
    return generation


@BOTH
async def test_a_call_ends_when_its_server_hangs_and_goes_on_elsewhere(kind: type[EngineClient], make: Make) -> None:
    hung, well = Server(), Server()
    hung.silent = asyncio.Event()
    async with hung.running() as one, well.running() as two:
        with pytest.raises(EngineUnreachableError, match=r"hangs.*restart it") as e:
            await ask(make(kind, one, watch_s=0.05))
        assert e.value.retryable
        replicas = ReplicatedEngine({one: make(kind, one, watch_s=0.05), two: make(kind, two)})
        session = next(s for s in map(str, range(99)) if placed(s, [one, two])[0] == one)
        done = await ask(replicas, session)
        assert done.output_ids == (7,)
        assert done.lost_s >= 3 * 0.05
        assert replicas.up == [two]
        assert (await ask(replicas, session)).lost_s == 0
        await replicas.close()


@BOTH
@pytest.mark.parametrize("how", ["not found", "breaks", "elsewhere"])
async def test_a_slow_call_is_waited_for_while_its_server_answers_anything(
    kind: type[EngineClient], make: Make, how: str
) -> None:
    slow = Server()
    slow.breaks, slow.elsewhere = how == "breaks", how == "elsewhere"
    slow.hold = asyncio.Event()
    async with slow.running() as url:
        call = asyncio.ensure_future(ask(make(kind, url, watch_s=0.2)))
        async with asyncio.timeout(30):
            for _ in range(4):
                await slow.pings.get()
        assert not call.done()
        slow.hold.set()
        assert (await call).output_ids == (7,)


@BOTH
async def test_a_server_that_takes_no_connection_is_down(
    kind: type[EngineClient], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(3):  # what the kernel still takes for it
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        with pytest.raises(EngineUnreachableError, match=r"takes no connection.*start it"):
            await ask(make(kind, f"http://127.0.0.1:{full.getsockname()[1]}"))


@BOTH
async def test_a_kept_connection_that_closes_in_the_moment_of_a_call_costs_nothing(
    kind: type[EngineClient], make: Make
) -> None:
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        for _ in range(2):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
            connections[-1] += 1
            if connections[-1] == 1:
                body = json.dumps(VLLM if kind is VllmEngine else SGLANG).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        engine = make(kind, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(3):
            assert (await ask(engine)).output_ids == (7,)
    assert connections == [2, 2, 1]


@BOTH
async def test_connections_notice_that_the_other_machine_is_gone(kind: type[EngineClient], make: Make) -> None:
    async with Server().running() as url:
        engine = make(kind, url)
        await ask(engine)
        kept = next(iter(engine._session.connector._conns.values()))[0][0]
        sock = kept.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


class Router:
    """Sends what has the same affinity header to the same server, and keeps connections open that clients close."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.without = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.headers.get("X-Session-ID") or request.headers.get("X-SMG-Routing-Key")
        self.without += name is None
        to = placed(name, self.urls)[0] if name else sorted(self.urls)[0]
        async with aiohttp.ClientSession() as http, http.post(to + request.path, data=await request.read()) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type="application/json")


@BOTH
async def test_aborts_go_through_a_router_to_the_server_that_has_the_request(
    kind: type[EngineClient], make: Make
) -> None:
    async with AsyncExitStack() as stack:
        servers = {}
        for _ in range(3):
            server = Server()
            server.hold = asyncio.Event()
            servers[await stack.enter_async_context(server.running())] = server
        router = Router(list(servers))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", router.answer)
        url = str((await stack.enter_async_context(TestServer(app))).make_url("")).rstrip("/")
        engine = make(kind, url)
        for session in map(str, range(6)):
            server = servers[placed(session, router.urls)[0]]
            for how in ("abort", "cancel"):
                server.asked.clear()
                server.aborted.clear()
                call = asyncio.ensure_future(ask(engine, session, f"{how}-{session}"))
                await server.asked.wait()
                if how == "abort":
                    await engine.abort(f"abort-{session}")
                    assert server.hold is not None
                    server.hold.set()
                    await call
                    server.hold = asyncio.Event()
                else:
                    call.cancel()
                    await asyncio.wait({call})
                    await asyncio.wait(engine._aborting)
                assert [f"{how}-{session}" in wire_id for wire_id in server.aborted] == [True]
        assert router.without == 0
        assert not engine._headers_of


@BOTH
async def test_weights_without_a_name_are_called_as_who_pushed_them_said(kind: type[EngineClient], make: Make) -> None:
    """Both servers call their weights `default` until they are told otherwise; a pause and resume tells us."""
    server = Server()
    async with server.running() as url:
        client = make(kind, url)
        engine = ResumableEngine(client)
        for version in ("0", "41"):
            if version != "0":
                engine.resume(version)
            server.versions = "default"
            assert (await ask(engine)).versions == (VersionSpan(version, 0, 1),)
            server.versions = "pushed-7"
            assert (await ask(engine)).versions == (VersionSpan("pushed-7", 0, 1),)


@BOTH
async def test_an_answer_nested_without_end_is_no_engine(kind: type[EngineClient], make: Make) -> None:
    async def deep(request: web.Request) -> web.Response:
        return web.Response(body=b"[" * 100_000, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", deep)
    async with TestServer(app) as server:
        engine = make(kind, str(server.make_url("")))
        assert urlsplit(engine.base_url).port == server.port
        with pytest.raises(EngineError, match="does not answer in JSON: is it an engine"):
            await engine.info()
