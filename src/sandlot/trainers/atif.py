"""ATIF 1.8: the journal of an episode as a trajectory of steps, sub-agents embedded, ids and logprobs as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sandlot.chat.base import ChatFormat
from sandlot.trainers.base import Export, Exporter, Row, TrainerDataError
from sandlot.trajectory.journal import JournalContent
from sandlot.trajectory.tree import SessionTree
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

    A step of source `user` is what was new in the prompt, one of source `agent` what was sampled. Texts need the chat
    format of the model (`fmt`); without it messages are empty and the ids alone speak. Forks (a compacted or edited
    history), weight versions and masks are in `extra`: the format has no other place for them.
    """
    header = content.header
    if header is None:
        raise TrainerDataError("the journal has no header; its episode never began")
    tree = SessionTree(content.turns)
    branches: dict[str, list[Turn]] = {}
    for turn in content.turns:
        branches.setdefault(turn.branch, []).append(turn)
    main = branches.pop("main", [])
    agent = {"name": str(header.metadata.get("harness", "agent")), "version": "unknown"}
    root = _document(tree, main, header.episode_id, f"{header.episode_id}/main", agent, fmt)
    subagents = [
        _document(tree, turns, header.episode_id, f"{header.episode_id}/{name}", {**agent, "name": name}, fmt)
        for name, turns in branches.items()
    ]
    if subagents:
        root["subagent_trajectories"] = subagents
    sealed = content.sealed
    root["extra"] = {
        "group_id": header.group_id,
        "reward": sealed.reward if sealed else None,
        "failure": sealed.failure if sealed else None,
        "metadata": dict(header.metadata),
    }
    validate(root)
    return root


def _document(
    tree: SessionTree, turns: Sequence[Turn], session: str, name: str, agent: Row, fmt: ChatFormat | None
) -> Row:
    steps: list[Row] = []
    for turn in turns:
        stamp = datetime.fromtimestamp(turn.created, UTC).isoformat().replace("+00:00", "Z")
        prompt = tree.prompt_ids(turn.id).tolist()
        new = turn.new_ids.tolist()
        if new:
            text = fmt.decode(new) if fmt else ""
            extra: Row = {"token_ids": new, "after_turn": turn.parent, "shared_tokens": turn.shared}
            if turn.fork:
                extra["fork"] = turn.fork
            steps.append({"source": "user", "message": text, "timestamp": stamp, "extra": extra})
        steps.append(_agent_step(turn, prompt, stamp, fmt))
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    return {
        "schema_version": SCHEMA,
        "session_id": session,
        "trajectory_id": name,
        "agent": {**agent, "model_name": turns[0].model if turns else "unknown"},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(t.prompt_length for t in turns),
            "total_completion_tokens": sum(len(t.output_ids) for t in turns),
            "total_steps": len(steps),
        },
    }


def _agent_step(turn: Turn, prompt: list[int], stamp: str, fmt: ChatFormat | None) -> Row:
    output = turn.output_ids.tolist()
    step: Row = {
        "source": "agent",
        "message": "",
        "timestamp": stamp,
        "model_name": turn.model,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": turn.prompt_length,
            "completion_tokens": len(output),
            "completion_token_ids": output,
            "logprobs": turn.logprobs.tolist(),
        },
        "extra": {
            "turn_id": turn.id,
            "prompt_sha256": turn.prompt_sha256,
            "finish_reason": turn.finish_reason,
            "weight_versions": [list(v) for v in turn.versions],
            "sampling": dict(turn.sampling),
            "logprobs_mode": turn.logprobs_mode,
            "delivered": turn.delivered,
        },
    }
    if fmt is None:
        return step
    reply = fmt.parse(output, prompt, (), truncated=turn.finish_reason == "length")
    step["message"] = reply.text
    if reply.reasoning:
        step["reasoning_content"] = reply.reasoning
    calls = [
        {"tool_call_id": f"{turn.id}_{k}", "function_name": c.name, "arguments": c.arguments}
        for k, c in enumerate(reply.calls)
        if isinstance(c.arguments, dict)
    ]
    if calls:
        step["tool_calls"] = calls
    raw = [c.raw for c in reply.calls if not isinstance(c.arguments, dict)]
    if raw:
        step["extra"]["unreadable_calls"] = raw
    return step


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


def _rows(export: Export) -> list[Row]:
    fmt = None
    if export.model is not None:
        from sandlot.chat.format import load_chat_format

        fmt = load_chat_format(export.model)
    return [trajectory(content, fmt) for content in export.journals() if content.turns]


EXPORTER = Exporter("ATIF 1.8 trajectories, from the journals", _rows, credited=False)
