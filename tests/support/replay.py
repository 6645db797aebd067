"""Recorded sessions through continuity, as if the recorded answers had been sampled here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from sandlot.chat.continuity import Continuity, Match
from sandlot.chat.messages import CallStatus, Message, ToolCall
from sandlot.gateway.wire import ChatRequest, wire_for
from sandlot.gateway.wire.canon import arguments_of
from support.captures import headers_of

LATER_TEXT = {"th": "after the call"}
"""Thoughts of recorded answers that had text after their calls, which the recording leaves out."""


@dataclass(frozen=True)
class Step:
    """One request of a recorded session, and how it relates to those before it."""

    request: ChatRequest
    match: Match
    answered: bool


@dataclass(frozen=True)
class Shape:
    """What a recorded session is to us: conversations are roots, branches are leaves of the tree of turns."""

    requests: int
    conversations: int
    branches: int
    forks: tuple[tuple[int, str], ...]


def asked(turn: dict[str, Any]) -> ChatRequest:
    """A recorded request in canonical form."""
    target = f"{turn['path']}?{turn['query']}" if turn["query"] else turn["path"]
    return wire_for(turn["path"]).parse(turn["body"], headers_of(turn), target)


def replay(
    turns: list[dict[str, Any]], continuity: Continuity | None = None, *, answers: int | None = None
) -> list[Step]:
    """Feed a recorded session turn by turn; only the first `answers` requests get theirs."""
    continuity = continuity or Continuity()
    steps: list[Step] = []
    signatures = _signatures(turns)
    for number, turn in enumerate(turns):
        request = asked(turn)
        match = continuity.match(request.messages, request.tools)
        answered = "status" not in turn["our_reply"] and (answers is None or number < answers)
        steps.append(Step(request, match, answered))
        if answered:
            message, statuses = _told(turn["our_reply"], request)
            marks = [call.id for call in message.tool_calls]
            # The recorder's marks are hashes: equal turns have equal ones, which ours do not.
            if signatures.count(signatures[number]) == 1:
                marks.append(signatures[number])
            continuity.record(match, f"t{number}", replace(message, marks=tuple(marks)), statuses)
    return steps


def shape_of(steps: list[Step]) -> Shape:
    """Conversations, branches and forks of a replayed session. A request that got no answer makes no turn."""
    answered = [(f"t{i}", step.match) for i, step in enumerate(steps) if step.answered]
    parents = {match.turn for _, match in answered}
    return Shape(
        len(steps),
        sum(match.turn is None for _, match in answered),
        sum(turn not in parents for turn, _ in answered),
        tuple((i, step.match.fork) for i, step in enumerate(steps) if step.match.fork),
    )


def _told(reply: dict[str, Any], request: ChatRequest) -> tuple[Message, list[CallStatus]]:
    """The recorded answer as the assistant message that our gateway would remember."""
    tools = {tool.name: tool for tool in request.callable}
    calls: list[ToolCall] = []
    statuses: list[CallStatus] = []
    for call in reply["calls"]:
        name = f"{call['ns']}__{call['name']}" if call.get("ns") else call["name"]
        raw = call["args_raw"]
        custom = name in tools and tools[name].kind == "custom"
        arguments = {"input": raw} if custom else arguments_of(raw)
        calls.append(ToolCall(name, arguments, call["id"]))
        bad = isinstance(arguments, str)
        statuses.append("invalid_arguments" if bad else "ok" if name in tools else "unknown_tool")
    text = "\n".join(filter(None, [reply["text"], LATER_TEXT.get(reply["think"] or "")]))
    return Message("assistant", text, reply["think"] or "", tuple(calls)), statuses


def _signatures(turns: list[dict[str, Any]]) -> list[str]:
    """The mark that the recorder put on each answer: a hash of its thoughts; in Google's protocol one that only the
    next request tells."""
    found: list[str] = []
    for turn, after in zip_longest(turns, turns[1:]):
        reply, wire = turn["our_reply"], wire_for(turn["path"]).name
        prefix = {"anthropic": "c2lnbmF0dXJl", "responses": "ENC"}.get(wire)
        signature = ""
        if prefix and reply.get("think"):
            signature = prefix + hashlib.sha1(reply["think"].encode()).hexdigest()
        elif wire == "google" and after is not None and reply.get("calls"):
            last = next((m for m in reversed(asked(after).messages) if m.role == "assistant"), Message("assistant"))
            if [c.name for c in last.tool_calls] == [c["name"] for c in reply["calls"]]:
                signature = next((mark for mark in last.marks if mark.startswith("c2ln")), "")
        found.append(signature)
    return found
