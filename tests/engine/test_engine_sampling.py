"""Draws follow the distribution they claim, and each logprob is that distribution's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sandlot.engine import SamplingParams
from sandlot.engine.embedded.sampling import logprobs_of, sample


def claimed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution in float64: temperature, then the k likeliest, then the fewest that sum to p."""
    x = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        keep = np.cumsum(p[order]) - p[order] < params.top_p
        p[order[~keep]] = 0
        p /= p.sum()
    return p


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.8),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=0.5, top_k=4, top_p=0.9),
]


@pytest.mark.parametrize("params", CASES)
def test_draws_follow_the_claimed_distribution(params: SamplingParams) -> None:
    logits = np.array([2.0, 0.0, 1.0, -1.0, 0.5, -3.0], np.float32)
    expected = claimed(logits, params)
    rng, n = np.random.default_rng(0), 20_000
    counts = np.zeros(len(logits))
    for _ in range(n):
        token, logprob, rank = sample(logits, params, rng)
        counts[token] += 1
        assert logprob == pytest.approx(np.log(expected[token]), abs=1e-5)
        assert rank == 1 + int((expected > expected[token]).sum())
    assert counts[expected == 0].sum() == 0
    # Five standard deviations of a binomial share.
    assert np.all(np.abs(counts / n - expected) <= 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9)


def test_two_tokens_at_temperature_seven_tenths() -> None:
    # Raw it would be -0.127; after temperature it is -0.056.
    logits = np.array([2.0, 0.0], np.float32)
    rng = np.random.default_rng(1)
    drawn = {d.token: d.logprob for d in (sample(logits, SamplingParams(temperature=0.7), rng) for _ in range(200))}
    assert drawn[0] == pytest.approx(-0.0558, abs=1e-3)


def test_greedy_takes_the_likeliest_and_gives_the_models_own_logprob() -> None:
    logits = np.array([2.0, 0.0, 3.0], np.float32)
    token, logprob, rank = sample(logits, SamplingParams(temperature=0.0), np.random.default_rng(0))
    assert (token, rank) == (2, 1)
    assert logprob == pytest.approx(np.log(claimed(logits, SamplingParams())[2]), abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(
    logits=hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-90, 90, width=32)),
    temperature=st.floats(0.05, 3),
    top_k=st.integers(-1, 50),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**32),
)
def test_every_draw_has_a_finite_logprob_of_its_own(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    token, logprob, _ = sample(logits, params, np.random.default_rng(seed))
    assert 0 <= token < len(logits)
    assert np.isfinite(logprob)
    assert logprob <= 0


def test_the_very_end_of_the_range_draws_a_token_that_has_weight() -> None:
    class Last:
        def random(self) -> float:
            return 1.0

    logits = np.array([0.0, 1.0, -np.inf, -np.inf], np.float32)
    assert sample(logits, SamplingParams(), Last()).token == 1  # type: ignore[arg-type]


def test_logprobs_of_rows() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 11)).astype(np.float32)
    tokens = np.array([3, 0, 10, 7, 7])
    expected = [np.log(claimed(row, SamplingParams())[t]) for row, t in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(logprobs_of(logits, tokens), expected, atol=1e-6)
