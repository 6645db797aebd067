"""Credit: advantages over the episodes of a group, and a loss weight for every trained token.

An episode is one attempt, however many rows it became. The loss to compute is `sum(w * l) / sum(w)` over the trained
tokens of a batch, with `w` the row's `loss_weight`, `l` the token's loss with its advantage, and the denominator taken
before any off-policy mask (`denominator`). Results do not depend on how an episode is cut into rows, on the order of
rows, or (batch-wide estimators aside) on other groups of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from sandlot.errors import ConfigError
from sandlot.train.advantage import Estimator, advantages
from sandlot.train.episodes import CreditError, Episode, Outcome, abandoned, gather, trained_tokens
from sandlot.train.overlong import cut_overlong
from sandlot.train.turns import SPAN_ADVANTAGES, discounts, returns_to_go, with_span_advantages
from sandlot.trajectory.sample import Sample

__all__ = ["CreditConfig", "CreditError", "Credited", "Outcome", "credit", "credit_groups", "denominator"]

Weights = Literal["per_episode", "per_token", "per_sample"]
Branches = Literal["all", "main_only", "by_share", "turn_discount", "turn_rewards"]


@dataclass(frozen=True)
class CreditConfig:
    """How credit is given.

    estimator   how rewards of a group become advantages; see `sandlot.train.advantage`
    weights     what a trained token weighs: 1/trained tokens of its episode, 1, or 1/trained tokens of its row
    branches    who gets the episode's advantage: `all` rows; `main_only`; every branch `by_share` of the trained
                tokens; all, but discounted by `gamma` for each later turn of the branch (`turn_discount`); all, plus
                the returns-to-go of given per-turn rewards (`turn_rewards`)
    abandoned   rows whose prompt was answered a second time and continued from there: `drop` or `train`
    single      the only graded episode of a group: advantage `zero`, or `drop`
    uniform     a group of several episodes with equal rewards: `keep` (advantage 0) or `drop` (DAPO)
    truncated   branches that ended at a limit: `train` or `drop` (DAPO's overlong filter)
    max_tokens  rows beyond it are cut at whole turns first
    k           of `max_at_k`
    """

    estimator: Estimator = "grpo"
    weights: Weights = "per_episode"
    branches: Branches = "all"
    abandoned: Literal["drop", "train"] = "drop"
    single: Literal["zero", "drop"] = "zero"
    uniform: Literal["keep", "drop"] = "keep"
    truncated: Literal["train", "drop"] = "train"
    max_tokens: int | None = None
    gamma: float = 1.0
    k: int = 4

    def __post_init__(self) -> None:
        if not 0.0 < self.gamma <= 1.0:
            raise ConfigError(f"gamma is {self.gamma}; it must be in (0, 1]")
        if self.k < 1:
            raise ConfigError(f"k is {self.k}; it must be at least 1")

    @classmethod
    def dapo(cls, **changes: object) -> CreditConfig:
        """DAPO: groups without a signal and truncated rows are left out, every token weighs the same."""
        return replace(cls(weights="per_token", uniform="drop", truncated="drop"), **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Credited:
    """Credited rows in the order they came; why each episode that is not among them is left out; counts."""

    samples: list[Sample]
    dropped: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict)


def credit(
    samples: Iterable[Sample],
    config: CreditConfig | None = None,
    *,
    outcomes: Iterable[Outcome] = (),
    turn_rewards: Mapping[str, float] | None = None,
) -> Credited:
    """New rows with `advantage` and `loss_weight`.

    `outcomes` adds episodes that left no row (their reward still belongs into the baseline) and failures: what is
    ungraded or not the policy's doing is outside baseline and denominator. `turn_rewards` are by turn id, for
    `branches="turn_rewards"`. Raises `CreditError` when siblings contradict each other.
    """
    config = config or CreditConfig()
    episodes, rows = _episodes(samples, outcomes, config)
    return _credit(episodes, rows, _standing([e.outcome for e in episodes], config), config, turn_rewards or {})


def credit_groups(
    groups: Iterable[Sequence[Sample]],
    config: CreditConfig | None = None,
    *,
    outcomes: Iterable[Outcome],
    turn_rewards: Mapping[str, float] | None = None,
) -> Iterator[Credited]:
    """What `credit` gives, with the rows of one group in memory at a time; each comes whole and once.

    `outcomes` tell of every episode of the batch. Those whose group has no row are in what comes last.
    """
    config = config or CreditConfig()
    told: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        told.setdefault(outcome.group_id, []).append(outcome)
    standing = _standing([o for members in told.values() for o in members], config)
    for samples in groups:
        episodes, rows = _episodes(samples, told.pop(samples[0].group_id, ()), config)
        yield _credit(episodes, rows, standing, config, turn_rewards or {})
    silent = [Episode(o) for members in told.values() for o in members]
    yield _credit(silent, [], standing, config, turn_rewards or {})


def denominator(samples: Sequence[Sample]) -> float:
    """What the summed, weighted token losses of a batch are divided by: the sum of all token weights.

    Episodes, tokens or rows, by the policy of the weights. Take it from the rows before any token is rejected.
    """
    return float(sum(s.loss_weight * trained_tokens(s) for s in samples))


@dataclass(frozen=True)
class _Standing:
    """What follows from the outcomes of a batch alone: advantage by episode, and why an episode is left out."""

    advantages: Mapping[str, float]
    left_out: Mapping[str, str]


def _standing(outcomes: Sequence[Outcome], config: CreditConfig) -> _Standing:
    left_out = {o.episode_id: o.excluded for o in outcomes if o.excluded}
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if not outcome.excluded:
            groups.setdefault(outcome.group_id, []).append(outcome)
    rewards = {name: [float(o.reward or 0.0) for o in members] for name, members in groups.items()}
    values = advantages(rewards, config.estimator, k=config.k)
    compared = config.estimator not in ("reinforce_pp", "none")
    found: dict[str, float] = {}
    for name, members in groups.items():
        alone = compared and len(members) == 1
        uniform = len(set(rewards[name])) == 1
        for outcome, value in zip(members, values[name], strict=True):
            found[outcome.episode_id] = 0.0 if alone else value
            if alone and config.single == "drop":
                left_out[outcome.episode_id] = "the only graded episode of its group"
            elif not alone and uniform and config.uniform == "drop":
                left_out[outcome.episode_id] = "all rewards of its group are equal"
    return _Standing(found, left_out)


def _episodes(
    samples: Iterable[Sample], outcomes: Iterable[Outcome], config: CreditConfig
) -> tuple[list[Episode], list[Sample]]:
    """Episodes with their rows, cut if that is wanted, and the rows in the order they came."""
    given, told = list(samples), list(outcomes)
    if config.max_tokens is not None:
        known = {outcome.episode_id for outcome in told}
        # Taken before cutting: an episode that loses all rows keeps its place in the baseline.
        told += [e.outcome for e in gather(given) if e.outcome.episode_id not in known]
        given = cut_overlong(given, config.max_tokens)
    return gather(given, told), given


def _credit(
    episodes: Sequence[Episode],
    given: Sequence[Sample],
    standing: _Standing,
    config: CreditConfig,
    turn_rewards: Mapping[str, float],
) -> Credited:
    dropped: dict[str, str] = {}
    rows: dict[tuple[str, int], Sample] = {}
    for episode in episodes:
        episode_id = episode.outcome.episode_id
        kept = _kept(episode.rows, config)
        if why := standing.left_out.get(episode_id) or ("" if kept else "no row left to train"):
            dropped[episode_id] = why
            continue
        if episode_id not in standing.advantages:
            raise CreditError(f"episode {episode_id!r} has rows, and no outcome tells how it ended")
        for row in _credited(kept, standing.advantages[episode_id], config, turn_rewards):
            rows[episode_id, row.index] = row
    out = [rows[key] for s in given if (key := (s.episode_id, s.index)) in rows]
    return Credited(out, dropped, _metrics(episodes, out, dropped))


def _kept(rows: Sequence[Sample], config: CreditConfig) -> list[Sample]:
    """The rows of an episode that are trained."""
    rows = [row for row in rows if config.abandoned == "train" or not abandoned(row)]
    cut = {row.branch for row in rows if row.status == "truncated"} if config.truncated == "drop" else set()
    return [
        row
        for row in rows
        if trained_tokens(row) and row.branch not in cut and (config.branches != "main_only" or row.branch == "main")
    ]


def _credited(
    rows: Sequence[Sample], advantage: float, config: CreditConfig, turn_rewards: Mapping[str, float]
) -> list[Sample]:
    """The kept rows of one episode with advantage and weight."""
    total = sum(trained_tokens(row) for row in rows)
    shares: dict[str, float] = {}
    for row in rows:
        shares[row.branch] = shares.get(row.branch, 0.0) + trained_tokens(row) / total
    factors = discounts(rows, config.gamma) if config.branches == "turn_discount" else {}
    returns = returns_to_go(rows, turn_rewards, config.gamma) if config.branches == "turn_rewards" else {}
    credited = []
    for row in rows:
        weight = {"per_episode": 1.0 / total, "per_token": 1.0, "per_sample": 1.0 / trained_tokens(row)}
        metadata = {k: v for k, v in row.metadata.items() if k != SPAN_ADVANTAGES}
        row = replace(row, loss_weight=weight[config.weights], metadata=metadata)
        if config.branches == "by_share":
            row = replace(row, advantage=advantage * shares[row.branch])
        elif config.branches == "turn_discount":
            row = with_span_advantages(row, [advantage * factors[span.turn_id] for span in row.spans])
        elif config.branches == "turn_rewards":
            row = with_span_advantages(row, [advantage + returns[span.turn_id] for span in row.spans])
        else:
            row = replace(row, advantage=advantage)
        credited.append(row)
    return credited


def _metrics(episodes: Sequence[Episode], rows: Sequence[Sample], dropped: Mapping[str, str]) -> dict[str, float]:
    rewards = [e.outcome.reward for e in episodes if not e.outcome.excluded and e.outcome.reward is not None]
    return {
        "episodes": float(len({r.episode_id for r in rows})),
        "episodes_graded": float(len(rewards)),
        "episodes_dropped": float(len(dropped)),
        "rows": float(len(rows)),
        "trained_tokens": float(sum(trained_tokens(r) for r in rows)),
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "advantage_abs_mean": float(np.mean([abs(r.advantage or 0.0) for r in rows])) if rows else 0.0,
    }
