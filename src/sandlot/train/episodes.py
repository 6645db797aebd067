"""Rows put back together into the episodes they came from: the unit that is compared, weighed and counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandlot.errors import FailureKind, SandlotError
from sandlot.trajectory.sample import Sample


class CreditError(SandlotError):
    """Rows contradict each other, so no credit can be given."""


@dataclass(frozen=True)
class Outcome:
    """How an episode ended, also one that left no row. `reward` None is ungraded."""

    episode_id: str
    group_id: str
    reward: float | None
    failure: FailureKind | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Outcome:
        """The outcome that a row of `results.jsonl` tells."""
        failure = FailureKind(row["failure"]) if row["failure"] else None
        return cls(row["episode_id"], row["group_id"], row["reward"], failure)

    @property
    def excluded(self) -> str:
        """Why the episode says nothing about the policy; empty when it does."""
        if self.failure is not None and not self.failure.trainable:
            return str(self.failure)
        return "ungraded" if self.reward is None else ""


@dataclass(frozen=True)
class Episode:
    """One attempt with its rows in the order of their `index`; none when nothing of it can be trained."""

    outcome: Outcome
    rows: tuple[Sample, ...] = ()

    @property
    def trained(self) -> int:
        """Tokens trained in all its rows."""
        return sum(trained_tokens(row) for row in self.rows)


def abandoned(sample: Sample) -> bool:
    """Whether the row ends with an answer whose prompt was answered a second time and continued from there."""
    return bool(sample.metadata.get("abandoned"))


def trained_tokens(sample: Sample) -> int:
    return int(np.count_nonzero(sample.loss_mask))


def gather(samples: Iterable[Sample], outcomes: Iterable[Outcome] = ()) -> list[Episode]:
    """Episodes by first appearance, whatever the order of the rows.

    Raises `CreditError` when rows of one episode name different rewards or groups, when two rows have the same
    index, or when an outcome says something else than the rows.
    """
    rows: dict[str, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.episode_id, []).append(sample)
    told: dict[str, Outcome] = {}
    for outcome in outcomes:
        if told.setdefault(outcome.episode_id, outcome) != outcome:
            raise CreditError(f"episode {outcome.episode_id!r} is told twice, with different outcomes")
    episodes: list[Episode] = []
    for episode_id, own in rows.items():
        first = own[0]
        for row in own[1:]:
            if row.reward != first.reward:
                raise CreditError(
                    f"rows of episode {episode_id!r} have the rewards {first.reward!r} and {row.reward!r}; "
                    "siblings share the reward of their episode"
                )
            if row.group_id != first.group_id:
                raise CreditError(
                    f"rows of episode {episode_id!r} are in the groups {first.group_id!r} and {row.group_id!r}; "
                    "episode ids are unique in a batch"
                )
        own.sort(key=lambda row: row.index)
        for before, row in itertools.pairwise(own):
            if before.index == row.index:
                raise CreditError(f"episode {episode_id!r} has two rows with the index {row.index}")
        known = told.pop(episode_id, Outcome(episode_id, first.group_id, first.reward))
        if (known.group_id, known.reward) != (first.group_id, first.reward):
            raise CreditError(
                f"the rows of episode {episode_id!r} say {first.group_id!r} and reward {first.reward!r}, "
                f"its outcome says {known.group_id!r} and {known.reward!r}"
            )
        episodes.append(Episode(known, tuple(own)))
    return episodes + [Episode(outcome) for outcome in told.values()]
