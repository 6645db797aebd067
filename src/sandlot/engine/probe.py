"""Tells at start whether an engine's logprobs are those of the distribution it samples from."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence

from sandlot.engine.base import Engine, Generation, SamplingParams
from sandlot.errors import ConfigError, EngineError, EngineEvidenceError

TEMPERATURE = 0.7
_TOKENS = 32
_ROUNDS = 4
_ENOUGH = 16
_NOISE = 0.05
"""What numeric noise of a low-precision engine moves a logprob on average."""
_SLACK = 0.3
"""What it may move a single one."""
_APART = 0.1
"""What it may move the logprobs of a text on average between two engines with the same weights."""
_MEANINGFUL = 0.05
"""Tokens that were this certain look alike at every temperature."""
_CURE = (
    "start vLLM with --logprobs-mode processed_logprobs (its modes of logits are no logprobs), or use another version"
)


async def probe(engine: Engine, sampling: SamplingParams, *, prompt_ids: Sequence[int] = tuple(range(100, 132))) -> str:
    """The mode of the engine's logprobs, measured: `processed`, `raw`, or `unknown` where it cannot be told.

    Samples some tokens at temperature 0.7 and scores them again at 1. `EngineEvidenceError` if they fit neither.
    `ConfigError` if they are raw, or the engine scores nothing, while the run's `sampling` has another temperature than
    1 or truncates; or if they know nothing of truncation while it truncates. `prompt_ids` is what is continued; any ids
    of the vocabulary do.
    """
    sampled: list[float] = []
    scored: list[float] = []
    seed_params = SamplingParams(temperature=TEMPERATURE, max_tokens=_TOKENS)
    for k in range(_ROUNDS):
        # A different start each time, because an answer may end at its first token.
        prompt = [*prompt_ids[k:], *prompt_ids[:k]]
        done = await _sampled(engine, prompt, seed_params)
        try:
            scores = await engine.score([*prompt, *done.output_ids])
        except EngineError as error:
            return _unscored(error, sampling)
        sampled += done.logprobs
        scored += scores[len(prompt) - 1 :]
        if len(sampled) >= _ENOUGH:
            break
    vocab_size = (await engine.info()).vocab_size
    mode = judge(sampled, scored, TEMPERATURE, vocab_size)
    if mode == "wrong":
        raise EngineEvidenceError(
            "the engine's logprobs belong neither to what it samples nor to its model "
            f"(a test of 32 tokens at temperature 0.7, scored again at 1): {_CURE}"
        )
    require_sampled(mode, sampling)
    if sampling.top_p < 1 or sampling.top_k > 0:
        await _probe_truncation(engine, prompt_ids)
    return mode


async def _sampled(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
    try:
        return await engine.generate(prompt, sampling, request_id=f"probe-{uuid.uuid4().hex}", session_id="probe")
    except EngineEvidenceError as error:
        raise EngineEvidenceError(f"{error} (a first test of the engine): {_CURE}") from error


def _unscored(error: EngineError, sampling: SamplingParams) -> str:
    """The mode of an engine that does not score prompts; what it may be matters unless the run samples plainly."""
    if error.retryable and not isinstance(error, EngineEvidenceError):
        raise error
    if not is_plain(sampling):
        raise ConfigError(
            "whether the engine's logprobs are those it samples from cannot be told, because it scores no prompt "
            f"({error}): use one that gives prompt logprobs, or sample at temperature 1 without truncation"
        ) from error
    return "unknown"


async def _probe_truncation(engine: Engine, prompt_ids: Sequence[int]) -> None:
    """Where one token is left to choose from, it is certain."""
    done = await _sampled(engine, prompt_ids, SamplingParams(top_k=1, max_tokens=_TOKENS))
    if min(done.logprobs) < -_NOISE:
        raise ConfigError(
            "the engine gives logprobs from before top-p and top-k, which would make every importance ratio wrong: "
            "use another version of it, or sample without truncation"
        )


async def require_alike(engine: Engine, other: Engine, token_ids: Sequence[int]) -> None:
    """Raise `EngineError` if two engines score a text differently whose weights go by the same name."""
    names = [(await one.info()).weight_version for one in (engine, other)]
    if names[0] != names[1]:
        return
    scores = [await one.score(token_ids) for one in (engine, other)]
    apart = sum(abs(a - b) for a, b in zip(*scores, strict=True)) / len(scores[0])
    if not apart <= _APART:
        raise EngineError(
            f"its weights are others than those that serve (logprobs of a text differ by {apart:.2f} on average): "
            "push the current weights to it, or start it with the same model",
            retryable=False,
        )


def require_sampled(mode: str, sampling: SamplingParams) -> None:
    """Raise `ConfigError` if logprobs of this mode are not those of what is sampled so."""
    if mode == "raw" and not is_plain(sampling):
        raise ConfigError(
            "the engine gives logprobs from before temperature and truncation, which would make every importance ratio "
            "wrong: start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1 without truncation"
        )


def is_plain(sampling: SamplingParams) -> bool:
    """Whether raw and processed logprobs are the same thing for this run."""
    return sampling.temperature == 1 and sampling.top_p >= 1 and sampling.top_k <= 0


def judge(sampled: Sequence[float], scored: Sequence[float], temperature: float, vocab_size: int | None) -> str:
    """`processed`, `raw`, `unknown` or `wrong`, from logprobs given at `temperature` < 1 and scores at 1.

    With p the probability at 1, the one at T is p^(1/T) / Z, and V^(1 - 1/T) <= Z <= 1 for V tokens. So a processed
    logprob lies between score / T and score / T + (1/T - 1) log V; a raw one equals the score.
    """
    pairs = [(a, s) for a, s in zip(sampled, scored, strict=True) if min(a, s) < -_MEANINGFUL]
    if len(pairs) < 4:
        return "unknown"
    if sum(abs(a - s) for a, s in pairs) / len(pairs) < _NOISE:
        return "raw"
    reach = (1 / temperature - 1) * math.log(vocab_size or 1 << 20)
    fits = all(s / temperature - _SLACK <= a <= min(0.0, s / temperature + reach) + _SLACK for a, s in pairs)
    return "processed" if fits else "wrong"
