"""What the clients of inference servers share: connections, errors with cause and cure, aborts that outlive a call."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from sandlot.engine.base import EngineInfo, VersionSpan
from sandlot.engine.watch import Watch
from sandlot.errors import ConfigError, ContextOverflowError, EngineError, EngineEvidenceError
from sandlot.ids import PromptIds

# Below uvicorn's 5 s, so that a pooled connection is never used while the server closes it.
_KEEP_ALIVE_S = 4.0
_CONNECT_S = 10.0
_UNNAMED = "default"
"""The weight version of vLLM and SGLang until somebody tells them one."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
SHORT = aiohttp.ClientTimeout(total=15)
"""For what is no sampling."""


_REDIRECTS = (301, 302, 303, 307, 308)
_FULL = re.compile(r"queue is full|overloaded|at capacity", re.IGNORECASE)
"""What an engine says that answers 503 because it has too much to do, and not because it is none."""


class Answer(NamedTuple):
    """What a server answered; `retry_after` in seconds, 0 where it says nothing of it."""

    status: int
    body: bytes
    retry_after: float


class EngineUnreachableError(EngineError):
    """Nobody answers at the address any more, or only a proxy that says so: another replica may."""


class EngineGoneError(EngineUnreachableError):
    """Nothing listens at the address any more: what will answer there next was started anew."""


class EngineClient:
    """One server (or one address of many). Use it in one event loop; `close` it at the end."""

    endpoint: ClassVar[str]
    """Path of the token endpoint."""
    too_long: ClassVar[re.Pattern[str]]
    """What the server says of a prompt that does not fit."""

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 3600.0,
        watch_s: float = 20.0,
        routed_experts: bool = False,
    ) -> None:
        """`model` picks a served model or LoRA adapter; without it the server's only one answers.

        While calls wait, the server is asked every `watch_s` seconds whether it still answers anything.
        `routed_experts` keeps the experts of each token, where the server tells them: they are large.
        """
        self.base_url = plain_address(base_url)
        self.model = model
        self.routed_experts = routed_experts
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else _basic(URL(base_url))
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        self._session: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._aborting: set[asyncio.Task[None]] = set()
        self._headers_of: dict[str, dict[str, str]] = {}
        self._ping_timeout = aiohttp.ClientTimeout(total=watch_s)
        self._watch = Watch(self._ping, watch_s)

    async def abort_at(self, wire_id: str, headers: dict[str, str]) -> None:
        """Tell the server to end the request that it knows by this id, and that came with these headers."""
        raise NotImplementedError

    async def send_abort(self, wire_id: str) -> None:
        """The same for a request that is in work. A router sends it where it sent the request, by the headers."""
        await self.abort_at(wire_id, self._headers_of.get(wire_id, {}))

    async def close(self) -> None:
        self._watch.close()
        if self._aborting:
            await asyncio.wait(self._aborting)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def abort_soon(self, wire_id: str) -> None:
        """Abort without waiting: for calls that nobody waits for any more."""
        headers = self._headers_of.get(wire_id, {})

        async def send() -> None:
            with contextlib.suppress(EngineError):
                await self.abort_at(wire_id, headers)

        task = asyncio.get_running_loop().create_task(send())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def ask(self, body: bytes, headers: dict[str, str], *, wire_id: str | None, prompt_tokens: int) -> bytes:
        """The token endpoint's answer. Cancelling aborts `wire_id` at the server."""
        if wire_id is not None:
            self._headers_of[wire_id] = headers
        try:
            async with self._watch.over():
                answer = await self.request("POST", self.endpoint, body, headers)
        except TimeoutError as e:
            raise EngineUnreachableError(
                f"the engine at {self.base_url} hangs: it has answered nothing for {self._watch.patience:g} s; "
                "restart it"
            ) from e
        except (asyncio.CancelledError, EngineError) as e:
            # Closing the connection frees the slot; a proxy in between may hide that, so say it as well.
            if wire_id is not None and not isinstance(e, EngineUnreachableError):
                self.abort_soon(wire_id)
            raise
        finally:
            if wire_id is not None:
                self._headers_of.pop(wire_id, None)
        if answer.status != 200:
            raise self.failure(answer, prompt_tokens, self.endpoint)
        return answer.body

    async def _ping(self) -> None:
        # Not /health, for which SGLang samples. Any answer counts, also that there is no such path. Where connections
        # are refused or broken, those of the calls that wait break by themselves.
        try:
            await self._send("GET", "/ping", None, {}, self._ping_timeout)
        except TimeoutError as e:
            raise EngineError(f"{self.base_url} did not answer in time") from e
        except (aiohttp.ClientError, EngineError):  # the latter where it sends elsewhere
            return

    async def json(self, method: str, path: str) -> Any:
        answer = await self.request(method, path, None, {}, SHORT)
        if answer.status != 200:
            raise self.failure(answer, 0, path)
        try:
            return msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, RecursionError) as e:
            raise EngineError(
                f"{self.base_url}{path} does not answer in JSON: is it an engine?", retryable=False
            ) from e

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> Answer:
        """The answer, whatever it is, but that it is elsewhere. `EngineError` when there is none."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_socket)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        timeout = timeout or self._timeout
        try:
            try:
                return await self._send(method, path, body, headers, timeout)
            except aiohttp.ClientConnectionError as e:
                if isinstance(e, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError):
                    raise
                # The server may have closed a kept connection in this moment; a new one tells whether it is there.
                return await self._send(method, path, body, headers, timeout)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            kind, why = EngineUnreachableError, "it takes no connection"
            if isinstance(e, aiohttp.ClientConnectorError):
                kind, why = EngineGoneError, e.os_error.strerror or str(e)
            raise kind(
                f"no engine answers at {self.base_url} ({why}): start it, or give its address with --engine URL"
            ) from e
        except TimeoutError as e:
            raise EngineError(f"the engine at {self.base_url} did not answer {path} in time") from e
        except aiohttp.ClientError as e:
            raise EngineUnreachableError(
                f"the connection to the engine at {self.base_url} broke ({type(e).__name__}: {e}): see its log"
            ) from e

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> Answer:
        assert self._session is not None
        url = self.base_url + path
        async with self._session.request(
            method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status in _REDIRECTS:  # a POST would arrive there as a GET, or without its key
                where = response.headers.get("Location", "another address")
                raise EngineError(f"{url} sends to {where}: give the address that answers itself", retryable=False)
            after = response.headers.get("Retry-After", "")
            return Answer(response.status, await response.read(), float(after) if after.isdecimal() else 0.0)

    def failure(self, answer: Answer, prompt_tokens: int, path: str) -> Exception:
        """The error that an answer other than 200 means."""
        status, message = answer.status, message_of(answer.body)
        where = f"{self.base_url}{path}"
        if status == 400 and self._info is not None and self.too_long.search(message):
            return ContextOverflowError(prompt_tokens, self._info.max_context)
        if status == 401:
            return EngineError(f"{where} wants another API key: {message}", retryable=False)
        said = f"the engine at {where} answered {status}: {message}"
        if status in (502, 504) or (status == 503 and not _FULL.search(message)):
            return EngineUnreachableError(said, retry_after=answer.retry_after)
        retryable = status >= 500 or status in (408, 425, 429)
        return EngineError(said, retryable=retryable, retry_after=answer.retry_after)


def _is_url(text: str) -> bool:
    try:
        url = URL(text)
    except ValueError:  # a port that is none
        return False
    return url.scheme in ("http", "https") and bool(url.host) and not re.search(r"\s", text)


def plain_address(base_url: str) -> str:
    """An engine's address as anybody may be told it: agents read what errors say. `ConfigError` if it is none."""
    if not _is_url(base_url):
        raise ConfigError(f"the engine address {base_url!r} is not a URL: write http://HOST:PORT")
    url = URL(base_url)
    text = str(url.with_user(None)) if url.raw_user is not None else base_url
    return text.rstrip("/").removesuffix("/v1")


