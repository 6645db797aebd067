"""Off-policy corrections per token, with ratios over whole episodes and versions per token. Plain numpy.

Given are the log-probabilities of the same tokens under the weights being trained; what comes back are factors for
the token losses. The denominator of the loss stays as it was: see `sandlot.train.credit.denominator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sandlot.trajectory.sample import Sample

Floats = npt.NDArray[np.float64]
_LARGE = 20.0
"""Log-ratios are bounded by it before they become ratios."""


@dataclass(frozen=True)
class Correction:
    """How a ratio p_train / p_sample becomes the factor of a token's loss.

    level  `token`: the token's own ratio; `episode`: the product over all trained tokens of the *episode*, in whatever
           rows they are; `episode_mean`: the geometric mean of them
    mode   `truncate`: the ratio, at most `high`; `mask`: the ratio where it lies in [low, high], else 0; `keep`: 1
           where it lies in [low, high], else 0
    max_staleness   tokens sampled more than so many weight versions ago get 0
    """

    level: Literal["token", "episode", "episode_mean"] = "token"
    mode: Literal["truncate", "mask", "keep"] = "truncate"
    low: float = 0.0
    high: float = 2.0
    max_staleness: int | None = None

    @classmethod
    def tis(cls, cap: float = 2.0) -> Correction:
        """Truncated importance sampling: min(ratio, cap) per token."""
        return cls("token", "truncate", 0.0, cap)

    @classmethod
    def icepop(cls, low: float = 0.5, high: float = 5.0) -> Correction:
        """IcePop: the ratio per token inside the band, 0 outside."""
        return cls("token", "mask", low, high)

    @classmethod
    def mis(cls, low: float = 0.99, high: float = 1.001) -> Correction:
        """Masked importance sampling: whole episodes are kept or rejected by the geometric mean of their ratios."""
        return cls("episode_mean", "keep", low, high)


@dataclass(frozen=True)
class Factors:
    """Factors by row (float64 [L], 0 off the mask) and what they did."""

    values: list[Floats]
    metrics: dict[str, float]


def correct(
    samples: Sequence[Sample],
    logprobs: Sequence[Floats],
    correction: Correction,
    *,
    version: int | None = None,
) -> Factors:
    """Factors of the token losses of `samples`.

    `logprobs[i]` (float [L], aligned to the token) are those of row i under the weights being trained; only trained
    tokens are read. `version` is the number of these weights, needed for `max_staleness`.
    """
    logs = log_ratios(samples, logprobs)
    masks = [s.loss_mask == 1 for s in samples]
    if correction.level != "token":
        totals: dict[str, tuple[float, int]] = {}
        for sample, log, mask in zip(samples, logs, masks, strict=True):
            sum_, count = totals.get(sample.episode_id, (0.0, 0))
            totals[sample.episode_id] = (sum_ + float(log.sum()), count + int(mask.sum()))
        joined = [
            totals[s.episode_id][0] / (totals[s.episode_id][1] if correction.level == "episode_mean" else 1)
            for s in samples
        ]
        logs = [np.where(mask, value, 0.0) for mask, value in zip(masks, joined, strict=True)]
    values: list[Floats] = []
    for sample, log, mask in zip(samples, logs, masks, strict=True):
        ratio = np.exp(np.clip(log, -_LARGE, _LARGE))
        inside = (ratio >= correction.low) & (ratio <= correction.high)
        factor = {
            "truncate": np.minimum(ratio, correction.high),
            "mask": np.where(inside, ratio, 0.0),
            "keep": inside.astype(np.float64),
        }[correction.mode]
        if correction.max_staleness is not None:
            factor = np.where(staleness(sample, version) <= correction.max_staleness, factor, 0.0)
        values.append(np.where(mask, factor, 0.0))
    return Factors(values, _metrics(samples, logprobs, values))


def log_ratios(samples: Sequence[Sample], logprobs: Sequence[Floats]) -> list[Floats]:
    """log p_train - log p_sample by row, 0 off the mask."""
    found = []
    for sample, new in zip(samples, logprobs, strict=True):
        mask = sample.loss_mask == 1
        if np.shape(new) != mask.shape:
            raise ValueError(f"{np.shape(new)} logprobs for {len(mask)} tokens; give one per token, not shifted")
        if not np.isfinite(np.asarray(new)[mask]).all():
            raise ValueError(f"row {sample.index} of {sample.episode_id!r} has a logprob that is not finite")
        found.append(np.where(mask, np.where(mask, new, 0.0) - sample.logprobs.astype(np.float64), 0.0))
    return found


def staleness(sample: Sample, version: int | None) -> npt.NDArray[np.int64]:
    """How many versions ago each token was sampled (0 off the mask); versions must be whole numbers."""
    if version is None:
        raise ValueError("staleness needs the version of the weights being trained")
    ages = np.zeros(len(sample.tokens), dtype=np.int64)
    for place, text in enumerate(sample.weight_versions):
        if text:
            if not text.removeprefix("-").isdecimal():
                raise ValueError(f"weight version {text!r} is no whole number, so its age is unknown")
            ages[place] = version - int(text)
    if (ages < 0).any():
        raise ValueError(f"a token was sampled by later weights than version {version}")
    return ages


def proximal_logprobs(sample: Sample, logprobs: Floats, version: int) -> Floats:
    """Log-linear stand-in for the logprobs of the policy before this update (decoupled PPO without a forward pass).

    A token sampled `d` versions ago lies (d-1)/d of the way from its own logprob to the current one.
    """
    ages = staleness(sample, version)
    way = np.where(ages > 0, (ages - 1) / np.maximum(ages, 1), 0.0)
    own = sample.logprobs.astype(np.float64)
    return np.where(sample.loss_mask == 1, own + way * (np.asarray(logprobs) - own), 0.0)


def _metrics(samples: Sequence[Sample], logprobs: Sequence[Floats], values: Sequence[Floats]) -> dict[str, float]:
    """Over trained tokens: KL estimates, share masked, mean factor, and the effective share of episodes."""
    logs = [log[s.loss_mask == 1] for s, log in zip(samples, log_ratios(samples, logprobs), strict=True)]
    joined = np.concatenate([*logs, np.zeros(0)])
    factors = np.concatenate([*(v[s.loss_mask == 1] for s, v in zip(samples, values, strict=True)), np.zeros(0)])
    if not len(joined):
        return {}
    by_episode: dict[str, float] = {}
    for sample, log in zip(samples, logs, strict=True):
        by_episode[sample.episode_id] = by_episode.get(sample.episode_id, 0.0) + float(log.sum())
    sums = np.asarray(list(by_episode.values()))
    weights = np.exp(sums - sums.max())
    bounded = np.clip(joined, -_LARGE, _LARGE)
    return {
        "kl_k1": float(-joined.mean()),
        "kl_k3": float((np.expm1(bounded) - bounded).mean()),
        "factor_mean": float(factors.mean()),
        "masked_share": float((factors == 0).mean()),
        "effective_episodes": float(weights.sum() ** 2 / (weights**2).sum() / len(sums)),
    }
