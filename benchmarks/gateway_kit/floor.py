"""The floor: what a turn costs at least, when nothing is done twice and nothing else is done at all.

One dialect, one template, no limits, no persistence, no proof; an existence proof to measure against, never a gateway
to use. Old messages are known by their raw bytes, only new ones are rendered and encoded, ids of equal messages are
kept by content, and the engine's request is put together from pieces that were serialised before.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import time
from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web
from tokenizers import Tokenizer

from gateway_kit.loop import StallProbe, obey, run

_encode = msgspec.json.encode
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_HOW = (
    '\n</tools>\n\nTo call a tool, write:\n<tool_call>\n{"name": <name>, "arguments": <json>}\n</tool_call><|im_end|>\n'
)


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    system: msgspec.Raw
    tools: msgspec.Raw
    max_tokens: int


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]]


class _Generated(msgspec.Struct):
    meta_info: _Meta


_read_body = msgspec.json.Decoder(_Body).decode
_read_generated = msgspec.json.Decoder(_Generated).decode


@dataclass(eq=False, slots=True)
class _Piece:
    """Ids, and how the engine's request spells them."""

    ids: array[int]
    spelt: bytes


@dataclass(eq=False, slots=True)
class _Node:
    """One message of a history. `logprobs` only where it was sampled."""

    parent: _Node | None
    piece: _Piece
    logprobs: array[float] | None = None
    by_raw: dict[bytes, _Node] = field(default_factory=dict)
    by_meaning: dict[bytes, _Node] = field(default_factory=dict)
    depth: int = 0


