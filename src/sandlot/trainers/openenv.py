"""OpenEnv: a `TrainingTrace` per episode, one turn per trained span with its exact prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sandlot.trainers.base import Exporter, Row, TrainerDataError, by_episode, checked, group_rows, plain_metadata
from sandlot.trajectory.sample import Sample

_KEYS = (
    "node_id",
    "prompt_token_ids",
    "completion_token_ids",
    "per_token_logps",
    "loss_mask",
    "request",
    "response",
    "metadata",
)


def training_trace(rows: Sequence[Sample]) -> Row:
    """What `fetch_training_trace()` returns for one episode. Every sampled token is in exactly one turn.

    A logprob of up to 1e-4 above 0 is rounding of the engine and is written as 0, which the format wants.
    """
    turns = []
    for s in rows:
        for span in s.spans:
            end = span.start + span.length
            turns.append(
                {
                    "node_id": span.turn_id,
                    "prompt_token_ids": s.tokens[: span.start].tolist(),
                    "completion_token_ids": s.tokens[span.start : end].tolist(),
                    "per_token_logps": [min(0.0, x) for x in s.logprobs[span.start : end].astype(float).tolist()],
                    "loss_mask": [0] * span.start + [1] * span.length,
                    "request": {},
                    "response": {},
                    "metadata": {**plain_metadata(s), "weight_version": s.weight_versions[span.start]},
                }
            )
    trace: Row = {"schema_version": 1, "turns": turns}
    validate(trace)
    return trace


def verify_result(rows: Sequence[Sample]) -> Row:
    """What `verify()` returns: the reward, or None for an episode that stays outside the baseline."""
    return {"env_reward": rows[0].reward if rows else None}


def validate(trace: Row) -> None:
    """The strict validation of the format, and nothing looser."""
    if set(trace) != {"schema_version", "turns"} or trace["schema_version"] != 1:
        raise TrainerDataError("a training trace has schema_version 1 and turns")
    seen: set[str] = set()
    for turn in trace["turns"]:
        where = f"turn {turn.get('node_id')!r}"
        if set(turn) != set(_KEYS):
            raise TrainerDataError(f"{where} must have exactly the keys {', '.join(_KEYS)}")
        if turn["node_id"] in seen:
            raise TrainerDataError(f"{where} is there twice")
        seen.add(turn["node_id"])
        prompt, completion = len(turn["prompt_token_ids"]), len(turn["completion_token_ids"])
        if not prompt or not completion:
            raise TrainerDataError(f"{where} has no prompt or no completion")
        if len(turn["per_token_logps"]) != completion:
            raise TrainerDataError(f"{where}: {len(turn['per_token_logps'])} logprobs for {completion} tokens")
        if any(not math.isfinite(x) or x > 0 for x in turn["per_token_logps"]):
            raise TrainerDataError(f"{where} has a logprob that is not finite or above 0")
        if len(turn["loss_mask"]) != prompt + completion or any(turn["loss_mask"][:prompt]):
            raise TrainerDataError(f"{where}: the mask covers prompt and completion and is 0 on the prompt")


def traces(samples: Sequence[Sample]) -> list[Row]:
    """One row per episode: the trace and the result of verifying it."""
    return [
        {
            "episode_id": episode_id,
            "seed": own[0].group_id,
            "training_trace": training_trace(own),
            "verify": verify_result(own),
        }
        for episode_id, own in by_episode(checked(samples, credit=False)).items()
    ]


EXPORTER = Exporter("OpenEnv training traces", group_rows(traces))
