"""Call ids that models write themselves, under which results go back to them.

Kimi K2 writes `functions.NAME:N`, where the id is the only place that shows the name; Command numbers all calls of a
conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sandlot.chat.messages import Message

_PREFIX = "functions."
_NUMBERED = re.compile(r"(?<![^\s:<>{}])([^\s:<>{}]+):(\d+)")
"""A word with a number: looked for from its beginning alone, so that long words are read once."""


_FIRST_NUMBER = re.compile(r'\{\s*"tool_call_id"\s*:\s*"(\d{1,4})"\s*,\s*"tool_name"')


def calls_before(output: str) -> int:
    """How many calls came before those of a sampled answer: the number that the model wrote for the first of them."""
    first = _FIRST_NUMBER.search(output)
    return int(first[1]) if first else 0


def with_native_ids(messages: Sequence[Message]) -> list[Message]:
    """A whole conversation, its calls numbered from 0 on, its results with the ids of their calls."""
    shown, known, number = [], dict[str, str](), 0
    for message in messages:
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                native = f"{_PREFIX}{call.name}:{number}"
                number += 1
                if call.id:
                    known[call.id] = native
                calls.append(replace(call, id=native))
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool":
            message = replace(message, tool_call_id=known.get(message.tool_call_id, message.tool_call_id))
        shown.append(message)
    return shown


def as_called(result: Message) -> tuple[int, str]:
    """Puts results of one turn in the order of its calls: ids of the gateway end in the number of their call."""
    return len(result.tool_call_id), result.tool_call_id


def answer_with_sampled_ids(new: Sequence[Message], output: str) -> list[Message]:
    """The messages after a sampled turn: each result has the id that the model wrote in `output` for its call.

    A result belongs to the first call of its name that none before it, in the order of calls, belongs to.
    """
    words = ((m[1].partition(_PREFIX)[2], m[2]) for m in _NUMBERED.finditer(output))
    sampled = [(name, f"{_PREFIX}{name}:{number}") for name, number in words if name]
    shown = list(new)
    for k in sorted((k for k, m in enumerate(new) if m.role == "tool"), key=lambda k: as_called(new[k])):
        name = new[k].tool_name
        at = next((i for i, (called, _) in enumerate(sampled) if called == name), None)
        native = sampled.pop(at)[1] if at is not None else f"{_PREFIX}{name or 'tool'}:0"
        shown[k] = replace(new[k], tool_call_id=native)
    return shown
