"""A stand-in for slime's and vime's `Sample`, field by field, with the checks their rollout manager makes.

Written after `utils/types.py` and `ray/rollout.py` of both: fields, `Status`, `get_reward_value`, the rule that rows
of one rollout carry one `rollout_id`, the conversion to training data with its asserts, the per-rollout denominators.
The real ones import torch, Ray and an engine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any


@dataclass
class StandIn:
    """One sample of the trainer."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]  # type: ignore[index]


def arguments(**changes: Any) -> SimpleNamespace:
    """The trainer's arguments that hooks look at, with their defaults."""
    values: dict[str, Any] = {
        "reward_key": None,
        "custom_reward_post_process_path": "sandlot.trainers.slime.reward_post_process",
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "rollout_temperature": 1.0,
        "rollout_max_context_len": None,
        **changes,
    }
    return SimpleNamespace(**values)


def sampling_params(**changes: Any) -> dict[str, Any]:
    """What the trainer hands to `generate`."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 512,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        **changes,
    }


def needs_reward_model(group: list[StandIn]) -> bool:
    """`generate_and_rm`: whether the trainer would ask its own reward model about the rows of a rollout."""
    return not any(s.status is s.Status.ABORTED for s in group) and any(s.reward is None for s in group)


def validate_rollout_ids(node: Any, depth: int = 0) -> None:
    """Below prompt and rollout every list is one rollout: its rows share one id that is not None."""
    if isinstance(node, StandIn):
        return
    if depth >= 2:
        ids = {s.rollout_id for s in node}
        assert None not in ids
        assert len(ids) == 1
        return
    for child in node:
        validate_rollout_ids(child, depth + 1)


def train_data(args: Any, data: list[list[list[StandIn]]], post_process: Any) -> dict[str, list[Any]]:
    """Flatten and convert as the rollout manager does before training."""
    validate_rollout_ids(data)
    flat: Any = data
    while isinstance(flat[0], list):
        flat = list(itertools.chain.from_iterable(flat))
    raw, rewards = post_process(args, flat)
    assert len(raw) == len(flat)
    assert len(rewards) == len(flat)
    masks = []
    for sample in flat:
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        assert len(mask) == sample.response_length
        masks.append([0] * sample.response_length if sample.remove_sample else mask)
    sums: dict[Any, int] = {}
    for sample, mask in zip(flat, masks, strict=True):
        sums[sample.rollout_id] = sums.get(sample.rollout_id, 0) + sum(mask)
    return {
        "tokens": [s.tokens for s in flat],
        "response_lengths": [s.response_length for s in flat],
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [int(s.status is s.Status.TRUNCATED) for s in flat],
        "loss_masks": masks,
        "rollout_ids": [s.rollout_id for s in flat],
        "rollout_mask_sums": [sums[s.rollout_id] for s in flat],
        "rollout_log_probs": [s.rollout_log_probs for s in flat],
    }
