"""The probe tells raw from processed logprobs, and neither from nonsense, on sharp, flat and noisy models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sandlot.engine import EngineInfo, Generation, SamplingParams, checked
from sandlot.engine.probe import judge, probe
from sandlot.errors import ConfigError, EngineError, EngineEvidenceError

VOCAB = 500


class Model:
    """An engine in memory whose logprobs are honest or wrong in one way."""

    def __init__(self, mode: str, sharpness: float = 2.0, noise: float = 0.0, length: int = 32, seed: int = 0) -> None:
        self.mode, self.noise, self.length = mode, noise, length
        self.rng = np.random.default_rng(seed)
        self.table = self.rng.standard_normal((VOCAB, VOCAB)) * sharpness
        self.refusal: EngineError | None = None

    def _logprobs(self, before: int, temperature: float, top_k: int = -1) -> np.ndarray:
        x = self.table[before] / temperature
        if top_k > 0:
            x = np.where(x < np.sort(x)[-top_k], -np.inf, x)
        return x - x.max() - np.log(np.exp(x - x.max()).sum())

    async def info(self) -> EngineInfo:
        return EngineInfo("memory", "m", 4096, "unknown", vocab_size=VOCAB)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        ids, values, before = [], [], prompt_ids[-1]
        for _ in range(min(self.length, sampling.max_tokens or 1)):
            drawn = self._logprobs(before, sampling.temperature, sampling.top_k)
            token = int(self.rng.choice(VOCAB, p=np.exp(drawn)))
            raw = self._logprobs(before, 1.0)[token]
            told = {"raw": raw, "untruncated": self._logprobs(before, sampling.temperature)[token]}
            values.append(float(told.get(self.mode, drawn[token])))
            ids.append(token)
            before = token
        if self.mode == "shifted":
            values = [*values[1:], values[0]]
        if self.mode == "constant":
            values = [-0.01] * len(values)
        if self.mode == "positive entropy":
            values = [3 * v - 1 for v in values]
        if self.mode == "logits":
            return checked(Generation(tuple(ids), tuple(9 + v for v in values), "length"), logprob_ids=ids)
        values = [min(v + self.noise * float(self.rng.standard_normal()), 0.0) for v in values]
        return Generation(tuple(ids), tuple(values), "length")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        if self.refusal is not None:
            raise self.refusal
        pairs = itertools.pairwise(token_ids)
        return [float(self._logprobs(a, 1.0)[b] + self.noise * self.rng.standard_normal()) for a, b in pairs]

    async def close(self) -> None: ...


WARM = SamplingParams(temperature=0.7)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("sharpness", [1.0, 2.0, 4.0])
async def test_honest_engines_are_told_apart(sharpness: float, noise: float, seed: int) -> None:
    for mode in ("processed", "raw"):
        assert await probe(Model(mode, sharpness, noise, seed=seed), SamplingParams()) == mode


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["shifted", "constant", "positive entropy"])
async def test_logprobs_that_fit_nothing_are_refused(mode: str, seed: int) -> None:
    with pytest.raises(EngineEvidenceError, match="neither"):
        await probe(Model(mode, 3.0, seed=seed), SamplingParams())


async def test_logits_are_no_logprobs_and_the_cure_is_said() -> None:
    with pytest.raises(
        EngineEvidenceError, match=r"the logprob at position \d+ is .*--logprobs-mode processed_logprobs"
    ):
        await probe(Model("logits"), SamplingParams())


@pytest.mark.parametrize("sampling", [WARM, SamplingParams(top_p=0.9), SamplingParams(top_k=50)])
async def test_raw_logprobs_are_refused_where_they_would_be_wrong(sampling: SamplingParams) -> None:
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        await probe(Model("raw"), sampling)
    assert await probe(Model("processed"), sampling) == "processed"


@pytest.mark.parametrize("sampling", [SamplingParams(top_p=0.9), SamplingParams(top_k=50, temperature=0.7)])
async def test_logprobs_from_before_truncation_are_refused_where_the_run_truncates(sampling: SamplingParams) -> None:
    with pytest.raises(ConfigError, match="sample without truncation"):
        await probe(Model("untruncated"), sampling)
    assert await probe(Model("untruncated"), WARM) == "processed"
    assert await probe(Model("processed", noise=0.01), sampling) == "processed"


async def test_short_answers_are_repeated_until_there_is_enough() -> None:
    assert await probe(Model("raw", length=6), SamplingParams()) == "raw"


async def test_what_cannot_be_told_is_unknown() -> None:
    certain = Model("processed", sharpness=200.0)
    assert await probe(certain, WARM) == "unknown"
    assert judge([], [], 0.7, None) == "unknown"


@pytest.mark.parametrize("why", [EngineEvidenceError("none of 64"), EngineError("answered 400", retryable=False)])
async def test_an_engine_that_scores_nothing_is_taken_only_where_both_modes_are_one(why: EngineError) -> None:
    for mode in ("processed", "raw"):
        silent = Model(mode)
        silent.refusal = why
        assert await probe(silent, SamplingParams()) == "unknown"
        for sampling in (WARM, SamplingParams(top_p=0.9)):
            with pytest.raises(ConfigError, match=r"cannot be told.*temperature 1 without truncation"):
                await probe(silent, sampling)
    busy = Model("processed")
    busy.refusal = EngineError("did not answer in time")
    with pytest.raises(EngineError, match="in time"):
        await probe(busy, SamplingParams())
