"""What was said in a row, as chat messages: read from its ids, never from an echo of the agent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sandlot.chat.base import ChatFormat
from sandlot.chat.messages import Message, ParsedCall, Reply
from sandlot.chat.unrender import unrender_prompt, unrender_tail
from sandlot.rollout.dialogue import sent_calls
from sandlot.trajectory.sample import Sample


def spoken(s: Sample, fmt: ChatFormat) -> list[dict[str, Any]]:
    """Messages of a row: an assistant message per trained turn, and between them what the agent sent.

    Where that cannot be told apart (a history that was rendered anew, turns that another row trains), the rendered
    text stands in a message of the role `context`.
    """
    messages: list[dict[str, Any]] = []
    tokens, at = s.tokens.tolist(), 0
    output: list[int] = []
    calls: dict[str, ParsedCall] = {}
    for span in s.spans:
        end = span.start + span.length
        new = tokens[at : span.start]
        names = [call.name for call in calls.values()]
        heard = unrender_tail(fmt, output, names, new) if output else unrender_prompt(fmt, new)
        messages += sent(heard, fmt.decode(new), calls)
        output = tokens[span.start : end]
        reply = fmt.parse(output, new, (), truncated=s.status == "truncated" and end == len(tokens))
        calls = sent_calls(span.turn_id, reply)
        messages.append(assistant(reply, calls))
        at = end
    return messages


def sent(heard: Sequence[Message] | None, shown: str, call_ids: Iterable[str]) -> list[dict[str, Any]]:
    """What the agent sent, results with the ids of the calls they answer."""
    if heard is None:
        return [{"role": "context", "content": shown}] if shown else []
    ids = iter(call_ids)
    return [
        {"role": m.role, "content": m.text} | ({"tool_call_id": next(ids, "")} if m.role == "tool" else {})
        for m in heard
    ]


def assistant(reply: Reply, calls: Mapping[str, ParsedCall]) -> dict[str, Any]:
    """One reply as the agent was told of it: arguments are JSON text, a call that was never closed is text."""
    unclosed = "".join(call.raw for call in reply.calls if call.status == "unclosed")
    message: dict[str, Any] = {"role": "assistant", "content": reply.text + unclosed}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": c.name, "arguments": _text(c.arguments)}}
            for call_id, c in calls.items()
        ]
    return message


def _text(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
