"""Advantages of the episodes of one group from their rewards. Plain numpy; one number per episode, never per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Rewards = npt.NDArray[np.float64]
Estimator = Literal[
    "grpo", "grpo_nostd", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "max_at_k", "none"
]

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def grpo(rewards: Rewards) -> Rewards:
    """(r - mean) / (std + 1e-6), the sample standard deviation of the group; 0 where all are equal."""
    centred = grpo_nostd(rewards)
    if len(rewards) < 2:
        return centred
    return np.asarray(centred / (_deviation(centred) + EPSILON))


def grpo_nostd(rewards: Rewards) -> Rewards:
    """r - mean: GRPO without the division, which Dr. GRPO drops because it favours easy and hard groups."""
    if len(rewards) == 0 or np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)  # exactly: a mean of equal numbers need not be that number
    return np.asarray(rewards - _mean(rewards))


def rloo(rewards: Rewards) -> Rewards:
    """r - mean of the others of the group."""
    count = len(rewards)
    return np.zeros_like(rewards) if count < 2 else np.asarray(grpo_nostd(rewards) * (count / (count - 1)))


def max_at_k(rewards: Rewards, k: int) -> Rewards:
    """What an attempt adds to the best of k: mean over all sets of k attempts that hold it, of max(set) - max(rest).

    Unbiased for the gradient of E[max of k] up to the constant k. With fewer than k graded attempts k is their
    number; k = 1 is `rloo`.
    """
    count = len(rewards)
    k = min(k, count)
    if k < 2:
        return rloo(rewards)
    gains = np.zeros_like(rewards)
    below = np.arange(count - 1)
    # Of the other attempts in ascending order, the one at place m is the best of k-1 drawn with C(m, k-2)/C(n-1, k-1).
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count)))])
    chosen = below >= k - 2
    m = below[chosen]
    log_ways = logs[m] - logs[k - 2] - logs[m - (k - 2)]
    log_total = logs[count - 1] - logs[k - 1] - logs[count - k]
    chances = np.zeros(count - 1)
    chances[chosen] = np.exp(log_ways - log_total)
    for i in range(count):
        others = np.sort(np.delete(rewards, i))
        gains[i] = np.sum(chances * np.maximum(0.0, rewards[i] - others))
    return gains


def advantages(groups: Mapping[str, Sequence[float]], estimator: Estimator, *, k: int = 4) -> dict[str, list[float]]:
    """Advantages by group, in the order of the rewards given; a group of one gets 0.

    All but `reinforce_pp*` look at nothing but the group itself. `reinforce_pp` whitens the rewards of the whole batch,
    `reinforce_pp_baseline` centres in the group and divides by the deviation of the batch.
    """
    arrays = {name: np.asarray(rewards, dtype=np.float64) for name, rewards in groups.items()}
    for name, rewards in arrays.items():
        if not np.isfinite(rewards).all():
            raise ValueError(f"group {name!r} has a reward that is no finite number; leave ungraded episodes out")
    if estimator in ("reinforce_pp", "reinforce_pp_baseline"):
        centred = arrays if estimator == "reinforce_pp" else {n: grpo_nostd(r) for n, r in arrays.items()}
        return _whitened(centred, centre=estimator == "reinforce_pp")
    functions: dict[str, Callable[[Rewards], Rewards]] = {
        "grpo": grpo,
        "grpo_nostd": grpo_nostd,
        "dr_grpo": grpo_nostd,
        "rloo": rloo,
        "max_at_k": lambda rewards: max_at_k(rewards, k),
        "none": lambda rewards: rewards,
    }
    return {name: functions[estimator](rewards).tolist() for name, rewards in arrays.items()}


def _whitened(groups: Mapping[str, Rewards], *, centre: bool) -> dict[str, list[float]]:
    """Divide by the deviation over all episodes of the batch, centring first if asked."""
    joined = np.concatenate([*groups.values(), np.zeros(0)])
    if len(joined) < 2 or np.all(joined == joined[0]):
        return {name: [0.0] * len(rewards) for name, rewards in groups.items()}
    shift = _mean(joined) if centre else 0.0
    scale = _deviation(joined) + EPSILON
    return {name: ((rewards - shift) / scale).tolist() for name, rewards in groups.items()}


def _mean(values: Rewards) -> float:
    """The same to the last bit in whatever order the values come."""
    return float(np.sort(values).mean())


def _deviation(values: Rewards) -> float:
    """The sample standard deviation, as independent of the order."""
    return float(np.sort(values).std(ddof=1))
