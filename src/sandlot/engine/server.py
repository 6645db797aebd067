"""The HTTP server of the embedded and the scripted engine: vLLM's token endpoint and what its clients ask besides."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from aiohttp import web

from sandlot.engine.backend import Backend, Completion, Request
from sandlot.engine.base import SamplingParams
from sandlot.engine.wire import (
    ABORT,
    GENERATE,
    ID_PREFIX,
    AbortBody,
    Choice,
    GenerateBody,
    GenerateReply,
    LogprobEntry,
    Logprobs,
    PromptLogprob,
    PromptTokensDetails,
    Span,
    Usage,
    error_body,
)
from sandlot.errors import EngineError

MAX_BODY = 64 << 20

_request_decoder = msgspec.json.Decoder(GenerateBody)
_abort_decoder = msgspec.json.Decoder(AbortBody)


class _Refused(Exception):
    """A request that is answered with an error body."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


def make_app(backend: Backend) -> web.Application:
    """The application; run it with `handler_cancellation=True`, so that a client who leaves frees its slot."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
    server = _Server(backend)
    app.router.add_post(GENERATE, server.generate)
    app.router.add_post(ABORT, server.abort)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health", server.health)
    app.router.add_get("/version", server.version)
    app.router.add_get("/metrics", server.metrics)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except _Refused as e:
        return _json(error_body(str(e), e.status, e.kind, e.param), e.status)
    except EngineError as e:
        return _json(error_body(str(e), 500, "InternalServerError"), 500)
    except web.HTTPRequestEntityTooLarge as e:
        return _json(error_body(f"the body is larger than {MAX_BODY} bytes", 413, "BadRequestError"), e.status)
    except web.HTTPException as e:
        return _json(error_body(f"{request.method} {request.path}: {e.reason}", e.status, "NotFoundError"), e.status)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


class _Server:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._started = int(time.time())

    async def generate(self, http: web.Request) -> web.Response:
        try:
            body = _request_decoder.decode(await http.read())
        except msgspec.DecodeError as e:
            raise _Refused(400, str(e)) from e
        request = self._checked(body)
        wants = body.sampling_params
        completion = await self._backend.generate(request)
        reply = self._reply(request, completion, wants.logprobs is not None)
        if body.return_token_ids:
            reply.prompt_token_ids = body.token_ids
        return _json(msgspec.json.encode(reply))

    def _checked(self, body: GenerateBody) -> Request:
        info, wants = self._backend.info, body.sampling_params
        if body.stream:
            raise _Refused(400, "this engine does not stream: send stream false", param="stream")
        if body.output_mode != "tokens":
            raise _Refused(400, "this engine answers in tokens only: leave output_mode out", param="output_mode")
        if body.model is not None and body.model != info.model:
            raise _Refused(404, f"The model `{body.model}` does not exist.", "NotFoundError", "model")
        if body.cache_salt is not None or body.priority:
            raise _Refused(400, "this engine has neither cache_salt nor priority: leave them out")
        length = len(body.token_ids)
        if length >= info.max_context:
            raise _Refused(
                400,
                f"This model's maximum context length is {info.max_context} tokens. However, your request has "
                f"{length} input tokens. Please reduce the length of the input.",
                param="input_tokens",
            )
        if (largest := max(body.token_ids)) >= info.vocab_size:
            raise _Refused(400, f"Token id {largest} is out of vocabulary", param="token_ids")
        room = info.max_context - length
        sampling = SamplingParams(
            temperature=wants.temperature,
            top_p=wants.top_p,
            top_k=wants.top_k,
            max_tokens=min(wants.max_tokens or room, room),
            stop_token_ids=tuple(wants.stop_token_ids or ()),
            seed=wants.seed,
        )
        return Request(
            request_id=ID_PREFIX + (body.request_id or uuid.uuid4().hex),
            token_ids=tuple(body.token_ids),
            sampling=sampling,
            ignore_eos=wants.ignore_eos,
            score_prompt=wants.prompt_logprobs is not None,
        )

    def _reply(self, request: Request, done: Completion, with_logprobs: bool) -> GenerateReply:
        logprobs = None
        if with_logprobs:
            entries = zip(done.output_ids, done.logprobs, done.ranks, strict=True)
            logprobs = Logprobs([LogprobEntry(i, p, rank, [{"token_id": i, "logprob": p}]) for i, p, rank in entries])
        prompt_logprobs = None
        if done.prompt_logprobs is not None:
            pairs = zip(request.token_ids, done.prompt_logprobs, strict=True)
            prompt_logprobs = [None if p is None else {str(i): PromptLogprob(p)} for i, p in pairs]
        count = len(done.output_ids)
        return GenerateReply(
            request_id=request.request_id,
            model=self._backend.info.model,
            created=int(time.time()),
            output_mode="tokens",
            usage=Usage(
                prompt_tokens=len(request.token_ids),
                completion_tokens=count,
                total_tokens=len(request.token_ids) + count,
                prompt_tokens_details=PromptTokensDetails(done.cached_tokens),
            ),
            prompt_logprobs=prompt_logprobs,
            choices=[
                Choice(
                    finish_reason=done.finish_reason,
                    stop_reason=done.stop_reason,
                    token_ids=list(done.output_ids),
                    logprobs=logprobs,
                    weight_versions=[Span(v.version, v.start, v.end) for v in done.versions],
                )
            ],
        )

    async def abort(self, http: web.Request) -> web.Response:
        try:
            body = _abort_decoder.decode(await http.read())
        except msgspec.DecodeError as e:
            raise _Refused(400, str(e)) from e
        for request_id in body.request_ids:
            self._backend.abort(request_id)
        return web.Response()

    async def models(self, http: web.Request) -> web.Response:
        info = self._backend.info
        entry = {
            "id": info.model,
            "object": "model",
            "created": self._started,
            "owned_by": "sandlot",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_context,
            "sandlot": {
                "engine": info.engine,
                "logprobs_mode": info.logprobs_mode,
                "vocab_size": info.vocab_size,
                "weight_version": self._backend.weight_version,
            },
        }
        return _json(msgspec.json.encode({"object": "list", "data": [entry]}))

    async def health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def version(self, http: web.Request) -> web.Response:
        return _json(msgspec.json.encode({"version": self._backend.info.version}))

    async def metrics(self, http: web.Request) -> web.Response:
        # The name vLLM gives it, so that one dashboard (and one test) reads both.
        name, model = "vllm:num_requests_running", self._backend.info.model
        return web.Response(text=f'# TYPE {name} gauge\n{name}{{model_name="{model}"}} {self._backend.running()}\n')
