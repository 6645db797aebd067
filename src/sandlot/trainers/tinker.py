"""Tinker: one Datum per row, credit folded into per-token advantages, everything shifted by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sandlot.errors import MissingDependencyError
from sandlot.train.turns import token_advantages
from sandlot.trainers.base import Export, Exporter, Numbers, Row, TrainerDataError, checked
from sandlot.trajectory.sample import Sample


def data(samples: Sequence[Sample], *, groups: Numbers | None = None, episodes: Numbers | None = None) -> list[Row]:
    """Datums as plain dicts. Entry t of each array belongs to token t+1, the target of position t.

    The service sums the loss, so the advantage of a token carries its weight; where the mask is 0 it is 0, because
    the mask itself is not sent.
    """
    rows = checked(samples, credit=True)
    groups = Numbers() if groups is None else groups
    episodes = Numbers() if episodes is None else episodes
    found: list[Row] = []
    for s in rows:
        advantages = token_advantages(s).astype(np.float64) * s.loss_weight
        found.append(
            {
                "model_input": s.tokens[:-1].tolist(),
                "loss_fn_inputs": {
                    "target_tokens": s.tokens[1:].astype(np.int64).tolist(),
                    "logprobs": s.logprobs[1:].astype(float).tolist(),
                    "advantages": advantages[1:].tolist(),
                    "mask": s.loss_mask[1:].astype(float).tolist(),
                },
                "metadata": {"group_idx": groups[s.group_id], "traj_idx": episodes[s.episode_id], "row": s.index},
            }
        )
    validate(found)
    return found


def validate(rows: Sequence[Row], *, reduces: str = "sum") -> None:
    """Refuse what a Tinker service would train wrongly. `reduces`: `sum` (Tinker) or `mean` per Datum (SkyRL's)."""
    for number, row in enumerate(rows):
        inputs, count = row["loss_fn_inputs"], len(row["model_input"])
        for name in ("target_tokens", "logprobs", "advantages", "mask"):
            if len(inputs[name]) != count:
                raise TrainerDataError(f"datum {number}: {name} has {len(inputs[name])} entries for {count} positions")
        if row["model_input"][1:] != inputs["target_tokens"][:-1]:
            raise TrainerDataError(f"datum {number}: the targets are not the input shifted by one")
        for mask, advantage, logprob in zip(inputs["mask"], inputs["advantages"], inputs["logprobs"], strict=True):
            if not mask and (advantage or logprob):
                raise TrainerDataError(f"datum {number}: an advantage or logprob where nothing was sampled")
    if reduces == "mean":
        counts: dict[Any, int] = {}
        for row in rows:
            key = row["metadata"]["traj_idx"]
            counts[key] = counts.get(key, 0) + 1
        if max(counts.values(), default=0) > 1:
            raise TrainerDataError("this server averages per datum, so an episode of several weighs more than one")


def datums(samples: Sequence[Sample]) -> list[Any]:
    """`tinker.Datum` objects, without the mask, which no loss of the service takes."""
    try:
        from tinker import Datum, ModelInput, TensorData  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingDependencyError("tinker", "tinker") from None
    kinds = {"target_tokens": "int64", "logprobs": "float32", "advantages": "float32"}
    return [
        Datum(
            model_input=ModelInput.from_ints(row["model_input"]),
            loss_fn_inputs={
                name: TensorData(data=row["loss_fn_inputs"][name], dtype=kind, shape=[len(row["model_input"])])
                for name, kind in kinds.items()
            },
        )
        for row in data(samples)
    ]


def _rows(export: Export) -> Iterator[Row]:
    groups, episodes = Numbers(), Numbers()
    for samples in export.groups():
        yield from data(samples, groups=groups, episodes=episodes)


EXPORTER = Exporter("Tinker Datums, advantages per token", _rows, credited=True)
