"""AReaL: a dict of `[1, L]` arrays per row, or one padded batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sandlot.errors import MissingDependencyError
from sandlot.trainers.base import Exporter, Row, TrainerDataError, checked, group_rows, whole_versions
from sandlot.trajectory.sample import Sample

KEYS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards")


def arrays(samples: Sequence[Sample]) -> list[Row]:
    """One dict of numpy arrays per row, as a workflow's `arun_episode` returns tensors.

    Masks and logprobs cover the prompt too (zeros), logprobs are aligned to the token (the trainer rolls them), and
    versions are -1 where nothing was sampled.
    """
    found: list[Row] = []
    for s in checked(samples, credit=False, per_turn=False):
        found.append(
            {
                "input_ids": s.tokens.astype(np.int64)[None],
                "attention_mask": np.ones((1, len(s.tokens)), dtype=bool),
                "loss_mask": s.loss_mask.astype(np.int32)[None],
                "logprobs": s.logprobs.astype(np.float32)[None],
                "versions": np.asarray(whole_versions(s, -1), dtype=np.int64)[None],
                "rewards": np.asarray([s.reward], dtype=np.float32),
            }
        )
    return found


def tensors(samples: Sequence[Sample]) -> dict[str, Any]:
    """All rows in one right-padded dict of torch tensors, versions padded with -1 as in the prompt (needs torch)."""
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingDependencyError("torch", "torch") from None
    found = rows(samples)
    width = max(row["input_ids"].shape[1] for row in found)

    def padded(name: str) -> Any:
        if name == "rewards":
            return np.concatenate([row[name] for row in found])
        fill = -1 if name == "versions" else 0
        return np.concatenate(
            [np.pad(r[name], ((0, 0), (0, width - r[name].shape[1])), constant_values=fill) for r in found]
        )

    return {name: torch.from_numpy(padded(name)) for name in KEYS}


def validate(
    rows: Sequence[Row], *, group_size: int | None = None, adv_norm: str = "batch", episodes: int | None = None
) -> None:
    """Refuse what AReaL would train wrongly. `adv_norm` is the `mean_level` of its configuration."""
    for number, row in enumerate(rows):
        if set(row) != set(rows[0]):
            raise TrainerDataError(f"row {number} has other keys than the first; all rows need the same")
        shape = row["input_ids"].shape
        for name in ("attention_mask", "loss_mask", "logprobs", "versions"):
            if row[name].shape != shape:
                raise TrainerDataError(f"row {number}: {name} is {row[name].shape}, the tokens are {shape}")
        if row["rewards"].shape != (1,) or not np.isfinite(row["rewards"]).all():
            raise TrainerDataError(f"row {number} needs one finite reward")
        if (row["versions"][row["loss_mask"] == 0] != -1).any():
            raise TrainerDataError(f"row {number} has a version where nothing was sampled")
    if adv_norm == "group" and episodes is not None and len(rows) != episodes:
        raise TrainerDataError(
            f"{len(rows)} rows of {episodes} episodes would be sliced into groups of {group_size}, mixing prompts; "
            "set adv_norm to batch"
        )


def rows(samples: Sequence[Sample]) -> list[Row]:
    """`arrays`, validated."""
    found = arrays(samples)
    validate(found)
    return found


EXPORTER = Exporter("AReaL rows: a dict of [1, L] arrays each", group_rows(rows))
