"""What slime and vime share: the fields of their `Sample`, and every rule they leave unchecked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sandlot.errors import MissingDependencyError
from sandlot.trainers.base import (
    Export,
    Numbers,
    Row,
    TrainerDataError,
    checked,
    plain_metadata,
    response_of,
    versions_of,
    write_json_lines,
)
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.store import write_atomically

REPLAY_NEEDS = "top-p token ids are replayed by the trainer and engines do not report them: sample with top_p = 1"


def fields_of(s: Sample) -> Row:
    """The fields of slime's `Sample` that one of ours fills; the response begins at the first sampled token."""
    response = response_of(s)
    return {
        "tokens": s.tokens.tolist(),
        "response_length": len(s.tokens) - s.prompt_length,
        "loss_mask": s.loss_mask[response].tolist(),
        "rollout_log_probs": s.logprobs[response].astype(float).tolist(),
        "weight_versions": versions_of(s),
        "reward": s.reward,
        "status": s.status,
        "remove_sample": False,
        "metadata": plain_metadata(s),
    }


def aborted_fields(why: str) -> Row:
    """The placeholder of a rollout that gave nothing: all lists of one length, out of the loss, marked for removal.

    The reward is a number only because slime calls its own reward model on None; `reward_post_process` leaves the row
    out of the baseline.
    """
    return {
        "tokens": [0, 0],
        "response_length": 1,
        "loss_mask": [0],
        "rollout_log_probs": [0.0],
        "weight_versions": [],
        "reward": 0.0,
        "status": "aborted",
        "remove_sample": True,
        "metadata": {"ungraded": True, "why": why},
    }


def rows(export: Export) -> Iterator[Row]:
    """Rows of a rollout as `Sample.to_dict` writes them: one group per task, one `rollout_id` per episode."""
    groups, episodes, index = Numbers(), Numbers(), itertools.count()
    for samples in export.groups():
        found = [
            {
                "group_index": groups[s.group_id],
                "index": next(index),
                "rollout_id": episodes[s.episode_id],
                "prompt": "",
                "response": "",
                "label": None,
                "session_id": s.episode_id,
                **fields_of(s),
            }
            for s in checked(samples, credit=False, per_turn=False)
        ]
        validate(found, top_p=min(map(export.top_p, {s.episode_id for s in samples}), default=1.0))
        yield from found


def write(path: Path, rows: Iterable[Row]) -> None:
    """JSON lines; with the suffix `.pt` what `--load-debug-rollout-data` reads (needs torch)."""
    if path.suffix != ".pt":
        write_json_lines(path, rows)
        return
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingDependencyError("torch", "torch") from None
    empty: Row = {"spec_info": {}, "prefix_cache_info": {}}
    data = {"rollout_id": 0, "samples": [{**row, **empty} for row in rows]}
    write_atomically(path, lambda file: torch.save(data, file))


def validate(rows: Sequence[Row], *, top_p: float = 1.0) -> None:
    """Refuse what slime and vime would train without a word, or die of in the middle of a step."""
    rewards: dict[Any, Any] = {}
    groups: dict[Any, Any] = {}
    for number, row in enumerate(rows):
        if problem := _problem(row, top_p):
            raise TrainerDataError(f"row {number} is refused: {problem}")
        rollout = row["rollout_id"]
        if rewards.setdefault(rollout, row["reward"]) != row["reward"]:
            raise TrainerDataError(f"row {number} is refused: siblings of rollout {rollout} have different rewards")
        if groups.setdefault(rollout, row["group_index"]) != row["group_index"]:
            raise TrainerDataError(f"row {number} is refused: siblings of rollout {rollout} are in different groups")


def _problem(row: Row, top_p: float) -> str:
    length = row["response_length"]
    if not 0 < length < len(row["tokens"]):
        return f"a response of {length} in {len(row['tokens'])} tokens"
    for name in ("loss_mask", "rollout_log_probs"):
        if row[name] is None or len(row[name]) != length:
            return f"{name} must have the length of the response, {length}: the prompt is not in it"
    if row["rollout_id"] is None:
        return "it has no rollout_id, so its siblings would count as rollouts of their own"
    reward = row["reward"]
    if not isinstance(reward, float) or not math.isfinite(reward):
        return f"its reward is {reward!r}: on None the trainer asks a reward model instead"
    if row["status"] not in ("completed", "truncated", "aborted"):
        return f"its status is {row['status']!r}"
    if row["status"] == "aborted" or row["remove_sample"]:
        if any(row["loss_mask"]) or not row["remove_sample"] or row["status"] != "aborted":
            return "an aborted rollout must have an empty mask, status `aborted` and remove_sample"
        return ""
    if any(lp != 0 and not m for lp, m in zip(row["rollout_log_probs"], row["loss_mask"], strict=True)):
        return "a token that was not sampled has a logprob"
    if not row["loss_mask"][-1]:
        return "it does not end on a sampled token"
    if top_p != 1.0 and len(row.get("rollout_top_p_token_offsets") or ()) != length + 1:
        return REPLAY_NEEDS
    return ""
