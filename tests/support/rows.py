"""Rows for the credit and trainer tests: episodes of any shape, and cutting them into more rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sandlot.train.turns import only_spans
from sandlot.trajectory.sample import Sample, Span


def make_row(
    episode: str = "e",
    group: str = "g",
    *,
    turns: Sequence[tuple[int, int]] = ((3, 2), (2, 3)),
    index: int = 0,
    reward: float | None = 1.0,
    branch: str = "main",
    version: str = "0",
    first_turn: int = 0,
    seed: int = 0,
    **fields: Any,
) -> Sample:
    """A row of turns given as (context tokens, sampled tokens); ids and logprobs differ from place to place."""
    random = np.random.default_rng([seed, index, *episode.encode(), *branch.encode()])
    mask: list[int] = []
    spans: list[Span] = []
    for number, (context, sampled) in enumerate(turns):
        mask += [0] * context
        spans.append(Span(len(mask), f"{episode}-{branch}-{index}-{first_turn + number}", 0, sampled))
        mask += [1] * sampled
    loss_mask = np.asarray(mask, dtype=np.uint8)
    return Sample(
        episode_id=episode,
        group_id=group,
        index=index,
        branch=branch,
        tokens=random.integers(1, 30_000, len(mask)).astype(np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask == 1, -random.random(len(mask)) * 2 - 0.01, 0).astype(np.float32),
        weight_versions=tuple(version if m else "" for m in mask),
        spans=tuple(spans),
        prompt_length=turns[0][0],
        reward=reward,
        **fields,
    )


def split_row(row: Sample, after: int) -> list[Sample]:
    """The same trained tokens in two rows: the first ends after `after` spans, the second has these as context."""
    if not 0 < after < len(row.spans):
        return [row]
    later = only_spans(row, row.spans[after:])
    return [replace(only_spans(row, row.spans[:after]), status="completed"), later]


def renumbered(rows: Sequence[Sample]) -> list[Sample]:
    """Rows with indices by their order within each episode."""
    counts: dict[str, int] = {}
    out = []
    for row in rows:
        index = counts.get(row.episode_id, 0)
        counts[row.episode_id] = index + 1
        out.append(replace(row, index=index))
    return out


_turns = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)
_rewards = st.sampled_from((0.0, 1.0, 0.25, 0.5, 1 / 3))


@st.composite
def batches(draw: st.DrawFn, prefix: str = "g") -> list[Sample]:
    """Groups of episodes, each of one to three rows in several branches, some ungraded, abandoned or truncated."""
    rows: list[Sample] = []
    for group in range(draw(st.integers(1, 3))):
        for attempt in range(draw(st.integers(1, 4))):
            reward = draw(st.one_of(_rewards, _rewards, _rewards, st.none()))
            for index in range(draw(st.integers(1, 3))):
                branch = "main" if index == 0 else draw(st.sampled_from(("main", "subagent:a", "side")))
                rows.append(
                    make_row(
                        f"{prefix}{group}-{attempt}",
                        f"{prefix}{group}",
                        turns=draw(_turns),
                        index=index,
                        reward=reward,
                        branch=branch,
                        version=str(draw(st.integers(0, 3))),
                        status=draw(st.sampled_from(("completed", "completed", "truncated"))),
                        metadata={"abandoned": True} if index and draw(st.booleans()) else {},
                    )
                )
    return rows
