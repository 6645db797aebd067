"""From a generation to a turn and to what the agent is told of it. Pure."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sandlot.chat.messages import CallStatus, Message, Reply, ToolCall
from sandlot.engine.base import Generation
from sandlot.gateway.call import Asked, Policy, Told
from sandlot.gateway.wire import minted
from sandlot.gateway.wire.base import Answer
from sandlot.ids import ids_array
from sandlot.trajectory.turn import Turn

SENT_STATUSES: frozenset[CallStatus] = frozenset({"ok", "unknown_tool", "invalid_arguments"})
"""Calls the agent is told of as calls; the others it sees as text."""

_DECLINED = "the chat format renders in full here"


@dataclass(frozen=True)
class Taken:
    """A generation that was taken in: the turn, how the agent is told, and the message by which it is known again."""

    turn: Turn
    told: Told
    message: Message
    statuses: tuple[CallStatus, ...]


def take(asked: Asked, generation: Generation, reply: Reply, policy: Policy, shared: int, prompt_sha256: str) -> Taken:
    """Everything that follows from a generation. `shared`: tokens of the turn that the prompt continues."""
    cut = generation.finish_reason == "length"
    turn = _turn(asked, generation, reply, policy, shared, prompt_sha256)
    sent = [c for c in reply.calls if c.status in SENT_STATUSES]
    call_ids = tuple(minted.call_id(asked.call_prefix, turn.id, k) for k in range(len(sent)))
    signature = minted.signature(turn.id)
    # A call that was cut off is told as text: a reply without any visible part would be dropped by some clients.
    text = reply.text + "".join(c.raw for c in reply.calls if c.status == "unclosed")
    told = replace(reply, text=text, calls=tuple(sent), truncated=reply.truncated or cut)
    finish: Literal["stop", "tool_calls", "length"] = "length" if told.truncated else "tool_calls" if sent else "stop"
    head = replace(asked.head, prompt_tokens=len(asked.prompt))
    answer = Answer(head, told, call_ids, signature, finish, len(turn.output_ids))
    calls = tuple(ToolCall(c.name, c.arguments, i) for c, i in zip(sent, call_ids, strict=True))
    message = Message("assistant", text, reply.reasoning, calls, marks=(*call_ids, signature))
    return Taken(turn, Told(turn.id, answer), message, tuple(c.status for c in sent))


def _turn(asked: Asked, generation: Generation, reply: Reply, policy: Policy, shared: int, prompt_sha256: str) -> Turn:
    match, sampled = asked.match, len(generation.output_ids)
    metadata: dict[str, Any] = {"ambiguous": True} if reply.ambiguous else {}
    if generation.routed_experts is not None:
        metadata["routed_experts"] = generation.routed_experts
    declined = match.turn is not None and policy.format.can_extend and asked.continued is None
    return Turn(
        id=secrets.token_hex(10),
        parent=asked.continued,
        shared=shared,
        new_ids=asked.new_ids,
        output_ids=ids_array(list(generation.output_ids)),
        logprobs=np.asarray(generation.logprobs, dtype=np.float64),
        finish_reason=generation.finish_reason,
        prompt_sha256=prompt_sha256,
        prompt_length=len(asked.prompt),
        versions=tuple((s.version, s.start, s.end) for s in generation.versions) or ((asked.version, 0, sampled),),
        sampling=asked.sampling.as_dict(),
        logprobs_mode=policy.logprobs_mode,
        model=policy.model,
        created=time.time(),
        request_sha256=asked.identity.hex(),
        branch=asked.request.branch,
        fork=match.fork or (_DECLINED if declined else ""),
        parse=tuple(c.status for c in reply.calls),
        metadata=metadata,
    )
