"""Passes a request on to another process over its unix socket, and the answer back as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

_HOST = "http://worker"
_HOP = frozenset({"connection", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"})


def client_of(socket_path: Path, **headers: str) -> aiohttp.ClientSession:
    """A client of the HTTP server at a unix socket; its bytes are passed on as they are, however long they take."""
    return aiohttp.ClientSession(
        _HOST,
        connector=aiohttp.UnixConnector(str(socket_path), limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
    )


async def relay(request: web.Request, peer: aiohttp.ClientSession) -> web.StreamResponse:
    """Have `peer` answer. Raises `aiohttp.ClientConnectionError` when it is gone before its answer began."""
    body: AsyncIterator[bytes] | None = request.content.iter_any() if request.can_read_body else None
    async with peer.request(
        request.method,
        URL(f"{_HOST}{request.rel_url.raw_path_qs}", encoded=True),
        headers=_end_to_end(request.headers),
        data=body,
        allow_redirects=False,
    ) as answer:
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers))
        await response.prepare(request)
        try:
            async for piece in answer.content.iter_any():
                await response.write(piece)
        except aiohttp.ClientError as error:
            raise ConnectionError("the process that answered ended before its answer did") from error
        await response.write_eof()
    return response


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[Any]:
    """Headers that are meant for who answers or asks in the end."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP)
