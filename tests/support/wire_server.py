"""A vendor that answers every call of one wire with a given reply: what the official SDKs are tested against."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from sandlot.chat.messages import ParsedCall, Reply
from sandlot.gateway.wire import Answer, ChatRequest, Head, Wire, WireError, minted

TURN = "0123456789abcdef0123"


def call(name: str, arguments: dict[str, Any] | str, status: Any = "ok") -> ParsedCall:
    """A parsed call; its raw text does not matter to a wire."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ParsedCall(name, arguments, raw, status)


def answer(wire: Wire, reply: Reply, *, finish: Any = None, prompt_tokens: int = 11, output_tokens: int = 7) -> Answer:
    """A recorded turn for `reply`, with ids minted as the gateway does."""
    ids = tuple(minted.call_id(wire.call_prefix, TURN, i) for i in range(len(reply.calls)))
    head = Head("msg_1" if wire.name == "anthropic" else "chatcmpl-1", "policy", prompt_tokens, 1_700_000_000)
    finish = finish or ("length" if reply.truncated else "tool_calls" if reply.calls else "stop")
    return Answer(head, reply, ids, minted.signature(TURN), finish, output_tokens)


@dataclass
class Vendor:
    """What the server answers and what it was asked."""

    wire: Wire
    answer: Answer | None = None
    refusal: WireError | None = None
    break_stream: WireError | None = None
    asked: list[ChatRequest] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        try:
            asked = self.wire.parse(msgspec.json.decode(await request.read()), headers, request.path_qs)
            if self.refusal is not None:
                raise self.refusal
        except WireError as error:
            status, body = self.wire.error(error)
            return web.Response(status=status, body=body, content_type="application/json")
        self.asked.append(asked)
        assert self.answer is not None
        if not asked.stream:
            return web.Response(body=self.wire.body(self.answer, asked), content_type="application/json")
        kind = "text/event-stream" if asked.framing == "events" else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        head = self.answer.head
        await response.write(self.wire.head(head, asked))
        for beats in range(2):
            await response.write(self.wire.keepalive(head, asked, beats))
        broken = self.break_stream
        await response.write(
            self.wire.error_event(broken, head, asked, 2) if broken else self.wire.tail(self.answer, asked, 2)
        )
        await response.write_eof()
        return response


@asynccontextmanager
async def serve(vendor: Vendor) -> AsyncIterator[str]:
    """Serve on a free port of this machine; yields the base URL."""
    app = web.Application(client_max_size=64 * 2**20)
    for path in vendor.wire.paths:
        app.router.add_post(path.replace("{model}", "{model:.+}"), vendor.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
