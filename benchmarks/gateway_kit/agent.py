"""The agents of the benchmark: Anthropic Messages over keep-alive connections, echoing what they get."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import msgspec

from gateway_kit.workload import Workload

_encode = msgspec.json.encode


class Connection(asyncio.Protocol):
    """A keep-alive HTTP/1.1 client that has one request under way; `began` is when its answer began."""

    def __init__(self) -> None:
        self.closed = False
        self.began = 0.0
        self._buffer = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._end = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"closed after {bytes(self._buffer[:300])!r}"))

    def data_received(self, data: bytes) -> None:
        if not self._buffer:
            self.began = time.perf_counter()
        self._buffer += data
        if self._end == -1 and (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            fields = bytes(self._buffer[:head]).lower()
            at = fields.find(b"content-length:")
            self._end = 0 if at < 0 else head + 4 + int(fields[at + 15 :].split(b"\r\n", 1)[0])
        whole = self._buffer.endswith(b"0\r\n\r\n") if self._end == 0 else 0 < self._end <= len(self._buffer)
        if whole and self._answer is not None and not self._answer.done():
            self._answer.set_result(bytes(self._buffer))

    async def post(self, head: bytes, body: bytes) -> bytes:
        """The raw answer."""
        self._buffer.clear()
        self._end = -1
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.writelines([head, b"Content-Length: %d\r\n\r\n" % len(body), body])
        return await self._answer


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The server-sent events of an answer. `RuntimeError` for any other answer."""
    at = raw.index(b"\r\n\r\n") + 4
    head, body = raw[:at].lower(), raw[at:]
    if b" 200 " not in head.split(b"\r\n", 1)[0] or b"text/event-stream" not in head:
        raise RuntimeError(raw[:800].decode(errors="replace"))
    if b"chunked" in head:
        pieces, at = [], 0
        while size := int(body[at : (line := body.index(b"\r\n", at))], 16):
            pieces.append(body[line + 2 : line + 2 + size])
            at = line + 4 + size
        body = b"".join(pieces)
    return [msgspec.json.decode(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: ")]


class Agent:
    """One session: sends its history, takes the answer in, adds a tool result that no other session has.

    In the turns of `forks` it rewrites its task, as a compaction does, so that history differs from there on.
    """

    def __init__(self, workload: Workload, name: str, key: str, offset: int, forks: frozenset[int] = frozenset()):
        self._workload, self._name, self._offset, self._forks = workload, name, offset, forks
        half = len(workload.system) // 2
        system = [
            {"type": "text", "text": workload.system[:half]},
            {"type": "text", "text": workload.system[half:], "cache_control": {"type": "ephemeral"}},
        ]
        rest = {"system": system, "tools": workload.tools, "metadata": {"user_id": "bench"}, "max_tokens": 8192}
        self._rest = b"]," + _encode({**rest, "temperature": 1, "stream": True})[1:]
        self._history: list[bytes] = []
        self._last: dict[str, Any] = {"type": "text", "text": workload.task}
        self.head = (
            f"POST /v1/messages?beta=true HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"x-api-key: {key}\r\nAuthorization: Bearer {key}\r\nanthropic-version: 2023-06-01\r\n"
        ).encode()

    def body(self) -> bytes:
        """The next request. The cache mark stands at the newest block, as real agents have it."""
        marked = {**self._last, "cache_control": {"type": "ephemeral"}}
        newest = _encode({"role": "user", "content": [marked]})
        return b'{"model":"bench","messages":[' + b",".join([*self._history, newest]) + self._rest

    def take(self, raw: bytes, turn: int) -> None:
        """Continue with an answer."""
        blocks: list[dict[str, Any]] = []
        partial = ""
        for event in events_of(raw):
            kind, delta = event["type"], event.get("delta", {})
            if kind == "content_block_start":
                blocks.append(event["content_block"])
                partial = ""
            elif kind == "content_block_delta" and "text" in delta:
                blocks[-1]["text"] += delta["text"]
            elif kind == "content_block_delta" and "partial_json" in delta:
                partial += delta["partial_json"]
            elif kind == "content_block_stop" and blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = msgspec.json.decode(partial or "{}")
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if not calls:
            raise RuntimeError(f"no tool call in {raw[-400:]!r}")
        result = (
            f"[{self._name} {turn}]\n" + self._workload.results[(self._offset + turn) % len(self._workload.results)]
        )
        self._history.append(_encode({"role": "user", "content": [self._last]}))
        self._history.append(_encode({"role": "assistant", "content": blocks}))
        self._last = {"tool_use_id": calls[0]["id"], "type": "tool_result", "content": result}
        if turn in self._forks:
            task = {"type": "text", "text": f"[summary {turn}] {self._workload.task}"}
            self._history[0] = _encode({"role": "user", "content": [task]})

    def invent(self, tokens: int) -> None:
        """A history of about so many tokens that another gateway served, with texts of this session only."""
        for turn in range(max(1, (tokens - 12_000) // 600)):
            results = self._workload.results
            result = f"[{self._name} {turn}]\n" + results[(self._offset * 31 + turn) % len(results)]
            use = {"type": "tool_use", "id": f"toolu_{self._name}{turn}", "name": "Bash", "input": {"command": "ls"}}
            self._history.append(_encode({"role": "user", "content": [self._last]}))
            self._history.append(_encode({"role": "assistant", "content": [use]}))
            self._last = {"tool_use_id": use["id"], "type": "tool_result", "content": result}
