"""Sends recorded requests over HTTP and reads their answers, streamed or not, to the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from sandlot.rollout.replay import Answered, TryError
from sandlot.rollout.replay_requests import Kind, Recorded

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
        headers = {**request.headers(self._api_key), **self._headers}
        raw = msgspec.json.encode(request.body)
        try:
            async with self._http.post(self._base + request.path, data=raw, headers=headers) as response:
                if response.status != 200:
                    raise _refused(response, await response.read())
                if "text/event-stream" not in response.content_type:
                    return _whole(request.kind, response.status, await response.read())
                return await _streamed(request.kind, response, begin)
        except TimeoutError as error:
            raise TryError("no answer in time", retryable=True) from error
        except aiohttp.ClientConnectorError as error:
            raise TryError(f"nobody answers at {self._base}", retryable=True) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise TryError(f"the connection broke ({type(error).__name__})", retryable=True) from error


def _refused(response: aiohttp.ClientResponse, raw: bytes) -> TryError:
    status, headers = response.status, response.headers
    retryable = status >= 500 or status in _RETRYABLE
    if (said := headers.get("x-should-retry")) is not None:
        retryable = said == "true"
    after = None
    with suppress(KeyError, ValueError):
        after = max(0.0, float(headers["retry-after"]))
    return TryError(f"{status}: {_message(raw)}", retryable=retryable, status=status, after_s=after)


def _message(raw: bytes) -> str:
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        body = None
    if isinstance(body, list) and body:
        body = body[0]
    error = body.get("error", body) if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return (str(text) if text else raw.decode(errors="replace"))[:300] or "no reason given"


def _whole(kind: Kind, status: int, raw: bytes) -> Answered:
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise TryError("the answer is no JSON", retryable=False, status=status) from error
    reading = Reading(kind)
    reading.whole(body if isinstance(body, dict) else {})
    if not reading.finish:
        raise TryError(f"the answer is none of the protocol {kind}", retryable=False, status=status)
    return Answered(status, reading.finish, reading.input_tokens, reading.output_tokens)


async def _streamed(kind: Kind, response: aiohttp.ClientResponse, begin: float) -> Answered:
    reading = Reading(kind)
    first: float | None = None
    async for data in _events(response):
        if data == b"[DONE]":
            continue
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise TryError("an event of the stream is no JSON", retryable=False, status=response.status) from error
        if not isinstance(event, dict):
            continue
        if reading.event(event) and first is None:
            first = time.monotonic() - begin
        if reading.error:
            raise TryError(f"in the stream: {reading.error}", retryable=True, status=response.status)
    if not reading.finish:
        raise TryError("the stream ended before the answer was complete", retryable=True, status=response.status)
    return Answered(response.status, reading.finish, reading.input_tokens, reading.output_tokens, first)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    data: list[bytes] = []
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if data:
        yield b"\n".join(data)


class Reading:
    """What is learnt of an answer: how it ended and its tokens. `finish` is empty until it is complete."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.finish = ""
        self.error = ""
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None

    def whole(self, body: dict[str, Any]) -> None:
        """Take a whole answer."""
        if self.kind == "anthropic":
            self._usage(body.get("usage"))
            self.finish = str(body.get("stop_reason") or "")
        elif self.kind == "responses":
            self._usage(body.get("usage"))
            self.finish = str(body.get("status") or "")
        else:
            self.event(body)

    def event(self, event: dict[str, Any]) -> bool:
        """Take one event of a stream; whether it carries content."""
        if event.get("error"):
            error = event["error"]
            self.error = str(error.get("message") if isinstance(error, dict) else error)
            return False
        return {
            "chat": self._chat,
            "responses": self._responses,
            "anthropic": self._anthropic,
            "google": self._google,
        }[self.kind](event)

    def _chat(self, event: dict[str, Any]) -> bool:
        self._usage(event.get("usage"))
        content = False
        for choice in event.get("choices") or ():
            self.finish = str(choice.get("finish_reason") or self.finish)
            delta = choice.get("delta") or choice.get("message") or {}
            content |= any(delta.get(key) for key in ("content", "tool_calls", "reasoning", "reasoning_content"))
        return content

    def _responses(self, event: dict[str, Any]) -> bool:
        kind = str(event.get("type", ""))
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            response = event.get("response") or {}
            self._usage(response.get("usage"))
            if kind == "response.failed":
                error = response.get("error") or {}
                self.error = str(error.get("message") or "the response failed")
            self.finish = kind.removeprefix("response.")
        return kind.endswith(".delta")

    def _anthropic(self, event: dict[str, Any]) -> bool:
        kind = event.get("type")
        if kind == "message_start":
            self._usage((event.get("message") or {}).get("usage"))
        elif kind == "message_delta":
            self._usage(event.get("usage"))
            self._stop = str((event.get("delta") or {}).get("stop_reason") or "")
        elif kind == "message_stop":
            self.finish = self._stop or "message_stop"
        return kind == "content_block_delta"

    _stop = ""

    def _google(self, event: dict[str, Any]) -> bool:
        usage = event.get("usageMetadata")
        if isinstance(usage, dict):
            self.input_tokens = usage.get("promptTokenCount", self.input_tokens)
            said = [usage[key] for key in ("candidatesTokenCount", "thoughtsTokenCount") if usage.get(key) is not None]
            self.output_tokens = sum(said) if said else self.output_tokens
        content = False
        for candidate in event.get("candidates") or ():
            self.finish = str(candidate.get("finishReason") or self.finish)
            content |= bool((candidate.get("content") or {}).get("parts"))
        return content

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        names = ("prompt_tokens", "completion_tokens") if self.kind == "chat" else ("input_tokens", "output_tokens")
        read = usage.get(names[0])
        if read is not None and self.kind == "anthropic":  # there, what came from a cache is counted apart
            read += (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
        self.input_tokens = self.input_tokens if read is None else read
        self.output_tokens = usage.get(names[1], self.output_tokens)
