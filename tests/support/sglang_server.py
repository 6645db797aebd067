"""SGLang's HTTP face in front of one of our backends, for tests where SGLang itself cannot be installed.

Requests and replies go through SGLang's own definitions of them (`sglang_types.py`). The rest follows SGLang
0.5.23: ids are checked for length only (`max_req_input_len`), `max_new_tokens` is clipped silently, aborts go by the
*beginning* of the id and answer 200 with finish reason `abort`, a duplicate id is refused, a stop reason names the
token whether it was asked for or is an end of sequence, ordinary logprobs have temperature but no truncation applied,
and `output_token_sampling_logprobs` (with `return_sampling_mask`) have both.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from sandlot.engine.backend import Backend, Completion, Request
from sandlot.engine.base import SamplingParams
from sandlot.engine.embedded.backend import EmbeddedBackend
from support.sglang_types import load

RESERVED = 6
"""Tokens that `max_req_input_len` is below the context length."""
NEUTRAL = {
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "n": 1,
    "stop": None,
    "json_schema": None,
}
"""What the backend behind cannot do otherwise."""


@dataclass
class Sglang:
    """The server, and what it was asked."""

    backend: Backend
    bodies: list[dict[str, Any]] = field(default_factory=list)
    routing_keys: list[str | None] = field(default_factory=list)
    running: set[str] = field(default_factory=set)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        return app

    @property
    def limit(self) -> int:
        return self.backend.info.max_context - RESERVED

    async def generate(self, http: web.Request) -> web.Response:
        raw = msgspec.json.decode(await http.read())
        self.bodies.append(raw)
        self.routing_keys.append(http.headers.get("X-SMG-Routing-Key"))
        try:
            body = load().GenerateRequest.from_json_value(raw)
        except load().JsonContractError as e:
            return web.json_response({"error": str(e)}, status=400)
        assert not body.stream
        for name, value in NEUTRAL.items():
            assert getattr(body.sampling_params, name) == value, name
        count, context = len(body.input_ids), self.backend.info.max_context
        if count >= context:
            said = f"The input ({count} tokens) is longer than the model's context length ({context} tokens)."
            return refused(said)
        if count >= self.limit:
            return refused(
                f"Input length ({count} tokens) exceeds the maximum allowed length ({self.limit} tokens). "
                "Use a shorter input or enable --allow-auto-truncate."
            )
        rid = body.rid or f"{id(body):x}"
        if rid in self.running:
            return refused(f"Duplicate request ID detected: {rid}")
        self.running.add(rid)
        try:
            done = await self.backend.generate(self._request(body, rid))
            plain = await self._untruncated(body, rid, done)
        finally:
            self.running.discard(rid)
        reply = self._reply(body, rid, done, plain)
        load().GenerateResponse.from_json_value(reply)
        return web.json_response(reply)

    def _request(self, body: Any, rid: str) -> Request:
        wants = body.sampling_params
        greedy = wants.temperature == 0
        room = self.backend.info.max_context - 2 - len(body.input_ids)
        sampling = SamplingParams(
            temperature=1.0 if greedy else wants.temperature,
            top_p=wants.top_p,
            top_k=1 if greedy else wants.top_k,
            max_tokens=max(1, min(room if wants.max_new_tokens is None else wants.max_new_tokens, room)),
            stop_token_ids=tuple(wants.stop_token_ids or ()),
            seed=wants.sampling_seed,
        )
        scored = body.return_logprob and body.logprob_start_len == 0
        return Request(rid, tuple(body.input_ids), sampling, wants.ignore_eos, score_prompt=scored)

    async def _untruncated(self, body: Any, rid: str, done: Completion) -> list[float]:
        """The ordinary logprobs. Where truncation matters they are scored again (exact at temperature 1)."""
        if not body.return_sampling_mask or not done.output_ids:
            return list(done.logprobs)
        ids = (*body.input_ids, *done.output_ids)
        again = await self.backend.generate(Request(f"{rid}again", ids, SamplingParams(max_tokens=1), False, True))
        assert again.prompt_logprobs is not None
        return [p or 0.0 for p in again.prompt_logprobs[len(body.input_ids) :]]

    def _reply(self, body: Any, rid: str, done: Completion, plain: list[float]) -> dict[str, Any]:
        nothing = body.sampling_params.max_new_tokens == 0
        ids = [] if nothing else list(done.output_ids)
        finish: dict[str, Any] = {"type": done.finish_reason}
        if done.finish_reason == "abort":
            finish |= {"message": "Abort in waiting queue" if not ids else "Aborted", "status_code": None}
        elif done.finish_reason == "length":
            finish |= {"length": len(ids)}
        else:
            finish |= {"matched": ids[-1]}
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": "length", "length": 0} if nothing else finish,
            "prompt_tokens": len(body.input_ids),
            "weight_version": done.versions[-1].version if done.versions else self.backend.weight_version,
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(ids),
            "cached_tokens": done.cached_tokens,
            "e2e_latency": 0.01,
        }
        if len(done.versions) > 1:
            meta["weight_versions"] = [{"version": v.version, "start": v.start, "end": v.end} for v in done.versions]
        if body.return_logprob:
            pairs = zip(plain, ids, strict=False)
            meta["output_token_logprobs"] = [[p, i, None] for p, i in pairs]
            meta["output_token_logprobs_length"] = len(ids)
            meta["input_token_logprobs"] = []
            if done.prompt_logprobs is not None:
                scored = zip(done.prompt_logprobs, body.input_ids, strict=True)
                meta["input_token_logprobs"] = [[p, i, None] for p, i in scored]
            if body.return_sampling_mask:
                meta["output_token_sampling_logprobs"] = list(done.logprobs)
                meta["output_token_sampling_mask_length"] = len(ids)
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def abort(self, http: web.Request) -> web.Response:
        body = load().AbortRequest.from_json_value(msgspec.json.decode(await http.read()))
        if body.abort_all or body.rid in self.running:  # one tokenizer process looks the id up, then the prefix counts
            for rid in self.running:
                if rid.startswith(body.rid):
                    self.backend.abort(rid)
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        name = self.backend.info.model
        told = load().GetModelInfoResponse(
            model_path=name, served_model_name=name, is_generation=True, weight_version=self.backend.weight_version
        )
        return web.json_response(told.to_json_value())

    async def server_info(self, _: web.Request) -> web.Response:
        context = self.backend.info.max_context
        told = load().GetServerInfoResponse(max_context_length=context, version="0.5.23").to_json_value()
        return web.json_response({**told, "context_length": context, "max_req_input_len": self.limit})

    async def models(self, _: web.Request) -> web.Response:
        info = self.backend.info
        cards = [{"id": info.model, "object": "model", "root": info.model, "max_model_len": info.max_context}]
        return web.json_response({"object": "list", "data": cards})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'sglang:num_running_reqs{{model_name="m"}} {len(self.running)}\n')


def refused(message: str) -> web.Response:
    """`_create_error_response`."""
    return web.json_response({"error": {"message": message}}, status=400)


@contextlib.asynccontextmanager
async def sglang(model: Path, *, max_context: int) -> AsyncIterator[tuple[str, Sglang]]:
    """The embedded model behind SGLang's face; `max_context` is what prompt and answer can have together."""
    backend = EmbeddedBackend.load(model, max_context=max_context + RESERVED)
    told = Sglang(backend)
    try:
        async with TestServer(told.app()) as server:
            yield str(server.make_url("")).rstrip("/"), told
    finally:
        await backend.close()
