"""SkyRL: a `GeneratorOutput` in its step-wise form, all lists parallel, one entry per row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sandlot.trainers.base import Export, Exporter, Row, TrainerDataError, checked, response_of
from sandlot.trajectory.sample import Sample

ESTIMATORS = ("grpo", "rloo", "maxrl")
"""The estimators that look at the last step of a trajectory only; the others work on rows."""


def generator_output(samples: Sequence[Sample]) -> Row:
    """A `GeneratorOutput` of the samples: rows of a trajectory together, the reward in its last row only.

    Trajectory ids are plain dicts; make `TrajectoryID(**t)` of them where the trainer is imported.
    """
    rows = checked(samples, credit=False, per_turn=False)
    attempts: dict[str, dict[str, int]] = {}
    for s in rows:
        attempts.setdefault(s.group_id, {}).setdefault(s.episode_id, len(attempts[s.group_id]))
    last = [k + 1 == len(rows) or rows[k + 1].episode_id != s.episode_id for k, s in enumerate(rows)]
    output: Row = {
        "prompt_token_ids": [s.tokens[: s.prompt_length].tolist() for s in rows],
        "response_ids": [s.tokens[response_of(s)].tolist() for s in rows],
        "loss_masks": [s.loss_mask[response_of(s)].tolist() for s in rows],
        "rollout_logprobs": [s.logprobs[response_of(s)].astype(float).tolist() for s in rows],
        "rewards": [s.reward if end else 0.0 for s, end in zip(rows, last, strict=True)],
        "stop_reasons": ["stop" if s.status == "completed" else "length" for s in rows],
        "trajectory_ids": [
            {"instance_id": s.group_id, "repetition_id": attempts[s.group_id][s.episode_id]} for s in rows
        ],
        "is_last_step": last,
        "rollout_metrics": {},
    }
    validate(output)
    return output


def validate(output: Mapping[str, Any], *, estimator: str = "grpo", step_wise: bool = True) -> None:
    """Refuse what SkyRL would train wrongly or die of."""

    def refuse(why: str) -> TrainerDataError:
        return TrainerDataError(f"the generator output is refused: {why}")

    count = len(output["response_ids"])
    if count == 0:
        raise refuse("it has no rows")
    for name in ("prompt_token_ids", "loss_masks", "rewards", "stop_reasons", "trajectory_ids", "is_last_step"):
        if len(output[name]) != count:
            raise refuse(f"{len(output[name])} {name} for {count} rows")
    logprobs = output["rollout_logprobs"]
    if logprobs is None or len(logprobs) != count or any(row is None for row in logprobs):
        raise refuse("all rows must have logprobs, or corrections are silently off")
    if len({isinstance(reward, list) for reward in output["rewards"]}) > 1:
        raise refuse("rewards are numbers for some rows and lists for others")
    for k in range(count):
        length = len(output["response_ids"][k])
        if not length or len(output["loss_masks"][k]) != length or len(logprobs[k]) != length:
            raise refuse(f"row {k} has masks or logprobs of another length than its response; prompts are not in them")
    if step_wise:
        _validate_steps(output, estimator, refuse)


def _validate_steps(output: Mapping[str, Any], estimator: str, refuse: Any) -> None:
    ids = [tuple(t.values()) for t in output["trajectory_ids"]]
    ends = output["is_last_step"]
    if estimator not in ESTIMATORS:
        raise refuse(f"{estimator} works on rows; step-wise training knows {', '.join(ESTIMATORS)}")
    if output.get("rollout_expert_indices") is not None:
        raise refuse("routed experts cannot be carried step-wise")
    if any(type(end) is not bool for end in ends) or ends[-1] is not True:
        raise refuse("is_last_step must be real booleans, and the last row the end of its trajectory")
    seen = set()
    for k, trajectory in enumerate(ids):
        begins = k == 0 or ends[k - 1]
        if begins and trajectory in seen:
            raise refuse(f"rows of trajectory {trajectory} are not contiguous")
        if not begins and trajectory != ids[k - 1]:
            raise refuse(f"trajectory {ids[k - 1]} has no last step")
        seen.add(trajectory)
        reward = output["rewards"][k]
        if not ends[k] and any(reward if isinstance(reward, list) else [reward]):
            raise refuse(f"row {k} has a reward and is not the last step of its trajectory")


def _rows(export: Export) -> Iterator[Row]:
    """One output for all groups: that is the form, lists as long as the run."""
    yield generator_output([sample for group in export.groups() for sample in group])


EXPORTER = Exporter("SkyRL GeneratorOutput, step-wise", _rows, suffix="json")
