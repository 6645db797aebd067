"""Whether a template leaves earlier thoughts out, and at which messages; for the policy `thinking = template`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.chat.template import TemplateError

_TOOLS = (Tool("probe_read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),)
_THOUGHT = "Probe of a thought."


def forgets_at(render: Callable[[Sequence[Message], Sequence[Tool]], str], *, thinks: bool) -> frozenset[str]:
    """Roles of messages after which the template no longer shows the thought of the turn before.

    `thinks`: the model has markers of thoughts; a template that shows none at all then forgets at every message.
    """
    call = ToolCall("probe_read", {"path": "0.py"}, "probe-0-0")
    asked, result = Message("user", "Question."), Message("tool", "Result.", tool_call_id=call.id, tool_name=call.name)
    thought = Message("assistant", "Answer.", _THOUGHT)
    called = Message("assistant", "I read.", _THOUGHT, (call,))
    if not thinks:
        return frozenset()
    next_ones = {
        "user": [asked, thought, Message("user", "Next.")],
        "system": [asked, thought, Message("system", "Next.")],
        "tool": [asked, called, result],
    }
    return frozenset(role for role, messages in next_ones.items() if not _shows(render, messages))


def _shows(render: Callable[[Sequence[Message], Sequence[Tool]], str], messages: Sequence[Message]) -> bool:
    try:
        return _THOUGHT in render(messages, _TOOLS)
    except TemplateError:
        return False
