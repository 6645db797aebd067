"""The probe tells raw from processed logprobs, and neither from nonsense, on sharp, flat and noisy models."""

from __future__ import annotations

import pytest

from sandlot.engine import SamplingParams
from sandlot.engine.probe import judge, probe, require_alike
from sandlot.errors import ConfigError, EngineError, EngineEvidenceError
from support.sampling_model import Model

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


async def test_other_weights_under_the_same_name_are_told_by_how_they_score_a_text() -> None:
    text = list(range(100, 120))
    await require_alike(Model("processed", noise=0.02), Model("processed", noise=0.02), text)
    with pytest.raises(EngineError, match=r"its weights are others.*push the current weights"):
        await require_alike(Model("processed", seed=1), Model("processed"), text)
    await require_alike(Model("processed", seed=1, version="1"), Model("processed"), text)
