"""The client of vLLM's `POST /inference/v1/generate`; the embedded and the scripted server speak the same."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sandlot.engine.aborted import aborted
from sandlot.engine.base import EngineInfo, Generation, SamplingParams, VersionSpan, checked
from sandlot.engine.client import SHORT, Answer, EngineClient, message_of, named, none_of, object_of, with_ids
from sandlot.engine.wire import ABORT, GENERATE, ID_PREFIX, GenerateReply
from sandlot.errors import ContextOverflowError, EngineError, EngineEvidenceError

# Said in every request, because a server may have other defaults and each would change the distribution.
_PLAIN = {
    "n": 1,
    "min_p": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}

_reply_decoder = msgspec.json.Decoder(GenerateReply)


class VllmEngine(EngineClient):
    """One vLLM, or one address of many. Use it in one event loop; `close` it at the end."""

    endpoint = GENERATE
    too_long = re.compile(r"maximum (context|model) length|max_model_len|longer than the maximum", re.IGNORECASE)

    async def info(self) -> EngineInfo:
        served = object_of(await self.json("GET", "/v1/models")).get("data")
        entries = [e for e in served if isinstance(e, dict)] if isinstance(served, list) else []
        entry = next((e for e in entries if self.model in (None, e.get("id"))), None)
        if entry is None:
            ids = ", ".join(str(e.get("id")) for e in entries) or "no model at all"
            raise EngineError(f"{self.base_url} does not serve {self.model!r}, it serves {ids}", retryable=False)
        limit = entry.get("max_model_len") or self._parent_limit(entry, entries)
        if not isinstance(limit, int):
            raise EngineError(
                f"{self.base_url}/v1/models does not say max_model_len: serve the model with vLLM", retryable=False
            )
        await self._require_endpoint()
        own = object_of(entry.get("sandlot") or {})
        self._info = EngineInfo(
            name=own.get("engine", "vllm"),
            model=str(entry.get("id")),
            max_context=limit,
            logprobs_mode=own.get("logprobs_mode", "unknown"),
            weight_version=str(own.get("weight_version", "0")),
            vocab_size=own.get("vocab_size"),
            extra={"version": await self._version(), "url": self.base_url},
        )
        return self._info

    async def _require_endpoint(self) -> None:
        """An empty request is refused for its body where the token endpoint is on, and for itself where it is not."""
        answer = await self.request("POST", GENERATE, b"{}", {}, SHORT)
        if answer.status in (401, 403, 404, 405):
            raise self.failure(answer, 0, GENERATE)

    async def _version(self) -> str | None:
        """Routers in front of engines often have no version to tell."""
        try:
            version = object_of(await self.json("GET", "/version")).get("version")
        except EngineError:
            return None
        return str(version) if version else None

    @staticmethod
    def _parent_limit(entry: dict[str, Any], entries: Sequence[dict[str, Any]]) -> Any:
        """A LoRA adapter's entry leaves its length to the model it adapts."""
        return next((e.get("max_model_len") for e in entries if e.get("id") == entry.get("parent")), None)

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
            "top_k": sampling.top_k,
            "max_tokens": min(sampling.max_tokens or room, room),
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "skip_special_tokens": False,
            **_PLAIN,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        reply = await self._generate(prompt_ids, params, request_id, session_id)
        return _generation(reply, len(prompt_ids), self.routed_experts)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        limit = (self._info or await self.info()).max_context
        if len(token_ids) >= limit:
            raise ContextOverflowError(len(token_ids), limit)
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
        reply = await self._generate(token_ids, params, None, None)
        entries = reply.prompt_logprobs
        if entries is None or len(entries) != len(token_ids):
            got = "none" if entries is None else str(len(entries))
            raise EngineEvidenceError(f"the engine scored {got} of {len(token_ids)} prompt tokens")
        result: list[float] = []
        for at, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
            if at == 0:
                continue
            found = (entry or {}).get(str(token))
            if found is None or found.logprob is None or not -9999.0 < found.logprob <= 1e-4:
                raise EngineEvidenceError(f"the engine gives no usable score for the prompt token at position {at}")
            result.append(found.logprob)
        return result

    async def abort(self, request_id: str) -> None:
        """End a request early. Ids not in work are ignored."""
        await self.send_abort(ID_PREFIX + request_id)

    async def abort_at(self, wire_id: str, headers: dict[str, str]) -> None:
        await self.request("POST", ABORT, msgspec.json.encode({"request_ids": [wire_id]}), headers, SHORT)

    async def _generate(
        self, ids: Sequence[int], params: dict[str, Any], request_id: str | None, session_id: str | None
    ) -> GenerateReply:
        body: dict[str, Any] = {"sampling_params": params}
        if request_id is not None:
            body["request_id"] = request_id
        if self.model is not None:
            body["model"] = self.model
        headers = {"X-Session-ID": session_id} if session_id else {}
        if request_id is not None:  # one that a proxy puts there would win over that of the body, and aborts miss it
            headers["X-Request-Id"] = request_id
        wire_id = None if request_id is None else ID_PREFIX + request_id
        sent = with_ids(body, "token_ids", ids)
        raw = await self.ask(sent, headers, wire_id=wire_id, prompt_tokens=len(ids))
        try:
            return _reply_decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError) as e:
            raise none_of(GENERATE, raw, e) from e

    def failure(self, answer: Answer, prompt_tokens: int, path: str) -> Exception:
        status, message = answer.status, message_of(answer.body)
        where = f"{self.base_url}{path}"
        if status == 403:
            return EngineError(
                f"{where} is switched off there: start vLLM with --enable-scale-out ({message})", retryable=False
            )
        if status == 404 and self.model is not None and self.model in message:
            return EngineError(f"{self.base_url} does not serve the model {self.model!r}: {message}", retryable=False)
        if status in (404, 405):
            return EngineError(
                f"{where} does not exist there: the engine must be vLLM 0.32 or newer, or Sandlot's own",
                retryable=False,
            )
        return super().failure(answer, prompt_tokens, path)


