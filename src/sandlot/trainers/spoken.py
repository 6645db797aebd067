"""What the policy said in a row, as chat messages: parsed from the sampled ids, never from an echo of the agent."""

from __future__ import annotations

from typing import Any

from sandlot.chat.base import ChatFormat
from sandlot.chat.messages import Reply
from sandlot.trajectory.sample import Sample


def spoken(s: Sample, fmt: ChatFormat) -> list[dict[str, Any]]:
    """Messages of a row: an assistant message per trained turn, and the rendered text between them as `context`.

    A row does not record what the agent sent, only how it was rendered, so `context` holds the template's markup.
    """
    messages: list[dict[str, Any]] = []
    at = 0
    for span in s.spans:
        end = span.start + span.length
        if span.start > at:
            messages.append({"role": "context", "content": fmt.decode(s.tokens[at : span.start].tolist())})
        prompt, output = s.tokens[: span.start].tolist(), s.tokens[span.start : end].tolist()
        reply = fmt.parse(output, prompt, (), truncated=s.status == "truncated" and end == len(s.tokens))
        messages.append(assistant(reply, span.turn_id))
        at = end
    return messages


def assistant(reply: Reply, turn_id: str) -> dict[str, Any]:
    """One reply as an assistant message; calls whose arguments are no object keep them as text."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": f"{turn_id}_{k}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for k, c in enumerate(reply.calls)
        ]
    return message
