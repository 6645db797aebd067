"""Sampling one token from logits, with its log-probability under the very distribution it was drawn from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sandlot.engine.base import SamplingParams

Array = NDArray[np.float32]


class Sampled(NamedTuple):
    """`rank` is 1 for the most likely token."""

    token: int
    logprob: float
    rank: int


def sample(logits: Array, params: SamplingParams, rng: np.random.Generator) -> Sampled:
    """Draw from `logits` after temperature, then top-k, then top-p, as vLLM orders them.

    At temperature 0 the most likely token is taken, and the logprob is the model's own (temperature 1), as vLLM
    gives it: there is no distribution that was drawn from.
    """
    if params.temperature == 0:
        token = int(logits.argmax())
        return Sampled(token, float(logprobs_of(logits[None], np.array([token]))[0]), 1)
    scaled = logits / np.float32(params.temperature) if params.temperature != 1 else logits
    if 0 < params.top_k < len(scaled):
        kth = np.partition(scaled, -params.top_k)[-params.top_k]
        scaled = np.where(scaled < kth, np.float32(-np.inf), scaled)
    if params.top_p < 1:
        scaled = _nucleus(scaled, params.top_p)
    top = scaled.max()
    weights = np.exp(scaled - top)
    cumulative = np.cumsum(weights, dtype=np.float64)
    token = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    # Rounding can put the draw on the very end, past the last token that has any weight.
    token = min(token, int(np.flatnonzero(weights)[-1])) if token >= len(weights) else token
    logprob = float(scaled[token]) - float(top) - float(np.log(cumulative[-1]))
    return Sampled(token, min(logprob, 0.0), 1 + int(np.count_nonzero(scaled > scaled[token])))


def _nucleus(scaled: Array, top_p: float) -> Array:
    """Keep the fewest most likely tokens whose probabilities sum to at least `top_p`."""
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order] - scaled[order[0]], dtype=np.float64)
    before = np.cumsum(weights) - weights
    kept = order[before < top_p * weights.sum()]
    result = np.full_like(scaled, -np.inf)
    result[kept] = scaled[kept]
    return result


def logprobs_of(logits: Array, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """The temperature-1 log-probability of one token per row."""
    top = logits.max(axis=-1)
    total = np.exp(logits - top[:, None]).sum(axis=-1, dtype=np.float64)
    chosen = logits[np.arange(len(logits)), tokens].astype(np.float64)
    result: NDArray[np.float64] = chosen - top - np.log(total)
    return result
