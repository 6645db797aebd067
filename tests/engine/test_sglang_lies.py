"""What the SGLang client asks for, and replies of SGLang that do not prove what was sampled: each is refused."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sandlot.engine import SamplingParams
from sandlot.engine.aborted import EngineAbortedError
from sandlot.engine.sglang import SglangEngine
from sandlot.errors import ContextOverflowError, EngineError, EngineEvidenceError
from support.sglang_server import sglang
from support.toy_model import make_toy_model

HONEST: dict[str, Any] = {
    "text": "",
    "output_ids": [11, 12, 2],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "v3",
        "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, "b"], [-0.25, 2, None]],
        "input_token_logprobs": [],
    },
}


class Told:
    """Answers as it is told."""

    def __init__(self) -> None:
        self.status, self.reply = 200, HONEST
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.server: dict[str, Any] = {"max_req_input_len": 100, "version": "0.5.23"}
        self.old_paths = False

    def say(self, **meta: Any) -> None:
        self.reply = copy.deepcopy(HONEST)
        ids = meta.pop("output_ids", self.reply["output_ids"])
        self.reply["output_ids"] = ids
        self.reply["meta_info"] |= meta

    async def generate(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        return web.json_response(self.reply, status=self.status)

    async def info(self, request: web.Request) -> web.Response:
        if request.path.startswith("/get_") is not self.old_paths:
            raise web.HTTPNotFound
        if request.path.endswith("server_info"):
            return web.json_response(self.server)
        return web.json_response({"served_model_name": "m", "is_generation": True, "weight_version": "v3"})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}, {"id": "adapter", "parent": "m"}]})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Told, str]]:
    told = Told()
    app = web.Application()
    app.router.add_post("/generate", told.generate)
    app.router.add_get("/v1/models", told.models)
    for path in ("/model_info", "/server_info", "/get_model_info", "/get_server_info"):
        app.router.add_get(path, told.info)
    async with TestServer(app) as running:
        yield told, str(running.make_url("")).rstrip("/")


@pytest.fixture
async def client(server: tuple[Told, str]) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(server[1], api_key="key")
    yield engine
    await engine.close()


async def ask(client: SglangEngine, **sampling: Any) -> Any:
    return await client.generate([1, 2, 3], SamplingParams(**sampling), request_id="r", session_id="session-7")


async def test_an_honest_reply_is_kept_as_it_is(server: tuple[Told, str], client: SglangEngine) -> None:
    told, _ = server
    done = await ask(client, max_tokens=9, temperature=0.7, seed=4)
    assert (done.output_ids, done.logprobs) == ((11, 12, 2), (-0.5, -1.5, -0.25))
    assert [(v.version, v.start, v.end) for v in done.versions] == [("v3", 0, 3)]
    assert (done.finish_reason, done.stop_reason, done.cached_tokens) == ("stop", None, 1)
    assert (await ask(client, stop_token_ids=(2, 7))).stop_reason == 2
    body, headers = told.asked[0], told.headers[0]
    assert (body["input_ids"], body["return_logprob"], body["stream"]) == ([1, 2, 3], True, False)
    assert (headers["X-SMG-Routing-Key"], headers["Authorization"]) == ("session-7", "Bearer key")
    wanted = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 9, "sampling_seed": 4, "n": 1}
    wanted |= {"no_stop_trim": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    wanted |= {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    assert wanted.items() <= body["sampling_params"].items()
    assert "return_sampling_mask" not in body
    assert len({asked["rid"] for asked in told.asked}) == 2


async def test_version_spans_and_routed_experts_are_kept(server: tuple[Told, str]) -> None:
    told, url = server
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 3}]
    told.say(weight_versions=spans, routed_experts="AAAA")
    client = SglangEngine(url, routed_experts=True)
    done = await ask(client)
    await client.close()
    assert [(v.version, v.start, v.end) for v in done.versions] == [("a", 0, 1), ("b", 1, 3)]
    assert (done.routed_experts, told.asked[0]["return_routed_experts"]) == ("AAAA", True)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
async def test_truncated_sampling_needs_the_logprobs_after_truncation(
    server: tuple[Told, str], client: SglangEngine, sampling: dict[str, Any]
) -> None:
    told, _ = server
    with pytest.raises(EngineEvidenceError, match="return_sampling_mask"):
        await ask(client, **sampling)
    assert told.asked[0]["return_sampling_mask"] is True
    told.say(output_token_sampling_logprobs=[-0.1, -0.2, 0.0])
    assert (await ask(client, **sampling)).logprobs == (-0.1, -0.2, 0.0)
    told.say(output_token_sampling_logprobs=[-0.1, -0.2])
    with pytest.raises(EngineEvidenceError, match="3 tokens came with 2 logprobs"):
        await ask(client, **sampling)


PAIRS = HONEST["meta_info"]["output_token_logprobs"]
LIES: dict[str, dict[str, Any]] = {
    "no finish reason": {"finish_reason": None},
    "an unknown one": {"finish_reason": {"type": "error"}},
    "NaN": {"finish_reason": {"type": "stop", "matched": "NaN happened"}},
    "no tokens": {"output_ids": [], "output_token_logprobs": []},
    "no logprobs": {"output_token_logprobs": None},
    "one too few": {"output_token_logprobs": PAIRS[:2]},
    "one too many": {"output_token_logprobs": [*PAIRS, PAIRS[0]]},
    "shifted": {"output_token_logprobs": [*PAIRS[1:], PAIRS[0]]},
    "a null logprob": {"output_token_logprobs": [[None, 11, None], *PAIRS[1:]]},
    "a logprob as text": {"output_token_logprobs": [["-1", 11, None], *PAIRS[1:]]},
    "a positive one": {"output_token_logprobs": [[0.5, 11, None], *PAIRS[1:]]},
    "an entry of one": {"output_token_logprobs": [[-0.5], *PAIRS[1:]]},
    "an id as text": {"output_token_logprobs": [[-0.5, "11", None], *PAIRS[1:]]},
    "another count": {"completion_tokens": 4},
    "a cut prompt": {"prompt_tokens": 2},
    "no prompt count": {"prompt_tokens": None},
    "spans with a gap": {"weight_versions": [{"version": "a", "start": 1, "end": 3}]},
    "an abort that proves nothing": {"finish_reason": {"type": "abort"}, "output_token_logprobs": PAIRS[:1]},
    "an abort": {"finish_reason": {"type": "abort", "message": "Aborted"}},
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_refused(server: tuple[Told, str], client: SglangEngine, lie: str) -> None:
    server[0].say(**LIES[lie])
    with pytest.raises(EngineEvidenceError, match="refused") as e:
        await ask(client)
    assert e.value.retryable
    assert isinstance(e.value, EngineAbortedError) == (lie == "an abort")


async def test_an_abort_before_the_first_token_keeps_nothing(server: tuple[Told, str], client: SglangEngine) -> None:
    server[0].say(finish_reason={"type": "abort"}, output_ids=[], output_token_logprobs=[], completion_tokens=0)
    with pytest.raises(EngineAbortedError) as e:
        await ask(client)
    assert e.value.partial.output_ids == e.value.partial.versions == ()


@pytest.mark.parametrize(
    ("status", "message", "kind", "retryable"),
    [
        (400, "The input (9 tokens) is longer than the model's context length (8 tokens).", ContextOverflowError, None),
        (400, "Input length (9 tokens) exceeds the maximum allowed length (8 tokens).", ContextOverflowError, None),
        (400, "Request prompt exceeds the KV memory budget: input_len=9.", ContextOverflowError, None),
        (400, "top_p must be in (0, 1]", EngineError, False),
        (401, "Unauthorized", EngineError, False),
        (503, "starting", EngineError, True),
        (500, "died", EngineError, True),
    ],
)
async def test_an_error_says_cause_and_cure(
    server: tuple[Told, str],
    client: SglangEngine,
    status: int,
    message: str,
    kind: type[Exception],
    retryable: bool | None,
) -> None:
    await client.info()
    server[0].status, server[0].reply = status, {"error": {"message": message}}
    with pytest.raises(kind) as e:
        await ask(client)
    assert getattr(e.value, "retryable", None) is retryable


async def test_info_is_read_from_new_and_old_servers(server: tuple[Told, str], client: SglangEngine) -> None:
    told, url = server
    for told.old_paths in (False, True):
        info = await client.info()
        assert (info.name, info.model, info.max_context, info.weight_version) == ("sglang", "m", 100, "v3")
    told.server = {"context_length": 106}
    assert (await client.info()).max_context == 100
    told.server = {}
    with pytest.raises(EngineError, match="--context-length"):
        await client.info()
    told.server = {"max_req_input_len": 100}
    adapter = SglangEngine(url, model="adapter")
    await ask(adapter)
    await adapter.close()
    assert (told.asked[-1]["lora_path"], (await adapter.info()).model) == ("adapter", "adapter")
    await adapter.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: None,
        lambda entries: entries[:2],
        lambda entries: [entries[0], [None, 2, None], entries[2]],
        lambda entries: [entries[0], [-1.0, 9, None], entries[2]],
    ],
)
async def test_scores_that_are_missing_or_of_another_token_are_refused(
    server: tuple[Told, str], client: SglangEngine, change: Callable[[Any], Any]
) -> None:
    right = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
    server[0].say(input_token_logprobs=right)
    assert await client.score([1, 2, 3]) == [-1.0, -2.0]
    asked = server[0].asked[0]
    assert (asked["logprob_start_len"], asked["sampling_params"]["max_new_tokens"]) == (0, 0)
    server[0].say(input_token_logprobs=change(right))
    with pytest.raises(EngineEvidenceError):
        await client.score([1, 2, 3])


async def test_two_calls_of_one_request_id_do_not_meet_at_the_server(tmp_path: Path) -> None:
    async with sglang(make_toy_model(tmp_path / "model"), max_context=512) as (url, told):
        client = SglangEngine(url)
        params = SamplingParams(max_tokens=3, seed=1)
        first, again = [await client.generate([5, 6, 7], params, request_id="same", session_id="s-1") for _ in range(2)]
        await client.close()
    assert first.output_ids == again.output_ids
    assert told.routing_keys == ["s-1", "s-1"]
