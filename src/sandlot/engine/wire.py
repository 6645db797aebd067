"""The JSON of vLLM's `POST /inference/v1/generate`, as this package's servers read it and its client sends it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

ID_PREFIX = "generate-tokens-"
"""What the server puts before a request id; `abort_requests` needs the id with it."""

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"

TokenId = Annotated[int, Meta(ge=0)]


class SamplingBody(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The sampling parameters that the embedded servers honour. Others are refused, never silently ignored."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    min_p: Annotated[float, Meta(ge=0, le=0)] = 0.0
    min_tokens: Annotated[int, Meta(ge=0, le=0)] = 0
    presence_penalty: Annotated[float, Meta(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=0, le=0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=1, le=1)] = 1.0
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=1)] = 1
    skip_special_tokens: bool = True
    detokenize: bool = True


class GenerateBody(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One request. `output_mode` and `stream` are there to be refused clearly when they ask for more."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: SamplingBody
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    priority: int = 0
    cache_salt: str | None = None


class AbortBody(Struct):
    request_ids: list[str]


class LogprobEntry(Struct):
    token_id: int
    logprob: float | None
    rank: int | None = None
    top_logprobs: list[Any] = []


class Logprobs(Struct):
    content: list[LogprobEntry] | None = None


class Span(Struct):
    version: str
    start: int
    end: int


class Choice(Struct):
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None
    routed_experts: Any = None
    sampling_mask: Any = None


class PromptTokensDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(Struct):
    logprob: float | None
    rank: int | None = None
    decoded_token: str | None = None


class GenerateReply(Struct):
    """One answer. Every field may be missing: what is missing is refused by the client, not filled in."""

    choices: list[Choice]
    request_id: str | None = None
    model: str | None = None
    created: int | None = None
    usage: Usage | None = None
    output_mode: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


def error_body(message: str, code: int, kind: str, param: str | None = None) -> bytes:
    """vLLM's error shape."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
