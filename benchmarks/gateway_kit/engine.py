"""An engine that costs nothing: SGLang's `/generate`, answered from prepared bytes at once or after a delay."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import cast

from gateway_kit.loop import run
from gateway_kit.workload import Workload

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


def _answer(ids: list[int], chance: random.Random) -> tuple[bytes, bytes]:
    """A reply in two halves; the number of prompt tokens goes in between."""
    meta = {
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "completion_tokens": len(ids),
        "weight_version": "default",
        "output_token_logprobs": [[-round(chance.expovariate(3.0), 6), i, None] for i in ids],
        "prompt_tokens": "HERE",
    }
    first, second = json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode().split(b'"HERE"')
    return first, second


class FakeEngine:
    """The prepared answers, given out in turn."""

    def __init__(self, workload: Workload, delay: float) -> None:
        chance = random.Random(1)
        self._answers = [_answer(reply.ids, chance) for reply in workload.replies]
        self._told = json.dumps({"served_model_name": "bench", "model_path": "bench", "is_generation": True}).encode()
        self._server = json.dumps({"max_total_num_tokens": 1 << 20, "context_length": 1 << 20}).encode()
        self._served = 0
        self.delay = delay

    def answer(self, path: bytes, body: bytes) -> bytes:
        if path.endswith(b"model_info"):
            return self._told
        if path.endswith(b"server_info"):
            return self._server
        if not path.endswith(b"/generate"):
            return b"{}"
        start = body.index(b"[", body.index(b'"input_ids"'))
        tokens = body.count(b",", start, body.index(b"]", start)) + 1
        first, second = self._answers[self._served % len(self._answers)]
        self._served += 1
        return first + b"%d" % tokens + second


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with a content length, one request at a time."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._pieces: list[bytes] = []
        self._have, self._need, self._body_at = 0, 0, 0
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._have += len(data)
        if not self._need:
            head = b"".join(self._pieces)
            if (end := head.find(b"\r\n\r\n")) < 0:
                return
            fields = head[:end].lower()
            at = fields.find(b"content-length:")
            length = int(fields[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self._path = head.split(b" ", 2)[1]
            self._body_at = end + 4
            self._need = self._body_at + length
        if self._have >= self._need:
            body = b"".join(self._pieces)[self._body_at :]
            self._pieces, self._have, self._need = [], 0, 0
            delay = self._engine.delay if self._path.endswith(b"/generate") else 0
            if delay:
                asyncio.get_running_loop().call_later(delay, self._reply, self._path, body)
            else:
                self._reply(self._path, body)

    def _reply(self, path: bytes, body: bytes) -> None:
        if not self._transport.is_closing():
            told = self._engine.answer(path, body)
            self._transport.write(_OK % (len(told), told))


async def _serve(model_dir: Path, delay: float) -> None:
    engine = FakeEngine(Workload(model_dir), delay)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), "127.0.0.1", 0, backlog=4096)
    print("READY", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    given = parser.parse_args()
    run(_serve(given.model, given.delay))
