"""TRL: rows of an `AsyncGRPOTrainer` rollout worker, and what `rollout_func` can and cannot take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sandlot.train.episodes import trained_tokens
from sandlot.trainers.base import (
    Export,
    Exporter,
    Numbers,
    Row,
    TrainerDataError,
    checked,
    mean_weights,
    whole_versions,
)
from sandlot.trajectory.sample import Sample

FIELDS = (
    "prompt",
    "completion",
    "input_ids",
    "completion_mask",
    "old_log_probs",
    "advantage",
    "model_version",
    "group_id",
    "metrics",
    "enqueued_at",
)


def rollout_samples(
    samples: Sequence[Sample], *, group_ids: Numbers | None = None, token_budget: int | None = None
) -> list[Row]:
    """The fields of `RolloutSample`, one per row of credited samples.

    The trainer weighs tokens equally and takes one advantage per row, so the advantage carries the weight: times
    `loss_weight` and the mean number of trained tokens per episode of the group, which leaves the advantage as it is
    where all episodes are equally long. `model_version` is the oldest of the row's tokens, so that staleness is never
    understated.
    """
    rows = checked(samples, credit=True, per_turn=False)
    group_ids = Numbers() if group_ids is None else group_ids
    scales = mean_weights(rows)
    found: list[Row] = []
    for s in rows:
        found.append(
            {
                "prompt": [],
                "completion": [],
                "input_ids": s.tokens.astype(np.int64),
                "completion_mask": s.loss_mask.astype(np.int64),
                "old_log_probs": s.logprobs.astype(np.float32),
                "advantage": float(s.advantage or 0.0) * s.loss_weight * scales[s.group_id],
                "model_version": min(v for v in whole_versions(s, -1) if v >= 0),
                "group_id": group_ids[s.group_id],
                "metrics": {"reward": float(s.reward or 0.0), "trained_tokens": float(trained_tokens(s))},
                "enqueued_at": None,
            }
        )
    validate(found, token_budget=token_budget)
    return found


def validate(
    rows: Sequence[Row],
    *,
    token_budget: int | None = None,
    model_version: int | None = None,
    max_staleness: int | None = None,
) -> None:
    """Refuse what the trainer would drop without a word or train wrongly."""
    for number, row in enumerate(rows):
        count = len(row["input_ids"])
        for name in ("completion_mask", "old_log_probs"):
            if len(row[name]) != count:
                raise TrainerDataError(f"row {number}: {len(row[name])} {name} for {count} tokens")
        mask = np.asarray(row["completion_mask"])
        if not mask.any() or mask[0]:
            raise TrainerDataError(f"row {number} trains nothing, or its first token, which nothing predicts")
        if np.any(np.asarray(row["old_log_probs"])[mask == 0] != 0):
            raise TrainerDataError(f"row {number} has a logprob where nothing was sampled")
        if not math.isfinite(row["advantage"]):
            raise TrainerDataError(f"row {number} has the advantage {row['advantage']!r}")
        if token_budget is not None and count > token_budget:
            raise TrainerDataError(
                f"row {number} has {count} tokens and the trainer drops what is over its token_budget of "
                f"{token_budget}; cut it at whole turns first"
            )
        if model_version is not None and max_staleness is not None:
            age = model_version - row["model_version"]
            if age > max_staleness:
                raise TrainerDataError(f"row {number} is {age} versions old and would be dropped (max_staleness)")


def rollout_func_result(samples: Sequence[Sample], prompts: int) -> dict[str, Any]:
    """What `rollout_func(prompts, trainer)` returns: one sequence per prompt received, in their order.

    `GRPOTrainer` computes the advantages itself and has no place for a second row, so an episode that forked or
    compacted is refused: use the rollout worker of `AsyncGRPOTrainer` for it, or `main_only` credit.
    """
    rows = checked(samples, credit=False, per_turn=False)
    if len(rows) != len({s.episode_id for s in rows}):
        raise TrainerDataError(
            "rollout_func takes one sequence per prompt and an episode has several rows; use the rollout worker of "
            "AsyncGRPOTrainer, or keep the main branch only"
        )
    if len(rows) != prompts:
        raise TrainerDataError(
            f"rollout_func got {prompts} prompts and would return {len(rows)} sequences; an episode that was lost "
            "must be run again before the group is returned"
        )
    return {
        "prompt_ids": [s.tokens[: s.prompt_length].tolist() for s in rows],
        "completion_ids": [s.tokens[s.prompt_length :].tolist() for s in rows],
        "logprobs": [s.logprobs[s.prompt_length :].astype(float).tolist() for s in rows],
        "env_mask": [s.loss_mask[s.prompt_length :].tolist() for s in rows],
        "reward": [s.reward for s in rows],
    }


def _rows(export: Export) -> Iterator[Row]:
    numbers = Numbers()
    for samples in export.groups():
        yield from rollout_samples(samples, group_ids=numbers)


EXPORTER = Exporter("TRL RolloutSamples (AsyncGRPOTrainer)", _rows, credited=True)
