"""ATIF 1.8: the journal of an episode as a trajectory of steps, sub-agents embedded, ids and logprobs as metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sandlot.chat.base import ChatFormat
from sandlot.chat.roles import shown_arguments
from sandlot.gateway.answering import SENT_STATUSES
from sandlot.rollout.dialogue import Exchange, dialogue
from sandlot.trainers.base import Export, Exporter, Row, TrainerDataError
from sandlot.trajectory.journal import JournalContent
from sandlot.trajectory.turn import Turn

SCHEMA = "ATIF-v1.8"

_TRAJECTORY = {
    "schema_version",
    "session_id",
    "trajectory_id",
    "agent",
    "steps",
    "notes",
    "final_metrics",
    "continued_trajectory_ref",
    "subagent_trajectories",
    "extra",
}
_STEP = {
    "step_id",
    "timestamp",
    "source",
    "message",
    "model_name",
    "reasoning_effort",
    "reasoning_content",
    "tool_calls",
    "metrics",
    "observation",
    "is_copied_context",
    "llm_call_count",
    "extra",
}
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics", "llm_call_count")
_METRICS = {
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cost_usd",
    "prompt_token_ids",
    "completion_token_ids",
    "logprobs",
    "extra",
}


def trajectory(content: JournalContent, fmt: ChatFormat | None = None) -> Row:
    """One episode. The main conversation is the root; every other branch is embedded as a sub-agent trajectory.

    Steps of the sources `system` and `user` are what was new in a prompt, one of `agent` is what was sampled, with the
    results of its calls as observations. Texts need the chat format of the model (`fmt`); without it there are only
    steps of the agent, and the ids alone speak. Where a prompt's new part cannot be told apart, it is one step of
    source `user` with the text as it was rendered. Forks, weight versions and ids of prompts are in `extra`: the format
    has no other place for them.
    """
    header = content.header
    if header is None:
        raise TrainerDataError("the journal has no header; its episode never began")
    spoken = {exchange.turn.id: exchange for exchange in dialogue(content.turns, fmt)} if fmt else {}
    branches: dict[str, list[Turn]] = {}
    for turn in content.turns:
        branches.setdefault(turn.branch, []).append(turn)
    agent = {"name": str(header.metadata.get("harness", "agent")), "version": "unknown"}
    documents = [
        _document(turns, spoken, header.episode_id, name, agent if name == "main" else {**agent, "name": name})
        for name, turns in sorted(branches.items(), key=lambda item: item[0] != "main")
    ]
    root, *subagents = documents
    if subagents:
        root["subagent_trajectories"] = subagents
    sealed = content.sealed
    root["extra"] = {
        "group_id": content.group_id,
        "reward": sealed.reward if sealed else None,
        "failure": sealed.failure if sealed else None,
        "metadata": dict(header.metadata),
    }
    validate(root)
    return root


def _document(turns: Sequence[Turn], spoken: Mapping[str, Exchange], session: str, branch: str, agent: Row) -> Row:
    steps: list[Row] = []
    of_turn: dict[str, Row] = {}
    for turn in turns:
        exchange = spoken.get(turn.id)
        if exchange is not None:
            steps += _heard(exchange, of_turn.get(turn.parent or ""), spoken)
        of_turn[turn.id] = _agent_step(turn, exchange)
        steps.append(of_turn[turn.id])
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    return {
        "schema_version": SCHEMA,
        "session_id": session,
        "trajectory_id": f"{session}/{branch}",
        "agent": {**agent, "model_name": turns[0].model},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(t.prompt_length for t in turns),
            "total_completion_tokens": sum(len(t.output_ids) for t in turns),
            "total_steps": len(steps),
        },
    }


def _heard(exchange: Exchange, before: Row | None, spoken: Mapping[str, Exchange]) -> list[Row]:
    """What was new in a prompt: results go to the step whose calls they answer, the rest are steps of their own."""
    stamp = _stamp(exchange.turn)
    messages = exchange.heard
    if messages is None:
        return [{"source": "user", "message": exchange.shown, "timestamp": stamp}] if exchange.shown else []
    results = [m.text for m in messages if m.role == "tool"]
    steps: list[Row] = [
        {"source": m.role, "message": m.text, "timestamp": stamp} for m in messages if m.role in ("system", "user")
    ]
    if results and before is not None and "observation" not in before:
        ids = spoken[str(exchange.turn.parent)].calls
        before["observation"] = {
            "results": [{"source_call_id": i, "content": text} for i, text in zip(ids, results, strict=True)]
        }
    elif results:  # the same turn was answered before, or in another branch
        steps = [{"source": "user", "message": text, "timestamp": stamp} for text in results] + steps
    return steps


def _agent_step(turn: Turn, exchange: Exchange | None) -> Row:
    output = turn.output_ids.tolist()
    extra: Row = {
        "turn_id": turn.id,
        "after_turn": turn.parent,
        "shared_tokens": turn.shared,
        "new_prompt_ids": turn.new_ids.tolist(),
        "prompt_sha256": turn.prompt_sha256,
        "finish_reason": turn.finish_reason,
        "weight_versions": [list(v) for v in turn.versions],
        "sampling": dict(turn.sampling),
        "logprobs_mode": turn.logprobs_mode,
        "delivered": turn.delivered,
    }
    if turn.fork:
        extra["fork"] = turn.fork
    step: Row = {
        "source": "agent",
        "message": "",
        "timestamp": _stamp(turn),
        "model_name": turn.model,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": turn.prompt_length,
            "completion_tokens": len(output),
            "completion_token_ids": output,
            "logprobs": turn.logprobs.tolist(),
        },
        "extra": extra,
    }
    if exchange is None:
        return step
    reply = exchange.said
    step["message"] = reply.text
    if reply.reasoning:
        step["reasoning_content"] = reply.reasoning
    if exchange.calls:
        step["tool_calls"] = [
            {"tool_call_id": call_id, "function_name": c.name, "arguments": shown_arguments(c.arguments)}
            for call_id, c in exchange.calls.items()
        ]
    if unsent := [c.raw for c in reply.calls if c.status not in SENT_STATUSES]:
        extra["unreadable_calls"] = unsent
    return step


def _stamp(turn: Turn) -> str:
    return datetime.fromtimestamp(turn.created, UTC).isoformat().replace("+00:00", "Z")


def validate(document: Row, *, seen: set[str] | None = None) -> None:
    """The rules of the schema, unknown keys included, so that what is written can be read elsewhere."""
    seen = set() if seen is None else seen
    name = document.get("trajectory_id")

    def refuse(why: str) -> TrainerDataError:
        return TrainerDataError(f"trajectory {name!r} is no valid {SCHEMA}: {why}")

    if unknown := set(document) - _TRAJECTORY:
        raise refuse(f"unknown key {sorted(unknown)[0]!r}")
    if document.get("schema_version") != SCHEMA:
        raise refuse(f"schema_version is {document.get('schema_version')!r}")
    if not name or name in seen:
        raise refuse("trajectory ids must be there and unique")
    seen.add(name)
    for key in ("name", "version"):
        if not document["agent"].get(key):
            raise refuse(f"the agent has no {key}")
    for number, step in enumerate(document["steps"], 1):
        if problem := _step_problem(step, number):
            raise refuse(f"step {number}: {problem}")
    for part in document.get("subagent_trajectories", ()):
        validate(part, seen=seen)


def _step_problem(step: Row, number: int) -> str:
    if unknown := set(step) - _STEP:
        return f"unknown key {sorted(unknown)[0]!r}"
    if step["step_id"] != number:
        return f"its id is {step['step_id']}; ids count from 1"
    if step["source"] not in ("system", "user", "agent"):
        return f"its source is {step['source']!r}"
    if not isinstance(step["message"], str | list):
        return "its message is neither text nor parts"
    if step["source"] != "agent" and (only := [k for k in _AGENT_ONLY if k in step]):
        return f"only agents have {only[0]}"
    if step.get("llm_call_count") == 0 and ("metrics" in step or "reasoning_content" in step):
        return "no model was called, so it has no metrics and no reasoning"
    metrics: dict[str, Any] = step.get("metrics") or {}
    if unknown := set(metrics) - _METRICS:
        return f"unknown metric {sorted(unknown)[0]!r}"
    ids, logprobs = metrics.get("completion_token_ids"), metrics.get("logprobs")
    if ids is not None and (len(ids) != metrics.get("completion_tokens") or len(logprobs or ids) != len(ids)):
        return "token ids, logprobs and their count differ"
    calls = step.get("tool_calls") or []
    if any(not isinstance(call["arguments"], dict) for call in calls):
        return "arguments of a call are no object"
    known = {call["tool_call_id"] for call in calls}
    if len(known) != len(calls):
        return "two calls have one id"
    for result in (step.get("observation") or {}).get("results", ()):
        source = result.get("source_call_id")
        if source is not None and source not in known:
            return f"an observation names {source!r}, which is no call of this step"
    return ""


def _rows(export: Export) -> Iterator[Row]:
    fmt = export.format()
    for content in export.journals():
        if content.turns:
            yield trajectory(content, fmt)


EXPORTER = Exporter("ATIF 1.8 trajectories, from the journals", _rows, as_is=True)
