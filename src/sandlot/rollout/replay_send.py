"""Sends recorded requests over HTTP and reads their answers, streamed or not, to the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict

from sandlot.rollout.replay import Answered, TryError
from sandlot.rollout.replay_read import Reading, message_of
from sandlot.rollout.replay_requests import Recorded

_RETRYABLE = frozenset({408, 409, 425, 429})


class Sender:
    """One server. Use as an async context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._base = base_url.rstrip("/").removesuffix("/v1").removesuffix("/v1beta")
        self._api_key = api_key
        self._headers = dict(headers or {})
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def send(self, request: Recorded) -> Answered:
        """Post it and wait for the whole answer. `TryError` when there is none."""
        begin = time.monotonic()
        headers = CIMultiDict(request.headers(self._api_key))
        headers.update(self._headers)
        raw = msgspec.json.encode(request.body)
        reading = Reading(request.kind)
        try:
            # A redirected POST would become a GET, and take the key to wherever it leads.
            post = self._http.post(self._base + request.path, data=raw, headers=headers, allow_redirects=False)
            async with post as response:
                if response.status not in range(200, 300):
                    raise _refused(response, await response.read())
                if "text/event-stream" not in response.content_type:
                    return _whole(reading, response.status, await response.read())
                return await _streamed(reading, response, begin)
        except TimeoutError as error:
            raise TryError("no answer in time", retryable=True) from error
        except aiohttp.ClientConnectorError as error:
            raise TryError(f"nobody answers at {self._base} ({error.strerror})", retryable=True) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise TryError(f"the connection broke ({type(error).__name__})", retryable=True) from error


def _refused(response: aiohttp.ClientResponse, raw: bytes) -> TryError:
    status, headers = response.status, response.headers
    if status in range(300, 400):
        where = headers.get("location", "elsewhere")
        return TryError(f"{status}: it has moved to {where}: give that address", retryable=False, status=status)
    retryable = status >= 500 or status in _RETRYABLE
    if (said := headers.get("x-should-retry")) is not None:
        retryable = said == "true"
    return TryError(f"{status}: {_message(raw)}", retryable=retryable, status=status, after_s=_asked_wait(headers))


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait, in any of the spellings in use."""
    for name, seconds in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            return max(0.0, float(headers[name]) * seconds)
    with suppress(KeyError, ValueError):
        return max(0.0, parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time())
    return None


def _message(raw: bytes) -> str:
    body: Any = None
    with suppress(msgspec.DecodeError, RecursionError):
        body = msgspec.json.decode(raw)
    if isinstance(body, list) and body:
        body = body[0]
    error = body.get("error", body) if isinstance(body, dict) else None
    return message_of(error or raw[:1000].decode(errors="replace"))


def _take(reading: Reading, data: bytes, status: int) -> bool:
    try:
        return reading.take(data)
    except (ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, msgspec.MsgspecError) else "nested too deep, or no text"
        raise TryError(f"that is no answer of the protocol: {said}", retryable=False, status=status) from error


def _whole(reading: Reading, status: int, raw: bytes) -> Answered:
    _take(reading, raw, status)
    if reading.error:
        raise TryError(f"in the answer: {reading.error}", retryable=False, status=status)
    if not reading.finish:
        raise TryError("the answer does not say how it ended", retryable=False, status=status)
    return Answered(status, reading.finish, reading.input_tokens, reading.output_tokens)


async def _streamed(reading: Reading, response: aiohttp.ClientResponse, begin: float) -> Answered:
    first: float | None = None
    async for data in _events(response.content.iter_any()):
        if data in (b"", b"[DONE]"):
            continue
        if _take(reading, data, response.status) and first is None:
            first = time.monotonic() - begin
        if reading.error:
            raise TryError(f"in the stream: {reading.error}", retryable=True, status=response.status)
    if not reading.finish:
        raise TryError("the stream ended before the answer was complete", retryable=True, status=response.status)
    return Answered(response.status, reading.finish, reading.input_tokens, reading.output_tokens, first)


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    data: list[bytes] = []
    async for line in _lines(chunks):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data = []
    if data:
        yield b"\n".join(data)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    begun: list[bytes] = []  # pieces of a line, joined once, however long it is
    async for chunk in chunks:
        head, end, rest = chunk.rpartition(b"\n")
        if end:
            for line in b"".join((*begun, head)).split(b"\n"):
                yield line.removesuffix(b"\r")
            begun = []
        begun.append(rest)
    yield b"".join(begun)
