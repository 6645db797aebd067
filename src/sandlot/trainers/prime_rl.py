"""prime-rl: the `Trace` of `verifiers` that an environment sends, one per episode, with credit on its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sandlot.train.turns import token_advantages
from sandlot.trainers.base import (
    Export,
    Exporter,
    Row,
    TrainerDataError,
    by_episode,
    checked,
    mean_weights,
    plain_metadata,
)
from sandlot.trajectory.sample import Sample

VERSION = 1
"""The trace schema of verifiers 0.4."""


def trace(rows: Sequence[Sample], *, env_name: str = "sandlot", temperature: float = 1.0, scale: float = 1.0) -> Row:
    """The trace of one episode: a chain of nodes per row, context and sampled turn in turn.

    Rows share no nodes: a branch of a trace trains all sampled tokens on its way from the root, so a shared turn would
    be trained once for each leaf. The loss of prime-rl is a mean over tokens: the stream `rl` of `loss_weights` holds
    the row's weight times `scale`.
    """
    first = rows[0]
    nodes: list[Row] = []
    calls: list[Row] = []
    for s in rows:
        at, parent = 0, None
        advantages = token_advantages(s)
        for span in s.spans:
            end = span.start + span.length
            if span.start > at:
                nodes.append(_context(s, at, span.start, parent))
                parent = len(nodes) - 1
            nodes.append(
                {
                    "parent": parent,
                    "message": {"role": "assistant", "content": ""},
                    "sampled": True,
                    "token_ids": s.tokens[span.start : end].tolist(),
                    "mask": [True] * span.length,
                    "logprobs": s.logprobs[span.start : end].astype(float).tolist(),
                    "advantages": advantages[span.start : end].astype(float).tolist(),
                    "loss_weights": {"rl": [s.loss_weight * scale] * span.length},
                }
            )
            at, parent = end, len(nodes) - 1
            cut = s.status == "truncated" and end == len(s.tokens)
            sampling = {"temperature": temperature}
            calls.append({"node": parent, "sampling": sampling, "finish_reason": "length" if cut else "stop"})
    task = str(first.metadata.get("task", first.group_id))
    return {
        "version": VERSION,
        "id": first.episode_id,
        "task": {"type": env_name, "data": {"id": task}, "key": first.group_id},
        "agent": {"config": {}},
        "nodes": nodes,
        "calls": calls,
        "rewards": {"solved": {"score": first.reward}},
        "info": plain_metadata(first),
        "is_completed": True,
        "ok": True,
        "stop_condition": "agent_completed",
    }


def _context(s: Sample, start: int, end: int, parent: int | None) -> Row:
    return {
        "parent": parent,
        "message": {"role": "user", "content": ""},
        "token_ids": s.tokens[start:end].tolist(),
        "mask": [False] * (end - start),
    }


def traces(
    samples: Sequence[Sample], *, env_name: str = "sandlot", temperature: float | Callable[[str], float] = 1.0
) -> list[Row]:
    """One trace per episode of credited samples; the temperature may be told by episode."""
    rows = checked(samples, credit=True)
    scales = mean_weights(rows)
    found = [
        trace(
            own,
            env_name=env_name,
            temperature=temperature(episode_id) if callable(temperature) else temperature,
            scale=scales[own[0].group_id],
        )
        for episode_id, own in by_episode(rows).items()
    ]
    validate(found)
    return found


def validate(rows: Sequence[Row]) -> None:
    """Refuse what prime-rl would train wrongly."""
    for row in rows:
        where = f"trace {row['id']!r}"
        if row["ok"] is not True or any(r is None for r in row["rewards"].values()) or not row["rewards"]:
            raise TrainerDataError(f"{where} has no reward or is not ok, so all its tokens are masked; leave it out")
        if any(call["sampling"]["temperature"] <= 0 for call in row["calls"]):
            raise TrainerDataError(f"{where} was sampled at temperature 0: its logprobs have no meaning")
        for number, node in enumerate(row["nodes"]):
            if problem := _problem(node, number):
                raise TrainerDataError(f"{where}, node {number}: {problem}")
        children = [node["parent"] for node in row["nodes"] if node["parent"] is not None]
        if len(children) != len(set(children)):
            raise TrainerDataError(f"{where} forks: what its branches share would be trained once for each of them")


def _problem(node: Row, number: int) -> str:
    count, sampled = len(node["token_ids"]), sum(node["mask"])
    if node["parent"] is not None and not 0 <= node["parent"] < number:
        return f"its parent {node['parent']} is no earlier node"
    if len(node["mask"]) != count:
        return f"{len(node['mask'])} mask for {count} tokens"
    if bool(node.get("sampled")) != bool(sampled):
        return "a node is sampled, and has a mask, or neither"
    for name in ("logprobs", "advantages"):
        if len(node.get(name) or ()) != sampled:
            return f"{len(node.get(name) or ())} {name} for {sampled} sampled tokens"
    weights = (node.get("loss_weights") or {}).get("rl") or [0.0] * count
    if len(weights) != count or not np.isfinite(weights).all():
        return f"{len(weights)} rl weights for {count} tokens, or one that is not finite"
    if any(weight and not mask for weight, mask in zip(weights, node["mask"], strict=True)):
        return "a weight where nothing was sampled"
    return ""


def _rows(export: Export) -> Iterator[Row]:
    name = export.options.get("env_name", "sandlot")
    for samples in export.groups():
        yield from traces(samples, env_name=name, temperature=export.temperature)


EXPORTER = Exporter(
    "traces of verifiers, as prime-rl takes them", _rows, credited=True, options={"env_name": "name of the environment"}
)
