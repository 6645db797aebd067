"""What the wires share on the way out: JSON bytes, server-sent events, and what of a turn the agent is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sandlot.chat.messages import CallStatus, ParsedCall, Tool
from sandlot.gateway.wire.base import Answer
from sandlot.gateway.wire.canon import UNPARSED

UNSENT: frozenset[CallStatus] = frozenset({"unclosed", "missing_name"})
"""Calls that never go out as calls: nobody could run them, or a client would run half of one.

All others are passed on, the broken ones too: the agent's own error must come back to the policy, in training as in
evaluation.
"""

Finish = Literal["stop", "tool_calls", "length"]

_BREAKS = [(mark.encode(), b"\\u%04x" % ord(mark)) for mark in ("\x85", "\u2028", "\u2029")]
"""What some clients take for the end of a line, and so of an event, as JSON escapes."""


@dataclass(frozen=True)
class Sent:
    """The calls a wire sends, each with its id, and why the turn ended. Text and reasoning go out as they are."""

    calls: tuple[tuple[str, ParsedCall], ...]
    finish: Finish


def sent(answer: Answer) -> Sent:
    """What of an answer goes out. A cut turn ends with `length`, even if the engine itself said that it stopped."""
    pairs = zip(answer.call_ids, answer.reply.calls, strict=True)
    calls = tuple((i, c) for i, c in pairs if c.status not in UNSENT)
    unclosed = any(c.status == "unclosed" for c in answer.reply.calls)
    if answer.finish == "length" or answer.reply.truncated or unclosed:
        return Sent(calls, "length")
    return Sent(calls, "tool_calls" if calls else "stop")


def arguments_text(call: ParsedCall) -> str:
    """Arguments as JSON text; what is no object goes out as the raw text that the model wrote."""
    return call.arguments if isinstance(call.arguments, str) else encode(call.arguments).decode()


def arguments_object(call: ParsedCall) -> dict[str, Any]:
    """Arguments for a protocol that has objects only; raw text goes into a wrapper that says so."""
    if isinstance(call.arguments, dict):
        return call.arguments
    return {UNPARSED: {"raw": call.arguments, "len": len(call.arguments)}}


def told_tools(tools: Sequence[Tool]) -> str:
    """How a conversation tells the model of tools that its prompt does not list."""
    return encode([tool.as_function()["function"] for tool in tools]).decode()


def encode(value: Any) -> bytes:
    """JSON bytes. Lone surrogates and huge numbers, which a model can write as escapes, go out as they came."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeError, OverflowError):
        return json.dumps(value, separators=(",", ":")).encode()


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    text = encode(data)
    for line_break, escape in _BREAKS:
        text = text.replace(line_break, escape)
    return head + b"data: " + text + b"\n\n"
