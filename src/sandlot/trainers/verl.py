"""verl: outputs of an agent loop (`AgentLoopOutput`), a list of them per session as V1 takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sandlot.trainers.base import (
    Export,
    Exporter,
    Row,
    TrainerDataError,
    by_episode,
    checked,
    response_of,
    whole_versions,
)
from sandlot.trajectory.sample import Sample


def session_outputs(rows: Sequence[Sample], *, temperature: float = 1.0) -> list[Row]:
    """The `AgentLoopOutput`s of one episode: `[AgentLoopOutput(**o) for o in …]` is what a V1 agent loop returns.

    The reward is on the last output only, where V1 looks for it, and `reward_extra_info` is always there.
    """
    outputs: list[Row] = []
    for number, s in enumerate(rows):
        response, versions = response_of(s), [v for v in whole_versions(s, -1) if v >= 0]
        outputs.append(
            {
                "prompt_ids": s.tokens[: s.prompt_length].tolist(),
                "response_ids": s.tokens[response].tolist(),
                "response_mask": s.loss_mask[response].tolist(),
                "response_logprobs": s.logprobs[response].astype(float).tolist(),
                "reward_score": s.reward if number == len(rows) - 1 else None,
                "num_turns": 2 * len(s.spans),
                "metrics": {},
                "extra_fields": {
                    "reward_extra_info": {},
                    "min_global_steps": min(versions),
                    "max_global_steps": max(versions),
                    "temperature": temperature,
                },
            }
        )
    return outputs


def rows(export: Export) -> Iterator[Row]:
    """One row per episode: `uid` (group), `session_id` (episode) and its `outputs`."""
    prompt, response = export.integer("prompt_length"), export.integer("response_length")
    for samples in export.groups():
        for episode_id, own in by_episode(checked(samples, credit=False, per_turn=False)).items():
            outputs = session_outputs(own, temperature=export.temperature(episode_id))
            validate(outputs, prompt_length=prompt, response_length=response)
            yield {"uid": own[0].group_id, "session_id": episode_id, "outputs": outputs}


def validate(
    outputs: Sequence[Row],
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    estimator: str = "grpo",
    padded: bool = False,
) -> None:
    """Refuse what verl would train wrongly. `padded` is the V0 worker, which takes one output per session."""
    if not outputs:
        raise TrainerDataError("a session without outputs fails the whole group; leave it out of the batch")
    if padded and len(outputs) > 1:
        raise TrainerDataError(f"the padded (V0) worker takes one output per session, not {len(outputs)}; use V1")
    if padded and (prompt_length is None or response_length is None):
        raise TrainerDataError("the padded (V0) worker does not truncate: give its prompt_length and response_length")
    if len(outputs) > 1 and estimator != "grpo":
        raise TrainerDataError(
            f"{estimator} compares rows, not sessions, when one has {len(outputs)} outputs; use grpo"
        )
    for number, output in enumerate(outputs):
        if problem := _problem(output, number == len(outputs) - 1, prompt_length, response_length):
            raise TrainerDataError(f"output {number} is refused: {problem}")


def _problem(output: Row, last: bool, prompt_length: int | None, response_length: int | None) -> str:
    length = len(output["response_ids"])
    if not output["prompt_ids"] or not length:
        return "prompt or response is empty"
    for name in ("response_mask", "response_logprobs"):
        if len(output[name]) != length:
            return f"{name} has {len(output[name])} entries for {length} response tokens"
    if not output["response_mask"][-1]:
        return "it does not end on a sampled token: with GAE a reward there vanishes"
    if prompt_length is not None and len(output["prompt_ids"]) > prompt_length:
        return f"a prompt of {len(output['prompt_ids'])} tokens is over {prompt_length} and would not be truncated"
    if response_length is not None and length > response_length:
        return f"a response of {length} tokens is over {response_length} and would not be truncated; cut it first"
    if (output["reward_score"] is not None) != last:
        return "the reward belongs to the last output of the session, and only there"
    if "reward_extra_info" not in output["extra_fields"]:
        return "without extra_fields['reward_extra_info'] a list with rewards raises KeyError"
    return ""


EXPORTER = Exporter(
    "verl agent loop outputs, a list per session (V1)",
    rows,
    options={
        "prompt_length": "refuse prompts of more tokens (the trainer's data.max_prompt_length)",
        "response_length": "refuse responses of more tokens (the trainer's data.max_response_length)",
    },
)
