"""What the clients of inference servers share: connections, errors with cause and cure, aborts that outlive a call."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import aiohttp
import msgspec

from sandlot.engine.base import EngineInfo
from sandlot.errors import ConfigError, ContextOverflowError, EngineError
from sandlot.ids import PromptIds

# Below uvicorn's 5 s, so that a pooled connection is never used while the server closes it.
_KEEP_ALIVE_S = 4.0
_CONNECT_S = 10.0
SHORT = aiohttp.ClientTimeout(total=15)
"""For what is no sampling."""


class EngineUnreachableError(EngineError):
    """Nobody answers at the address, or only a proxy that says so: another replica may."""


class EngineClient:
    """One server (or one address of many). Use it in one event loop; `close` it at the end."""

    endpoint: ClassVar[str]
    """Path of the token endpoint."""
    too_long: ClassVar[re.Pattern[str]]
    """What the server says of a prompt that does not fit."""

    def __init__(
        self, base_url: str, model: str | None = None, api_key: str | None = None, *, timeout_s: float = 3600.0
    ) -> None:
        """`model` picks a served model or LoRA adapter; without it the server's only one answers."""
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"the engine address {base_url!r} is not a URL: write http://HOST:PORT")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        self._session: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    async def send_abort(self, wire_id: str) -> None:
        """Tell the server to end the request that it knows by this id."""
        raise NotImplementedError

    async def close(self) -> None:
        if self._aborting:
            await asyncio.wait(self._aborting)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def abort_soon(self, wire_id: str) -> None:
        """Abort without waiting: for calls that are being cancelled."""

        async def send() -> None:
            with contextlib.suppress(EngineError):
                await self.send_abort(wire_id)

        task = asyncio.get_running_loop().create_task(send())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def ask(self, body: bytes, headers: dict[str, str], *, wire_id: str | None, prompt_tokens: int) -> bytes:
        """The token endpoint's answer. Cancelling aborts `wire_id` at the server."""
        try:
            status, raw = await self.request("POST", self.endpoint, body, headers)
        except asyncio.CancelledError:
            # Closing the connection frees the slot; a proxy in between may hide that, so say it as well.
            if wire_id is not None:
                self.abort_soon(wire_id)
            raise
        if status != 200:
            raise self.failure(status, raw, prompt_tokens, self.endpoint)
        return raw

    async def json(self, method: str, path: str) -> Any:
        status, raw = await self.request(method, path, None, {}, SHORT)
        if status != 200:
            raise self.failure(status, raw, 0, path)
        try:
            return msgspec.json.decode(raw)
        except msgspec.DecodeError as e:
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
    ) -> tuple[int, bytes]:
        """Status and body, whatever they are. `EngineError` when there is no answer."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.base_url + path, data=body, headers=headers, timeout=timeout or self._timeout
            ) as response:
                return response.status, await response.read()
        except aiohttp.ClientConnectorError as e:
            raise EngineUnreachableError(
                f"no engine answers at {self.base_url} ({e.os_error.strerror or e}): start it, or give its address "
                "with --engine URL"
            ) from e
        except TimeoutError as e:
            raise EngineError(f"the engine at {self.base_url} did not answer {path} in time") from e
        except aiohttp.ClientError as e:
            raise EngineUnreachableError(
                f"the connection to the engine at {self.base_url} broke ({type(e).__name__}: {e}): see its log"
            ) from e

    def failure(self, status: int, raw: bytes, prompt_tokens: int, path: str) -> Exception:
        """The error that an answer other than 200 means."""
        message = message_of(raw)
        where = f"{self.base_url}{path}"
        if status == 400 and self._info is not None and self.too_long.search(message):
            return ContextOverflowError(prompt_tokens, self._info.max_context)
        if status == 401:
            return EngineError(f"{where} wants another API key: {message}", retryable=False)
        said = f"the engine at {where} answered {status}: {message}"
        if status in (502, 503, 504):
            return EngineUnreachableError(said)
        return EngineError(said, retryable=status >= 500 or status in (408, 425, 429))


def object_of(value: Any) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    return value if isinstance(value, dict) else {}


def message_of(raw: bytes) -> str:
    """The sentence in an error body, whatever its shape."""
    try:
        body = object_of(msgspec.json.decode(raw))
    except msgspec.DecodeError:
        body = {}
    error = body.get("error", body.get("detail", body.get("message")))
    text = error.get("message") if isinstance(error, dict) else error
    return (str(text) if text else raw.decode(errors="replace"))[:500] or "no reason given"


def with_ids(body: dict[str, Any], field: str, ids: Sequence[int]) -> bytes:
    """A request body in JSON, the ids in its last field."""
    head = msgspec.json.encode(body)[:-1]
    spelt = b",".join(PromptIds.of(ids).spelt)
    return b"".join([head, b"," if body else b"", msgspec.json.encode(field), b":[", spelt, b"]}"])
