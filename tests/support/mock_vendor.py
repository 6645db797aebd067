"""A scripted model vendor: speaks Anthropic Messages and OpenAI chat completions, and keeps what it was asked.

It knows no model: each request gets the next step of the script. It stands in for the gateway where only the agent
CLI is under test.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Call:
    """One tool call the "model" makes."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Say:
    """An ordinary reply: text, thinking and tool calls. `usage` is what the vendor reports as prompt tokens."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thinking: str = ""
    usage: int = 100
    length: bool = False


@dataclass(frozen=True)
class Refuse:
    """An HTTP error in the dialect's shape: `status`, `type` and `message`."""

    status: int
    type: str
    message: str


@dataclass(frozen=True)
class Break:
    """A stream that begins, says `text`, and then carries an error event; or is just cut when `message` is empty."""

    text: str
    type: str = "overloaded_error"
    message: str = ""


Step = Say | Refuse | Break


@dataclass(frozen=True)
class Asked:
    """One request as it arrived; `time` is the event loop's clock in seconds."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    time: float


@dataclass
class Vendor:
    """The scripted vendor. When the script is over, its last step is repeated."""

    script: Sequence[Step]
    asked: list[Asked] = field(default_factory=list)
    _next: int = 0

    @property
    def posts(self) -> list[Asked]:
        return [a for a in self.asked if a.method == "POST"]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        return app

    @asynccontextmanager
    async def serve(self, sock: socket.socket | None = None) -> AsyncIterator[str]:
        """Serve on `sock`, or on a free port of 127.0.0.1; gives the base URL."""
        if sock is None:
            sock = socket.create_server(("127.0.0.1", 0))
        host, port = sock.getsockname()[:2]
        runner = web.AppRunner(self.app(), handler_cancellation=True)
        await runner.setup()
        try:
            await web.SockSite(runner, sock).start()
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        headers = {k.lower(): v for k, v in request.headers.items()}
        now = asyncio.get_running_loop().time()
        self.asked.append(Asked(request.method, request.path_qs, headers, body, now))
        if request.method != "POST":
            return web.Response(status=200 if request.method == "HEAD" else 404)
        step = self.script[min(self._next, len(self.script) - 1)]
        index, self._next = self._next, self._next + 1
        dialect = _Anthropic if request.path.endswith("/messages") else _Chat
        if isinstance(step, Refuse):
            return web.json_response(dialect.error(step.type, step.message), status=step.status)
        if isinstance(step, Say) and not body.get("stream"):
            return web.json_response(dialect.whole(step, index))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event, data in dialect.events(step, index):
            prefix = f"event: {event}\n" if event else ""
            await response.write(f"{prefix}data: {data}\n\n".encode())
        if isinstance(step, Break) and not step.message:
            assert request.transport is not None
            request.transport.abort()
        return response


def _events(step: Say | Break) -> Say:
    return step if isinstance(step, Say) else Say(step.text)


class _Anthropic:
    @staticmethod
    def error(type: str, message: str) -> Any:
        return {"type": "error", "error": {"type": type, "message": message}}

    @staticmethod
    def _blocks(say: Say, index: int) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if say.thinking:
            blocks.append({"type": "thinking", "thinking": say.thinking, "signature": f"sig{index}"})
        if say.text:
            blocks.append({"type": "text", "text": say.text})
        for i, call in enumerate(say.calls):
            blocks.append(
                {"type": "tool_use", "id": f"toolu_{index}x{i}", "name": call.name, "input": dict(call.arguments)}
            )
        return blocks

    @classmethod
    def whole(cls, say: Say, index: int) -> Any:
        stop = "max_tokens" if say.length else "tool_use" if say.calls else "end_turn"
        return {
            "id": f"msg_{index}",
            "type": "message",
            "role": "assistant",
            "model": "mock",
            "content": cls._blocks(say, index),
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": {"input_tokens": say.usage, "output_tokens": 10},
        }

    @classmethod
    def events(cls, step: Say | Break, index: int) -> list[tuple[str, str]]:
        message = cls.whole(_events(step), index)
        out: list[tuple[str, Any]] = [
            ("message_start", {"message": {**message, "content": [], "stop_reason": None}}),
            ("ping", {}),
        ]
        for i, block in enumerate(message["content"]):
            match block["type"]:
                case "text":
                    start, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
                case "thinking":
                    start = {**block, "thinking": "", "signature": ""}
                    deltas = [
                        {"type": "thinking_delta", "thinking": block["thinking"]},
                        {"type": "signature_delta", "signature": block["signature"]},
                    ]
                case _:
                    start = {**block, "input": {}}
                    deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            out.append(("content_block_start", {"index": i, "content_block": start}))
            out += [("content_block_delta", {"index": i, "delta": d}) for d in deltas]
            if isinstance(step, Say):
                out.append(("content_block_stop", {"index": i}))
        if isinstance(step, Say):
            delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
            out += [("message_delta", {"delta": delta, "usage": message["usage"]}), ("message_stop", {})]
        elif step.message:
            out.append(("error", cls.error(step.type, step.message)))
        return [(name, json.dumps({"type": name, **data})) for name, data in out]


class _Chat:
    @staticmethod
    def error(type: str, message: str) -> Any:
        return {"error": {"message": message, "type": type, "param": None, "code": type}}

    @staticmethod
    def _calls(say: Say, index: int) -> list[dict[str, Any]]:
        return [
            {
                "index": i,
                "id": f"call_{index}x{i}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))},
            }
            for i, c in enumerate(say.calls)
        ]

    @classmethod
    def whole(cls, say: Say, index: int) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": say.text or None}
        if say.calls:
            message["tool_calls"] = cls._calls(say, index)
        choice = {"index": 0, "message": message, "finish_reason": cls._finish(say)}
        return {**cls._frame(index, "chat.completion"), "choices": [choice], "usage": cls._usage(say)}

    @staticmethod
    def _finish(say: Say) -> str:
        return "length" if say.length else "tool_calls" if say.calls else "stop"

    @staticmethod
    def _usage(say: Say) -> Any:
        return {"prompt_tokens": say.usage, "completion_tokens": 10, "total_tokens": say.usage + 10}

    @staticmethod
    def _frame(index: int, object: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{index}", "object": object, "created": 1, "model": "mock"}

    @classmethod
    def events(cls, step: Say | Break, index: int) -> list[tuple[str, str]]:
        say = _events(step)
        frame = cls._frame(index, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if say.thinking:
            deltas.append({"reasoning_content": say.thinking})
        if say.text:
            deltas.append({"content": say.text})
        deltas += [{"tool_calls": [call]} for call in cls._calls(say, index)]
        chunks: list[Any] = [{**frame, "choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        if isinstance(step, Break):
            return [
                ("", json.dumps(c)) for c in [*chunks, *([cls.error(step.type, step.message)] if step.message else [])]
            ]
        chunks.append({**frame, "choices": [{"index": 0, "delta": {}, "finish_reason": cls._finish(say)}]})
        chunks.append({**frame, "choices": [], "usage": cls._usage(say)})
        return [("", json.dumps(c)) for c in chunks] + [("", "[DONE]")]