@dataclass(eq=False)
class _Session:
    roots: dict[bytes, _Node] = field(default_factory=dict)
    nodes: list[_Node] = field(default_factory=list)
    leaf: _Node | None = None
    spelt: bytearray = field(default_factory=bytearray)


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _meaning(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """A message without what changes from request to request, and its key."""
    message: dict[str, Any] = msgspec.json.decode(raw)
    for block in message["content"]:
        for name in ("cache_control", "id", "tool_use_id"):
            block.pop(name, None)
    return message, _encode(message, order="sorted")


def _rendered(message: dict[str, Any]) -> str:
    text, results, calls = "", "", []
    for block in message["content"]:
        if block["type"] == "text":
            text += block["text"]
        elif block["type"] == "tool_use":
            arguments = json.dumps(block["input"], ensure_ascii=False)
            calls.append(f'<tool_call>\n{{"name": "{block["name"]}", "arguments": {arguments}}}\n</tool_call>')
        else:
            results += f"\n<tool_response>\n{_flat(block['content'])}\n</tool_response>"
    if message["role"] == "assistant":
        return "<|im_start|>assistant\n" + "\n".join([text, *calls] if text else calls) + "<|im_end|>\n"
    shown = f"<|im_start|>user{results}<|im_end|>\n" if results else ""
    return shown + (f"<|im_start|>user\n{text}<|im_end|>\n" if text else "")


class Floor:
    """All sessions."""

    def __init__(self, model_dir: Path, engine: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._engine = engine + "/generate"
        self._pieces: dict[bytes, _Piece] = {}
        self._ask = self._piece("<|im_start|>assistant\n")
        self._close = self._piece("\n")
        self.sessions: dict[str, _Session] = {}

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        await self._http.close()

    def _piece(self, text: str) -> _Piece:
        return _spell(array("i", self._tokenizer.encode(text, add_special_tokens=False).ids))

    def _head(self, session: _Session, body: _Body) -> _Node:
        key = bytes(body.system) + bytes(body.tools)
        if (root := session.roots.get(key)) is None:
            if (piece := self._pieces.get(key)) is None:
                tools = [
                    {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
                    for t in msgspec.json.decode(body.tools)
                ]
                text = f"<|im_start|>system\n{_flat(msgspec.json.decode(body.system))}\n\n# Tools\n\n<tools>"
                text += "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
                piece = self._pieces[key] = self._piece(text + _HOW)
            root = session.roots[key] = _Node(None, piece, depth=len(piece.ids))
        return root

    def _prompt(self, session: _Session, body: _Body) -> _Node:
        node, new = self._head(session, body), False
        for slice_ in body.messages:
            raw = bytes(slice_)
            found = None if new else node.by_raw.get(raw)
            if found is None:
                message, key = _meaning(raw)
                found = None if new else node.by_meaning.get(key)
                if found is None:
                    new = True
                    name = blake2b(key, digest_size=16).digest()
                    if (piece := self._pieces.get(name)) is None:
                        piece = self._pieces[name] = self._piece(_rendered(message))
                    found = self._grow(session, node, piece)
                    node.by_meaning[key] = found
                node.by_raw[raw] = found
            node = found
        return node

    def _grow(self, session: _Session, parent: _Node, piece: _Piece, logprobs: array[float] | None = None) -> _Node:
        node = _Node(parent, piece, logprobs, depth=parent.depth + len(piece.ids))
        session.nodes.append(node)
        return node

    def _spelt(self, session: _Session, node: _Node) -> bytes:
        """All ids of a history as the engine reads them: what the newest one had before, and the pieces after it."""
        path: list[bytes] = []
        at: _Node | None = node
        while at is not None and at is not session.leaf:
            path.append(at.piece.spelt)
            at = at.parent
        if at is None:
            session.spelt = bytearray()
        session.spelt += b"".join(reversed(path))
        session.leaf = node
        return bytes(session.spelt)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        session = self.sessions[request.headers["x-api-key"]]
        body = _read_body(await request.read())
        node = self._prompt(session, body)
        params = {"max_new_tokens": body.max_tokens, "temperature": 1.0, "skip_special_tokens": False}
        asked = _encode({"rid": secrets.token_hex(8), "return_logprob": True, "sampling_params": params})
        ids = self._spelt(session, node)
        sent = b'%b,"input_ids":[%b%b]}' % (asked[:-1], ids[1:], self._ask.spelt)
        async with self._http.post(self._engine, data=sent) as reply:
            generated = _read_generated(await reply.read())
        told = self._taken(session, node, generated.meta_info)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(told)
        await response.write_eof()
        return response

    def _taken(self, session: _Session, node: _Node, meta: _Meta) -> bytes:
        logprobs, ids, _ = zip(*meta.output_token_logprobs, strict=True)
        text = self._tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")
        blocks: list[dict[str, Any]] = []
        if (plain := _CALL.sub("", text).strip()) or not _CALL.search(text):
            blocks.append({"type": "text", "text": plain})
        for found in _CALL.finditer(text):
            call = msgspec.json.decode(found[1])
            blocks.append({"type": "tool_use", "name": call["name"], "input": call["arguments"]})
        key = _encode({"role": "assistant", "content": blocks}, order="sorted")
        piece = _spell(self._ask.ids + array("i", ids) + self._close.ids)
        node.by_meaning[key] = self._grow(session, node, piece, array("f", logprobs))
        self._pieces[blake2b(key, digest_size=16).digest()] = piece
        return _framed(blocks, node.depth + len(self._ask.ids), len(ids))

    def linearize(self, session: _Session) -> list[tuple[Any, Any, Any]]:
        """Ids, mask and logprobs of each leaf that was sampled; a stretch is trained in the first of them."""
        parents = {id(node.parent) for node in session.nodes}
        ask, close = len(self._ask.ids), len(self._close.ids)
        trained: set[int] = set()
        samples = []
        for leaf in session.nodes:
            if leaf.logprobs is None or id(leaf) in parents:
                continue
            path: list[_Node] = []
            at: _Node | None = leaf
            while at is not None:
                path.append(at)
                at = at.parent
            path.reverse()
            ids = np.concatenate([np.frombuffer(node.piece.ids, dtype=np.int32) for node in path])
            mask, logprobs = np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.float32)
            for node in path:
                if node.logprobs is not None and id(node) not in trained:
                    trained.add(id(node))
                    end = node.depth - close
                    start = node.depth - len(node.piece.ids) + ask
                    mask[start:end], logprobs[start:end] = 1, node.logprobs
            samples.append((ids, mask, logprobs))
        return samples


def _spell(ids: array[int]) -> _Piece:
    return _Piece(ids, b"," + _encode(ids.tolist())[1:-1])


def _framed(blocks: list[dict[str, Any]], prompt: int, sampled: int) -> bytes:
    """The server-sent events of an answer, static parts written out."""
    out = [
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_%b","type":"message",'
        b'"role":"assistant","model":"bench","content":[],"stop_reason":null,"stop_sequence":null,'
        b'"usage":{"input_tokens":%d,"output_tokens":0}}}\n\n' % (secrets.token_hex(12).encode(), prompt)
    ]
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            start: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            start = {"type": "tool_use", "id": "toolu_" + secrets.token_hex(8), "name": block["name"], "input": {}}
            delta = {"type": "input_json_delta", "partial_json": _encode(block["input"]).decode()}
        out.append(
            b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
            b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
            % (index, _encode(start), index, _encode(delta), index)
        )
    out.append(
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},'
        b'"usage":{"output_tokens":%d}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n' % sampled
    )
    return b"".join(out)


async def _serve(model_dir: Path, engine: str) -> None:
    floor, stalls = Floor(model_dir, engine), StallProbe()
    await floor.start()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/messages", floor.messages)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        match command["cmd"]:
            case "open":
                floor.sessions[command["session"]] = _Session()
                return {"key": command["session"]}
            case "watch":
                stalls.start()
                return {}
            case "stalls":
                return {"longest_ms": stalls.longest * 1e3}
            case "finish":
                began = time.process_time()
                samples = floor.linearize(floor.sessions[command["session"]])
                spent = (time.process_time() - began) * 1e3
                tokens = sum(len(ids) for ids, _, _ in samples)
                trained = sum(int(mask.sum()) for _, mask, _ in samples)
                return {"linearize_ms": spent, "samples": len(samples), "tokens": tokens, "trained": trained}
        raise ValueError(command["cmd"])

    await obey(runner.addresses[0][1], handle)
    await floor.close()
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    given = parser.parse_args()
    run(_serve(given.model, given.engine))
