"""Replies that the `renderers` library has read, in our own terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sandlot.chat.json_calls import is_json
from sandlot.chat.messages import CallStatus, ParsedCall, Reply, Tool

_STATUSES: Mapping[str, CallStatus] = {
    "ok": "ok",
    "invalid_json": "invalid_arguments",
    "malformed_structure": "invalid_arguments",
    "unclosed_block": "unclosed",
    "missing_name": "missing_name",
    "unknown_tool": "unknown_tool",
}


def read_parsed(parsed: Any, tools: Sequence[Tool], *, truncated: bool) -> Reply:
    """Every call it saw with its status. Markup that names no tool goes on in the text, so that the agent sees it.

    In an answer that was cut, a last call whose arguments are no JSON is one that was cut.
    """
    names = {t.name for t in tools}
    calls: list[ParsedCall] = []
    texts = [parsed.content or ""]
    for call in parsed.tool_calls:
        status = _STATUSES.get(str(call.status), "invalid_arguments")
        name, arguments = call.name or "", call.arguments
        if not name and status != "unclosed":
            status = "missing_name"
            texts.append(call.raw)
        elif status in ("ok", "unknown_tool"):
            if not (isinstance(arguments, dict) and is_json(arguments)):
                status = "invalid_arguments"
            else:
                status = "ok" if name in names else "unknown_tool"
        if status not in ("ok", "unknown_tool") and not isinstance(arguments, str):
            arguments = call.raw
        calls.append(ParsedCall(name, arguments, call.raw, status))
    if truncated and calls and calls[-1].status == "invalid_arguments":
        calls[-1] = replace(calls[-1], status="unclosed")
    unclosed = any(c.status == "unclosed" for c in calls)
    text = "\n".join(t for t in texts if t)
    return Reply(text, parsed.reasoning_content or "", tuple(calls), truncated or unclosed)
