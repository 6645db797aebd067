"""The client of SGLang's `POST /generate`, asked by token ids (field names as in SGLang 0.5)."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sandlot.engine.aborted import aborted
from sandlot.engine.base import EngineInfo, Generation, SamplingParams, VersionSpan, checked
from sandlot.engine.client import SHORT, Answer, EngineClient, named, none_of, object_of, with_ids
from sandlot.errors import ContextOverflowError, EngineError, EngineEvidenceError

# Said in every request, because a server may have other defaults and each would change the distribution.
_PLAIN = {
    "n": 1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}

# SGLang aborts every request whose id *begins* with the one given: an id that ends so begins no other.
_END_OF_ID = ";"

TokenLogprob = Annotated[list[Any], Meta(min_length=2)]
"""`[logprob, token id, text or null]`."""


class _FinishReason(Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class _Span(Struct):
    version: str
    start: int
    end: int


class _MetaInfo(Struct):
    """What SGLang tells of an answer. Every field may be missing: what is missing is refused, not filled in."""

    id: str | None = None
    finish_reason: _FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None
    routed_experts: Any = None


class _Reply(Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


_reply_decoder = msgspec.json.Decoder(_Reply)


class SglangEngine(EngineClient):
    """One SGLang server, or its router in front of many. Use it in one event loop; `close` it at the end.

    With top-p, top-k or temperature 0 the request asks for `return_sampling_mask`, because SGLang's ordinary logprobs
    are those from before truncation. A seed has effect where SGLang runs with `--enable-deterministic-inference`.
    """

    endpoint = "/generate"
    too_long = re.compile(
        r"longer than the model's context length|maximum context length|exceeds the maximum|KV memory budget",
        re.IGNORECASE,
    )

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 3600.0,
        watch_s: float = 20.0,
        routed_experts: bool = False,
    ) -> None:
        super().__init__(base_url, model, api_key, timeout_s=timeout_s, watch_s=watch_s, routed_experts=routed_experts)
        self._adapter: str | None = None
        self._rids: dict[str, set[str]] = {}

    async def info(self) -> EngineInfo:
        told = object_of(await self._either("/model_info", "/get_model_info"))
        server = object_of(await self._either("/server_info", "/get_server_info"))
        name = str(told.get("served_model_name") or server.get("served_model_name") or told.get("model_path"))
        if told.get("is_generation") is False:
            raise EngineError(f"{self.base_url} serves {name}, which is no generating model", retryable=False)
        self._adapter = await self._adapter_called(self.model, name) if self.model not in (None, name) else None
        self._info = EngineInfo(
            name="sglang",
            model=self.model or name,
            max_context=self._max_context(server),
            logprobs_mode="unknown",
            weight_version=str(told.get("weight_version") or "0"),
            extra={"version": server.get("version"), "url": self.base_url},
        )
        return self._info

    async def _either(self, path: str, older: str) -> Any:
        """The answer at a path, or at the name it had in older versions."""
        try:
            return await self.json("GET", path)
        except EngineError as error:
            if error.retryable:
                raise
            return await self.json("GET", older)

    def _max_context(self, server: dict[str, Any]) -> int:
        """SGLang accepts prompts shorter than `max_req_input_len` and samples at least up to that length."""
        if isinstance(limit := server.get("max_req_input_len"), int):
            return limit
        if isinstance(limit := server.get("context_length", server.get("max_context_length")), int):
            return limit - 6  # what SGLang itself takes off for its reserves
        raise EngineError(
            f"{self.base_url} says neither max_req_input_len nor context_length: start SGLang with --context-length",
            retryable=False,
        )

    async def _adapter_called(self, model: str | None, served: str) -> str | None:
        listed = object_of(await self.json("GET", "/v1/models")).get("data")
        ids = [str(e.get("id")) for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
        if model not in ids:
            raise EngineError(
                f"{self.base_url} does not serve {model!r}, it serves {', '.join(ids) or served}", retryable=False
            )
        return model

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, session_id: str
    ) -> Generation:
        limit = (self._info or await self.info()).max_context
        room = limit - len(prompt_ids)
        if room <= 0:
            raise ContextOverflowError(len(prompt_ids), limit)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "max_new_tokens": min(sampling.max_tokens or room, room),
            "stop_token_ids": list(sampling.stop_token_ids),
            **_PLAIN,
        }
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        body: dict[str, Any] = {"sampling_params": params}
        truncates = sampling.top_p < 1 or sampling.top_k > 0 or sampling.temperature == 0
        if truncates:
            body["return_sampling_mask"] = True
        if self.routed_experts:
            body["return_routed_experts"] = True
        headers = {"X-SMG-Routing-Key": session_id}
        with self._rid(request_id) as rid:
            reply = await self._ask(prompt_ids, body | {"rid": rid}, headers, rid)
        return _generation(reply, sampling, truncates)

    @contextlib.contextmanager
    def _rid(self, request_id: str) -> Iterator[str]:
        """A new id for SGLang, which refuses one that it still has: a call that is repeated may meet its first try."""
        rid = f"{request_id}:{secrets.token_hex(4)}{_END_OF_ID}"
        known = self._rids.setdefault(request_id, set())
        known.add(rid)
        try:
            yield rid
        finally:
            known.discard(rid)
            if not known:
                self._rids.pop(request_id, None)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        limit = (self._info or await self.info()).max_context
        if len(token_ids) >= limit:
            raise ContextOverflowError(len(token_ids), limit)
        params = {"temperature": 1.0, "max_new_tokens": 0, **_PLAIN}
        reply = await self._ask(token_ids, {"sampling_params": params, "logprob_start_len": 0}, {}, None)
        entries = reply.meta_info.input_token_logprobs
        if entries is None or [e[1] for e in entries] != list(token_ids):
            got = "none" if entries is None else str(len(entries))
            raise EngineEvidenceError(
                f"the engine scored {got} of {len(token_ids)} prompt tokens, or others than asked"
            )
        result: list[float] = []
        for at, (value, *_) in enumerate(entries[1:], 1):  # the first token has nothing before it
            if not isinstance(value, float | int) or not -9999.0 < value <= 1e-4:
                raise EngineEvidenceError(f"the engine gives no usable score for the prompt token at position {at}")
            result.append(float(value))
        return result

    async def abort(self, request_id: str) -> None:
        for rid in list(self._rids.get(request_id, ())):
            await self.send_abort(rid)

    async def abort_at(self, wire_id: str, headers: dict[str, str]) -> None:
        await self.request("POST", "/abort_request", msgspec.json.encode({"rid": wire_id}), headers, SHORT)

    async def _ask(self, ids: Sequence[int], body: dict[str, Any], headers: dict[str, str], rid: str | None) -> _Reply:
        body = {"return_logprob": True, "stream": False, **body}
        if self._adapter is not None:
            body["lora_path"] = self._adapter
        sent = with_ids(body, "input_ids", ids)
        raw = await self.ask(sent, headers, wire_id=rid, prompt_tokens=len(ids))
        try:
            reply = _reply_decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError) as e:
            raise none_of(self.endpoint, raw, e) from e
        if rid is not None and (answered := reply.meta_info.id) not in (None, rid):
            raise EngineEvidenceError(
                f"the engine's reply is refused: it answers {answered!r} and not {rid!r}; nothing was recorded"
            )
        if reply.meta_info.prompt_tokens != len(ids):  # a server may cut prompts (--allow-auto-truncate)
            raise EngineEvidenceError(
                f"the engine's reply is refused: it read {reply.meta_info.prompt_tokens} prompt tokens of {len(ids)} "
                "(start SGLang without --allow-auto-truncate); nothing was recorded"
            )
        return reply

    def failure(self, answer: Answer, prompt_tokens: int, path: str) -> Exception:
        if answer.status in (404, 405):
            return EngineError(
                f"{self.base_url}{path} does not exist there: the engine must be SGLang 0.5 or newer", retryable=False
            )
        return super().failure(answer, prompt_tokens, path)


def _generation(reply: _Reply, sampling: SamplingParams, truncates: bool) -> Generation:
    """The reply's evidence, taken as it is and checked; what is missing is refused."""

    def refuse(why: str) -> EngineEvidenceError:
        return EngineEvidenceError(
            f"the engine's reply is refused: {why}; nothing was recorded, the call may be repeated"
        )

    meta, finish = reply.meta_info, reply.meta_info.finish_reason
    ended_early = finish is not None and finish.type == "abort"
    entries = meta.output_token_logprobs
    if entries is None and ended_early and not reply.output_ids:
        entries = []
    if entries is None:
        raise refuse("it has no logprobs")
    matched = finish.matched if finish else None
    if isinstance(matched, str):  # no stop string was sent: SGLang says so of a token that is none
        raise refuse(f"it stopped for {matched!r}")
    ids = [entry[1] for entry in entries]
    if not set(map(type, ids)) <= {int}:
        raise refuse("a token id of its logprobs is none")
    logprobs = [entry[0] for entry in entries]
    if not set(map(type, logprobs)) <= {float}:
        logprobs = list(map(_number, logprobs))
    if truncates and entries:
        if meta.output_token_sampling_logprobs is None:
            raise refuse(
                "its logprobs are from before top-p and top-k: use an SGLang that knows return_sampling_mask "
                "(0.5.23 does), or sample at temperature > 0 without truncation"
            )
        logprobs = meta.output_token_sampling_logprobs
    if meta.weight_versions:
        versions = [VersionSpan(s.version, s.start, s.end) for s in meta.weight_versions]
    else:
        versions = [VersionSpan(meta.weight_version, 0, len(ids))] if meta.weight_version else []
    generation = Generation(
        output_ids=tuple(ids if reply.output_ids is None else reply.output_ids),
        logprobs=tuple(logprobs),
        finish_reason=finish.type if finish else "null",
        stop_reason=matched if isinstance(matched, int) and matched in sampling.stop_token_ids else None,
        versions=named(versions),
        routed_experts=meta.routed_experts,
        cached_tokens=meta.cached_tokens,
    )
    if ended_early:
        raise aborted(generation, logprob_ids=ids, reported_tokens=meta.completion_tokens)
    return checked(generation, logprob_ids=ids, reported_tokens=meta.completion_tokens)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, float | int) and not isinstance(value, bool) else math.nan
