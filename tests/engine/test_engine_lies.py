"""Servers that are down, closed or lying: each reply that does not prove what was sampled is refused, never mended."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sandlot.engine import Generation, SamplingParams
from sandlot.engine.vllm import VllmEngine
from sandlot.errors import ConfigError, ContextOverflowError, EngineError, EngineEvidenceError

HONEST: dict[str, Any] = {
    "request_id": "generate-tokens-r",
    "model": "m",
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [11, 12, 13, 2],
            "logprobs": {
                "content": [
                    {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []}
                    for i, p in ((11, -0.5), (12, -1.5), (13, -0.25), (2, -0.125))
                ]
            },
            "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 4}],
        }
    ],
}


class Server:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.body: bytes = json.dumps(HONEST).encode()
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborted: list[str] = []
        self.hold: asyncio.Event | None = None
        self.holding = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body and self.status == 200:
            return web.Response(body=error("token_ids: field required"), status=400)
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.hold is not None:
            self.holding.set()
            await self.hold.wait()
        return web.Response(body=self.body, status=self.status, content_type="application/json")

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted += (await request.json())["request_ids"]
        if self.hold is not None:
            self.hold.set()
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 100}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    def say(self, **changes: Any) -> None:
        """Answer with the honest reply, its only choice changed so."""
        reply = copy.deepcopy(HONEST)
        reply["choices"][0] |= changes
        self.body = json.dumps(reply).encode()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, VllmEngine]]:
    told = Server()
    app = web.Application()
    app.router.add_post("/inference/v1/generate", told.generate)
    app.router.add_post("/inference/v1/abort_requests", told.abort)
    app.router.add_get("/v1/models", told.models)
    app.router.add_get("/version", told.version)
    async with TestServer(app) as running:
        client = VllmEngine(str(running.make_url("")), api_key="key")
        yield told, client
        await client.close()


async def ask(client: VllmEngine, **sampling: Any) -> Generation:
    return await client.generate([1, 2, 3], SamplingParams(**sampling), request_id="r", session_id="session-7")


async def test_an_honest_reply_is_kept_as_it_is(server: tuple[Server, VllmEngine]) -> None:
    told, client = server
    done = await ask(client, max_tokens=9, temperature=0.7, seed=4)
    assert (done.output_ids, done.logprobs) == ((11, 12, 13, 2), (-0.5, -1.5, -0.25, -0.125))
    assert [(v.version, v.start, v.end) for v in done.versions] == [("a", 0, 1), ("b", 1, 4)]
    assert told.asked[0]["token_ids"] == [1, 2, 3]
    assert told.headers[0]["X-Session-ID"] == "session-7"
    assert told.headers[0]["Authorization"] == "Bearer key"


async def test_every_setting_that_shapes_the_distribution_is_said(server: tuple[Server, VllmEngine]) -> None:
    told, client = server
    await ask(client)
    wanted = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 0, "max_tokens": 97}
    assert wanted.items() <= told.asked[0]["sampling_params"].items()


CONTENT = HONEST["choices"][0]["logprobs"]["content"]


def logprobs(*values: Any) -> dict[str, Any]:
    return {"content": [{**entry, "logprob": v} for entry, v in zip(CONTENT, values, strict=True)]}


LIES: dict[str, dict[str, Any]] = {
    "aborted": {"finish_reason": "abort"},
    "aborted before it began": {"finish_reason": "abort", "token_ids": [], "logprobs": None},
    "no finish reason": {"finish_reason": None},
    "an unknown finish reason": {"finish_reason": "error"},
    "no tokens": {"token_ids": [], "logprobs": {"content": []}},
    "null tokens": {"token_ids": None},
    "no logprobs": {"logprobs": None},
    "null logprob list": {"logprobs": {"content": None}},
    "one logprob too few": {"logprobs": {"content": CONTENT[:3]}},
    "one logprob too many": {"logprobs": {"content": [*CONTENT, CONTENT[0]]}},
    "shifted by one": {"logprobs": {"content": [*CONTENT[1:], CONTENT[0]]}},
    "a null logprob": {"logprobs": logprobs(-0.5, None, -0.25, -0.125)},
    "vLLM's missing value": {"logprobs": logprobs(-0.5, -9999.0, -0.25, -0.125)},
    "not a number": {"logprobs": logprobs(-0.5, float("nan"), -0.25, -0.125)},
    "minus infinity": {"logprobs": logprobs(-0.5, float("-inf"), -0.25, -0.125)},
    "a positive logprob": {"logprobs": logprobs(-0.5, 0.7, -0.25, -0.125)},
    "a logprob as text": {"logprobs": logprobs(-0.5, "-1.5", -0.25, -0.125)},
    "a negative token": {"token_ids": [11, 12, 13, -2]},
    "a token as text": {"token_ids": [11, "12", 13, 2]},
    "another count than sent": {"token_ids": [11, 12, 13], "logprobs": {"content": CONTENT[:3]}},
    "versions that do not cover": {"weight_versions": [{"version": "a", "start": 0, "end": 3}]},
    "versions with a gap": {
        "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 2, "end": 4}]
    },
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_refused(server: tuple[Server, VllmEngine], lie: str) -> None:
    told, client = server
    told.say(**LIES[lie])
    with pytest.raises(EngineEvidenceError, match="refused") as e:
        await ask(client)
    assert e.value.retryable


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'{"choices": []}', b'{"choices": 3}', b"<html>", b'{"a": 1}'])
async def test_an_answer_that_is_none_is_refused(server: tuple[Server, VllmEngine], body: bytes) -> None:
    told, client = server
    told.body = body
    with pytest.raises(EngineEvidenceError, match="refused"):
        await ask(client)


async def test_a_server_without_the_endpoint_is_found_out_at_start(server: tuple[Server, VllmEngine]) -> None:
    told, client = server
    assert (await client.info()).extra["version"] == "0.32.0"
    for status, says in ((403, "--enable-scale-out"), (404, "does not exist there")):
        told.status = status
        with pytest.raises(EngineError, match=says):
            await client.info()


async def test_routed_experts_are_kept_where_they_are_wanted(server: tuple[Server, VllmEngine]) -> None:
    told, client = server
    told.say(routed_experts="AAAA")
    assert (await ask(client)).routed_experts is None
    client.routed_experts = True
    assert (await ask(client)).routed_experts == "AAAA"


async def test_a_shortened_prompt_is_refused(server: tuple[Server, VllmEngine]) -> None:
    told, client = server
    told.body = json.dumps({**HONEST, "usage": {"prompt_tokens": 2, "completion_tokens": 4}}).encode()
    with pytest.raises(EngineEvidenceError, match="read 2 prompt tokens of 3"):
        await ask(client)


async def test_two_choices_are_refused(server: tuple[Server, VllmEngine]) -> None:
    told, client = server
    told.body = json.dumps({**HONEST, "choices": HONEST["choices"] * 2}).encode()
    with pytest.raises(EngineEvidenceError, match="2 choices"):
        await ask(client)


def error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": 1}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "says", "retryable"),
    [
        (403, b'{"detail": "scale-out is off"}', "--enable-scale-out", False),
        (404, b'{"detail": "Not Found"}', "does not exist there", False),
        (401, error("bad key"), "API key", False),
        (400, error("Token id 7 is out of vocabulary"), "out of vocabulary", False),
        (429, error("slow down"), "429", True),
        (500, error("engine died"), "engine died", True),
        (503, b"upstream gone", "upstream gone", True),
    ],
)
async def test_an_error_status_says_cause_and_cure(
    server: tuple[Server, VllmEngine], status: int, body: bytes, says: str, retryable: bool
) -> None:
    told, client = server
    told.status, told.body = status, body
    with pytest.raises(EngineError, match=says) as e:
        await ask(client)
    assert e.value.retryable is retryable


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 64 tokens. However, your request has 80 input tokens.",
        "The decoder prompt (length 80) is longer than the maximum model length of 64.",
    ],
)
async def test_too_long_is_a_context_overflow(server: tuple[Server, VllmEngine], message: str) -> None:
    told, client = server
    told.status, told.body = 400, error(message)
    with pytest.raises(ContextOverflowError):
        await ask(client)


async def test_an_engine_that_is_down_is_named_with_the_cure() -> None:
    client = VllmEngine("http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9.*--engine URL") as e:
        await client.info()
    assert e.value.retryable
    await client.close()


async def test_an_engine_that_dies_in_the_middle_is_retryable(server: tuple[Server, VllmEngine]) -> None:
    _, client = server
    await client.info()

    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    app = web.Application()
    app.router.add_post("/inference/v1/generate", die)
    async with TestServer(app) as running:
        client.base_url = str(running.make_url("")).rstrip("/")
        with pytest.raises(EngineError, match="broke") as e:
            await ask(client)
    assert e.value.retryable


async def test_cancelling_says_so_to_the_server_with_its_own_form_of_the_id(
    server: tuple[Server, VllmEngine],
) -> None:
    told, client = server
    told.hold = asyncio.Event()
    task = asyncio.ensure_future(ask(client))
    await told.holding.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()
    assert told.aborted == ["generate-tokens-r"]


async def test_scores_that_are_missing_or_belong_to_another_token_are_refused(
    server: tuple[Server, VllmEngine],
) -> None:
    told, client = server
    for wrong in (None, [None, None, None], [None, {"2": {"logprob": -1}}], [None, {"9": {"logprob": -1}}, {}]):
        told.body = json.dumps({**HONEST, "prompt_logprobs": wrong}).encode()
        with pytest.raises(EngineEvidenceError):
            await client.score([1, 2, 3])
    right = [None, {"2": {"logprob": -1.0}, "8": {"logprob": -0.1}}, {"3": {"logprob": -2.0}}]
    told.body = json.dumps({**HONEST, "prompt_logprobs": right}).encode()
    assert await client.score([1, 2, 3]) == [-1.0, -2.0]


def test_an_address_that_is_none_is_refused() -> None:
    for wrong in ("localhost:8000", "http://", "http://host:99999", "http://a host:80", "ftp://host", ""):
        with pytest.raises(ConfigError, match="http://HOST:PORT"):
            VllmEngine(wrong)
