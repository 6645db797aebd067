"""Token ids in, token ids out: what the gateway asks of an engine, and the proof it demands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from sandlot.errors import EngineEvidenceError

MISSING_LOGPROB = -9999.0
"""What vLLM writes where it has no logprob."""
_LARGEST_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the policy samples. Set by the trainer's side; an agent's request can only lower `max_tokens`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def capped(self, max_tokens: int) -> SamplingParams:
        """The same with `max_tokens` at most this."""
        return replace(self, max_tokens=min(max_tokens, self.max_tokens or max_tokens))

    def as_dict(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "stop_token_ids": list(self.stop_token_ids),
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start:end` of an output were sampled by weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of an engine: `output_ids` and `logprobs` have the same length, one entry per sampled token.

    `output_ids` includes the stop token when one ended the answer. `logprobs` are natural logarithms under the
    distribution that was sampled from. `finish_reason` is `stop` or `length`; `stop_reason` the stop token id
    if it was one of `stop_token_ids`. `routed_experts`, where the engine gives it, is its own encoding, kept as is.
    `lost_s` are seconds of the call that came to nothing, at replicas that were down.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    versions: tuple[VersionSpan, ...] = ()
    routed_experts: Any = None
    cached_tokens: int | None = None
    lost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself at start. `logprobs_mode` is `processed`, `raw` or `unknown`."""

    name: str
    model: str
    max_context: int
    logprobs_mode: str
    weight_version: str = "0"
    vocab_size: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """A client of one inference server (or of several replicas behind one address)."""

    async def info(self) -> EngineInfo:
        """Ask the server what it is. `EngineError` when it is down or lacks the token endpoint."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, session_id: str
    ) -> Generation:
        """Sample a continuation of exactly `prompt_ids`.

        Cancelling the awaiting task aborts the request at the server. Raises `EngineError` (retryable or not),
        `EngineEvidenceError` when the reply does not pass `checked`, and `ContextOverflowError`.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of `token_ids[1:]` at temperature 1, each given all tokens before it (for `audit --rescore`)."""
        ...

    async def close(self) -> None: ...


def checked(generation: Generation, *, logprob_ids: Sequence[int], reported_tokens: int | None = None) -> Generation:
    """Return `generation` if it proves what was sampled, else raise `EngineEvidenceError`.

    `logprob_ids` are the token ids that the engine's logprob entries name, in order; `reported_tokens` is the
    engine's own count of sampled tokens where it gives one.
    """
    ids, logprobs = generation.output_ids, generation.logprobs

    def refuse(why: str) -> EngineEvidenceError:
        return EngineEvidenceError(
            f"the engine's reply is refused: {why}; nothing was recorded, the call may be repeated"
        )

    if generation.finish_reason not in ("stop", "length"):
        raise refuse(f"finish reason {generation.finish_reason!r} is not a finished turn")
    if not ids:
        raise refuse("no token was sampled")
    if min(ids) < 0 or max(ids) > _LARGEST_ID:
        raise refuse("a token id is negative, or larger than any")
    if len(logprobs) != len(ids):
        raise refuse(f"{len(ids)} tokens came with {len(logprobs)} logprobs")
    if list(logprob_ids) != list(ids):
        at = next((k for k, (a, b) in enumerate(zip(logprob_ids, ids, strict=False)) if a != b), len(logprob_ids))
        raise refuse(f"the logprob at position {at} belongs to another token than the one sampled there")
    if reported_tokens is not None and reported_tokens != len(ids):
        raise refuse(f"it counts {reported_tokens} sampled tokens and sends {len(ids)}")
    # A sum is finite only where all its parts are; one by one they are looked at to say which is not.
    if not math.isfinite(sum(logprobs)) or max(logprobs) > 1e-4 or min(logprobs) <= MISSING_LOGPROB:
        for k, value in enumerate(logprobs):
            if not math.isfinite(value) or value > 1e-4 or value <= MISSING_LOGPROB:
                raise refuse(f"the logprob at position {k} is {value}")
    end = 0
    for span in generation.versions:
        if span.start != end or span.end < span.start:
            raise refuse("its weight version spans do not tile the sampled tokens")
        end = span.end
    if generation.versions and end != len(ids):
        raise refuse("its weight version spans do not cover the sampled tokens")
    return generation
