"""An engine in memory that samples from a table, and tells its logprobs truly or wrongly in one way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sandlot.engine import EngineInfo, Generation, SamplingParams, checked
from sandlot.errors import EngineError

VOCAB = 500


class Model:
    """An engine in memory whose logprobs are honest or wrong in one way."""

    def __init__(
        self,
        mode: str,
        sharpness: float = 2.0,
        noise: float = 0.0,
        length: int = 32,
        seed: int = 0,
        version: str = "0",
    ) -> None:
        self.mode, self.noise, self.length, self.version = mode, noise, length, version
        self.rng = np.random.default_rng(seed)
        self.table = self.rng.standard_normal((VOCAB, VOCAB)) * sharpness
        self.refusal: EngineError | None = None

    def _logprobs(self, before: int, temperature: float, top_k: int = -1) -> np.ndarray:
        x = self.table[before] / temperature
        if top_k > 0:
            x = np.where(x < np.sort(x)[-top_k], -np.inf, x)
        return x - x.max() - np.log(np.exp(x - x.max()).sum())

    async def info(self) -> EngineInfo:
        return EngineInfo("memory", "m", 4096, "unknown", self.version, vocab_size=VOCAB)

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
