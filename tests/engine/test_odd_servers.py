"""Servers and proxies that speak HTTP in odd ways: what they answer is taken or refused, and the cause is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sandlot.engine import EngineInfo, Generation, SamplingParams
from sandlot.engine.client import EngineClient, EngineUnreachableError
from sandlot.engine.replicas import ReplicatedEngine, placed
from sandlot.engine.sglang import SglangEngine
from sandlot.engine.vllm import VllmEngine
from sandlot.errors import EngineError, EngineEvidenceError

VLLM = {
    "choices": [
        {"finish_reason": "length", "token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]}}
    ]
}
SGLANG = {
    "meta_info": {"prompt_tokens": 3, "finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7, None]]}
}
BOTH = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
Write = Callable[[asyncio.StreamWriter], Awaitable[None]]


def honest(kind: type[EngineClient]) -> bytes:
    return json.dumps(VLLM if kind is VllmEngine else SGLANG).encode()


@asynccontextmanager
async def client_of(kind: type[EngineClient], url: str) -> AsyncIterator[Any]:
    """A client that takes what it must know of its server for known."""
    engine = kind(url)
    engine._info = EngineInfo("e", "m", 100, "unknown")
    try:
        yield engine
    finally:
        await engine.close()


async def ask(engine: Any, session: str = "s") -> Generation:
    done: Generation = await engine.generate([1, 2, 3], SamplingParams(), request_id="r", session_id=session)
    return done


@asynccontextmanager
async def raw(answer: Write) -> AsyncIterator[str]:
    """A server that reads a request and writes whatever `answer` does, then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length:" in head:
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        await answer(writer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def served(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@BOTH
@pytest.mark.parametrize("how", ["HTTP/1.0", "byte by byte", "chunks", "informed first"])
async def test_an_answer_is_taken_however_it_comes(kind: type[EngineClient], how: str) -> None:
    body = honest(kind)

    async def answer(writer: asyncio.StreamWriter) -> None:
        if how == "HTTP/1.0":
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        elif how == "chunks":
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        else:
            before = b"HTTP/1.1 103 Early Hints\r\n\r\n" if how == "informed first" else b""
            for byte in before + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body):
                writer.write(bytes([byte]))
                await writer.drain()

    async with raw(answer) as url, client_of(kind, url) as engine:
        for _ in range(2):
            assert (await ask(engine)).output_ids == (7,)


@BOTH
@pytest.mark.parametrize("how", ["length", "chunks", "none"])
async def test_an_answer_that_is_cut_off_is_none(kind: type[EngineClient], how: str) -> None:
    body = honest(kind)
    half = body[: len(body) // 2]

    async def answer(writer: asyncio.StreamWriter) -> None:
        if how == "length":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), half))
        elif how == "chunks":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(half), half))
        else:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + half)

    async with raw(answer) as url, client_of(kind, url) as engine:
        with pytest.raises(EngineError) as e:
            await ask(engine)
    assert e.value.retryable
    assert isinstance(e.value, EngineEvidenceError if how == "none" else EngineUnreachableError)


@BOTH
@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_an_address_that_sends_elsewhere_is_named_with_the_right_one(
    kind: type[EngineClient], status: int
) -> None:
    """Followed, a POST would become a GET, or lose its key."""

    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": f"https://engine.test{request.path}"})

    async with served(elsewhere) as url, client_of(kind, url) as engine:
        for call in (ask(engine), engine.info()):
            with pytest.raises(EngineError, match=r"sends to https://engine\.test/.*give the address") as e:
                await call
            assert not e.value.retryable


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "out of memory", "code": 500}},
        {"detail": "out of memory"},
        {"object": "error", "message": "out of memory"},
    ],
)
async def test_an_error_that_comes_as_an_answer_is_told(kind: type[EngineClient], body: dict[str, Any]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body)

    async with served(answer) as url, client_of(kind, url) as engine:
        with pytest.raises(EngineEvidenceError, match="but 'out of memory'"):
            await ask(engine)


@BOTH
async def test_an_answer_nested_without_end_is_refused(kind: type[EngineClient]) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    body = honest(kind).replace(b'"finish_reason"', b'"routed_experts": %b, "finish_reason"' % deep, 1)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with served(answer) as url, client_of(kind, url) as engine:
        with pytest.raises(EngineEvidenceError, match="it is not the JSON"):
            await ask(engine)


@BOTH
async def test_a_token_that_is_larger_than_any_is_refused(kind: type[EngineClient]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=honest(kind).replace(b"7", str(1 << 31).encode()))

    async with served(answer) as url, client_of(kind, url) as engine:
        with pytest.raises(EngineEvidenceError, match="larger than any"):
            await ask(engine)


async def test_an_answer_to_another_request_is_refused() -> None:
    """A proxy may mix answers up; SGLang says to which request one belongs."""
    mixed = ""

    async def answer(request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        return web.json_response({"meta_info": SGLANG["meta_info"] | {"id": mixed or rid}})

    async with served(answer) as url, client_of(SglangEngine, url) as engine:
        assert (await ask(engine)).output_ids == (7,)
        mixed = "another;"
        with pytest.raises(EngineEvidenceError, match="it answers 'another;' and not 'r:"):
            await ask(engine)


async def test_a_vllm_behind_a_proxy_that_names_requests_still_knows_ours() -> None:
    """vLLM takes the name in this header for that of the request, so aborts by another name would do nothing."""
    names: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        names.append(request.headers.get("X-Request-Id"))
        return web.Response(body=honest(VllmEngine))

    async with served(answer) as url, client_of(VllmEngine, url) as engine:
        await ask(engine)
    assert names == ["r"]


@BOTH
async def test_a_server_that_is_full_is_not_down(kind: type[EngineClient]) -> None:
    """Left out, it would lose the caches of its sessions, and the others would be full next."""
    told = {"status": 503, "body": b'{"detail": "The request queue is full."}', "headers": {"Retry-After": "7"}}

    async def first(request: web.Request) -> web.Response:
        return web.Response(**told)  # type: ignore[arg-type]

    async def second(request: web.Request) -> web.Response:
        return web.Response(body=honest(kind))

    async with (
        served(first) as one,
        served(second) as two,
        client_of(kind, one) as full,
        client_of(kind, two) as free,
    ):
        engine = ReplicatedEngine({one: full, two: free})
        session = next(s for s in map(str, range(99)) if placed(s, [one, two])[0] == one)
        for status in (503, 429):
            told["status"] = status
            with pytest.raises(EngineError, match="queue is full") as e:
                await ask(engine, session)
            assert (e.value.retryable, e.value.retry_after, engine.out) == (True, 7.0, {})
        told |= {"status": 503, "body": b"no upstream"}
        assert (await ask(engine, session)).output_ids == (7,)
        assert engine.up == [two]
        await engine.close()
