"""The tool calls of a session, read back from the token ids of its turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandlot.chat.base import ChatFormat
from sandlot.grading.suspicion import Call, summary, suspicions
from sandlot.tasks import Task
from sandlot.trajectory.turn import Turn

_RESULT = 4096
"""Tokens of a result that are decoded."""


def calls_of(turns: Sequence[Turn], chat: ChatFormat) -> list[Call]:
    """Every call that the policy made, in order, with the text that the next turn of its branch was given."""
    followed: dict[str, Turn] = {}
    for turn in turns:
        if turn.parent is not None:
            followed.setdefault(turn.parent, turn)
    calls: list[Call] = []
    for turn in turns:
        prompt, output = turn.new_ids.tolist(), turn.output_ids.tolist()
        reply = chat.parse(output, prompt, (), truncated=turn.finish_reason == "length")
        if not reply.calls:
            continue
        after = followed.get(turn.id)
        result = chat.decode(after.new_ids[-_RESULT:].tolist()) if after is not None else ""
        calls += [Call(call.name, call.arguments, result) for call in reply.calls]
    return calls


def suspicion_of(task: Task, turns: Sequence[Turn], chat: ChatFormat) -> dict[str, Any]:
    """What looks like cheating in a session, for its result row. Blocking; whatever breaks here breaks nothing else."""
    try:
        found = suspicions(calls_of(turns, chat), forbidden=task.hidden, workdir=task.workdir)
        return summary(found)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
