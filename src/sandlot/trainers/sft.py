"""Supervised fine-tuning on the policy's own episodes: exact ids with masks, the best of each group, filters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sandlot.errors import ConfigError
from sandlot.train.episodes import Episode, abandoned, gather
from sandlot.trainers.base import Export, Exporter, Row, checked, plain_metadata
from sandlot.trainers.spoken import spoken
from sandlot.trajectory.sample import Sample

IGNORED = -100
"""The label that losses leave out."""


@dataclass(frozen=True)
class Selection:
    """Which episodes are worth imitating: reward at least `min_reward`, and of each group the `best_of` best.

    Of equal rewards the shorter wins, then the smaller id. Truncated and abandoned rows are left out, and rows of more
    than `max_tokens`.
    """

    min_reward: float = 1.0
    best_of: int | None = None
    max_tokens: int | None = None
    branches: tuple[str, ...] | None = None

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        groups: dict[str, list[Episode]] = {}
        for episode in gather(samples):
            reward = episode.outcome.reward
            if reward is not None and reward >= self.min_reward:
                groups.setdefault(episode.outcome.group_id, []).append(episode)
        chosen = [
            episode
            for members in groups.values()
            for episode in sorted(members, key=_rank)[: self.best_of or len(members)]
        ]
        return [row for episode in chosen for row in episode.rows if self._keeps(row)]

    def _keeps(self, row: Sample) -> bool:
        return (
            row.status == "completed"
            and not abandoned(row)
            and (self.max_tokens is None or len(row.tokens) <= self.max_tokens)
            and (self.branches is None or row.branch in self.branches)
        )


def _rank(episode: Episode) -> tuple[float, int, str]:
    return -(episode.outcome.reward or 0.0), episode.trained, episode.outcome.episode_id


def labelled(s: Sample) -> Row:
    """Ids, labels (-100 off the mask) and mask, aligned to the token: models shift labels themselves."""
    return {
        "input_ids": s.tokens.tolist(),
        "labels": np.where(s.loss_mask == 1, s.tokens, IGNORED).tolist(),
        "attention_mask": [1] * len(s.tokens),
        "loss_mask": s.loss_mask.tolist(),
        "reward": s.reward,
        "metadata": plain_metadata(s),
    }


def segments(s: Sample, decode: Callable[[list[int]], str]) -> list[Row]:
    """The row as alternating pieces of text, `label` true where it is trained (the template-free form).

    Text encodes back to other ids at some borders; `input_ids` is what was really said.
    """
    found, at = [], 0
    for span in s.spans:
        end = span.start + span.length
        if span.start > at:
            found.append({"label": False, "text": decode(s.tokens[at : span.start].tolist())})
        found.append({"label": True, "text": decode(s.tokens[span.start : end].tolist())})
        at = end
    return found


def rows(export: Export) -> Iterator[Row]:
    """Labelled rows of the selected episodes, with `segments` and `messages` where the model directory is known."""
    select = _selection(export)
    fmt = export.format()
    for samples in export.groups():
        for s in checked(select(samples), credit=False):
            row = labelled(s)
            if fmt is not None:
                row |= {"segments": segments(s, fmt.decode), "messages": spoken(s, fmt)}
            yield row


def _selection(export: Export) -> Selection:
    options = export.options
    try:
        min_reward = float(options.get("min_reward", 1.0))
    except ValueError:
        raise ConfigError(f"option min_reward is {options['min_reward']!r}, no number") from None
    return Selection(
        min_reward=min_reward,
        best_of=export.integer("best_of"),
        max_tokens=export.integer("max_tokens"),
        branches=tuple(options["branches"].split(",")) if "branches" in options else None,
    )


EXPORTER = Exporter(
    "supervised rows: ids, labels, masks, and text where the model is known",
    rows,
    options={
        "min_reward": "imitate episodes with at least this reward (default 1)",
        "best_of": "of each group take the so many best",
        "max_tokens": "leave out rows of more tokens",
        "branches": "only these branches, with commas between (main,side)",
    },
)
