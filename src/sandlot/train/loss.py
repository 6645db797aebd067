"""The policy loss that credit is meant for: a reference in plain numpy, value and gradient, to hold trainers to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sandlot.train.credit import denominator
from sandlot.train.offpolicy import Correction, correct, log_ratios
from sandlot.train.turns import token_advantages
from sandlot.trajectory.sample import Sample

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Loss:
    """`value` of a batch; `gradients` by row: d value / d logprob of each token (float64 [L])."""

    value: float
    gradients: list[Floats]
    metrics: dict[str, float]


def policy_loss(
    samples: Sequence[Sample],
    logprobs: Sequence[Floats],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    correction: Correction | None = None,
    version: int | None = None,
) -> Loss:
    """Clipped policy-gradient loss of credited rows, `sum(w * f * l) / sum(w)`.

    With a `correction` its factors f take the place of the importance ratio and the gradient is plain -A; without one
    the ratio to the sampling policy is clipped as in PPO. `logprobs[i]` are float [L], aligned to the token.
    """
    total = denominator(samples)
    if total == 0:
        raise ValueError("no trained token has a weight, so there is no loss")
    ratios = [np.exp(np.clip(log, -20, 20)) for log in log_ratios(samples, logprobs)]
    factors = correct(samples, logprobs, correction, version=version) if correction else None
    value, gradients = 0.0, []
    for k, sample in enumerate(samples):
        mask = sample.loss_mask == 1
        advantage = token_advantages(sample).astype(np.float64)
        weight = np.where(mask, sample.loss_weight, 0.0) / total
        if factors is not None:
            scale = weight * factors.values[k] * -advantage
            value += float(np.sum(scale * np.where(mask, logprobs[k], 0.0)))
            gradients.append(scale)
            continue
        plain = ratios[k] * advantage
        bounded = np.clip(ratios[k], 1 - clip_low, 1 + clip_high) * advantage
        value -= float(np.sum(weight * np.minimum(plain, bounded)))
        gradients.append(np.where(plain <= bounded, -weight * plain, 0.0))
    return Loss(value, gradients, factors.metrics if factors else {})