def _basic(url: URL) -> dict[str, str]:
    if url.user is None:
        return {}
    return {"Authorization": "Basic " + b64encode(f"{url.user}:{url.password or ''}".encode()).decode()}


def object_of(value: Any) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    return value if isinstance(value, dict) else {}


def none_of(endpoint: str, raw: bytes, why: Exception) -> EngineEvidenceError:
    """The error for an answer that is not one of the token endpoint: it may tell what went wrong instead."""
    return EngineEvidenceError(
        f"the engine's reply is refused: it is not the JSON of {endpoint} ({why}), but {message_of(raw)!r}; nothing "
        "was recorded"
    )


def message_of(raw: bytes) -> str:
    """The sentence in an error body, whatever its shape."""
    try:
        body = object_of(msgspec.json.decode(raw))
    except (msgspec.DecodeError, RecursionError):
        body = {}
    error = body.get("error", body.get("detail", body.get("message")))
    text = error.get("message") if isinstance(error, dict) else error
    return (str(text) if text else raw.decode(errors="replace"))[:500] or "no reason given"


def named(versions: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The spans where the server was told what its weights are called: else whoever pushed them knows better."""
    return tuple(versions) if any(span.version != _UNNAMED for span in versions) else ()


def with_ids(body: dict[str, Any], field: str, ids: Sequence[int]) -> bytes:
    """A request body in JSON, the ids in its last field."""
    head = msgspec.json.encode(body)[:-1]
    return b"".join([head, b"," if body else b"", msgspec.json.encode(field), b":[", *PromptIds.of(ids).spelt, b"]}"])


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """For a connection that ends when the machine at its other end is gone, however long a call may wait."""
    made = socket.socket(family=address[0], type=address[1], proto=address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux has them all
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