def _generation(reply: GenerateReply, prompt_tokens: int, routed_experts: bool) -> Generation:
    """The reply's evidence, taken as it is and checked; what is missing is refused."""

    def refuse(why: str) -> EngineEvidenceError:
        return EngineEvidenceError(
            f"the engine's reply is refused: {why}; nothing was recorded, the call may be repeated"
        )

    if len(reply.choices) != 1:
        raise refuse(f"it holds {len(reply.choices)} choices instead of one")
    choice = reply.choices[0]
    entries = choice.logprobs.content if choice.logprobs else None
    ended_early = choice.finish_reason == "abort"
    if entries is None and ended_early and not choice.token_ids:
        entries = []
    if choice.finish_reason is not None and choice.finish_reason not in ("stop", "length", "abort"):
        raise refuse(f"finish reason {choice.finish_reason!r} is not a finished turn")
    if entries is None:
        raise refuse("it has no logprobs")
    usage = reply.usage
    if usage and usage.prompt_tokens not in (None, prompt_tokens):
        raise refuse(f"it read {usage.prompt_tokens} prompt tokens of {prompt_tokens}")
    details = usage.prompt_tokens_details if usage else None
    generation = Generation(
        output_ids=tuple(choice.token_ids or ()),
        logprobs=tuple(math.nan if e.logprob is None else e.logprob for e in entries),
        finish_reason=choice.finish_reason or "null",
        stop_reason=choice.stop_reason,
        versions=named([VersionSpan(s.version, s.start, s.end) for s in choice.weight_versions or ()]),
        routed_experts=choice.routed_experts if routed_experts else None,
        cached_tokens=details.cached_tokens if details else None,
    )
    logprob_ids = [e.token_id for e in entries]
    reported = usage.completion_tokens if usage else None
    if ended_early:
        raise aborted(generation, logprob_ids=logprob_ids, reported_tokens=reported)
    return checked(generation, logprob_ids=logprob_ids, reported_tokens=reported)
