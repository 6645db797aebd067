"""Whether answers are read as what they are: what the model is shown that it wrote is read back at load."""

from __future__ import annotations

import logging
from dataclasses import replace

from sandlot.chat.base import ChatFormat
from sandlot.chat.messages import Message, Reply, ToolCall
from sandlot.chat.probe import BASES, TOOLS
from sandlot.chat.template import TemplateError

log = logging.getLogger("sandlot.chat")

_CALL = ToolCall(TOOLS[0].name, {"path": "0.py"}, "probe-0-0")
_TURN = Message("assistant", tool_calls=(_CALL,))
_RESULT = Message("tool", "a", tool_call_id=_CALL.id, tool_name=_CALL.name)
_ANSWER = Message("assistant", "Probe of an answer.")
_THOUGHT = "Probe of a thought."


def check_reading(chat: ChatFormat) -> None:
    """Warn where a call, a thought or a text is not read from what the model is shown that it wrote."""
    for what, unread, parser in (
        ("tool call", unread_call(chat), "vllm:NAME"),
        ("thought", _unread_thought(chat), "vllm:NAME+REASONING"),
    ):
        if unread:
            log.warning(
                "%s: what its chat template writes for a %s (%r) is not read as one, so the agent would see its "
                "model's %ss as text; set chat.parser to one that reads it, such as %s",
                *(chat.name, what, unread, what.split()[-1], parser),
            )

    if around := _unread_text(chat):
        log.warning(
            "%s: what its chat template writes for an answer (%r) is more than its text, which the agent would see in "
            "every answer; set chat.parser to one that reads it, such as vllm:NAME+REASONING",
            *(chat.name, around),
        )


def unread_call(chat: ChatFormat) -> str:
    """What the model is shown that it wrote for a call, where that is not read as the call; else empty."""
    shown = _shown(chat, _TURN, _RESULT)
    if shown is None or [(c.name, c.arguments) for c in shown[1].calls] == [(_CALL.name, _CALL.arguments)]:
        return ""
    return shown[0] or "nothing"


def _unread_thought(chat: ChatFormat) -> str:
    """The same for the thought of a turn with a call, where it is shown."""
    shown = _shown(chat, replace(_TURN, reasoning=_THOUGHT), _RESULT)
    return shown[0] if shown is not None and _THOUGHT in shown[1].text else ""


def _unread_text(chat: ChatFormat) -> str:
    """The same for an answer without calls, where more than its text is read as its text."""
    shown = _shown(chat, _ANSWER, BASES[0][-1])
    return shown[0] if shown is not None and shown[1].text.strip() != _ANSWER.text else ""


def _shown(chat: ChatFormat, turn: Message, following: Message) -> tuple[str, Reply] | None:
    """What a history shows of a turn before another message, and how that is read; None where it cannot show it, which
    was told."""
    base, tools = BASES[0], TOOLS if turn.tool_calls else ()
    try:
        prompt = list(chat.render(base, tools))
        whole = list(chat.render([*base, turn, following], tools))
    except TemplateError:
        return None
    start = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    end = next((i for i in range(start, len(whole)) if whole[i] in chat.stop_token_ids), len(whole))
    read = chat.parse(whole[start:end], prompt[:start], tools, truncated=False)
    return chat.decode(whole[start:end])[-300:], read
