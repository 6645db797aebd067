"""The turn that stands for a sampled one where only what follows it is rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from operator import itemgetter

from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.chat.native_ids import as_called
from sandlot.chat.roles import untrusted_texts


def synthetic_turn(sentinel: str, calls: tuple[ToolCall, ...], *, shows_text: bool = True) -> Message:
    """A turn that ends with a sentinel.

    Some templates leave out the text of a turn with calls, so the last call carries the sentinel, too.
    """
    if calls:
        calls = (*calls[:-1], replace(calls[-1], arguments={"text": sentinel}))
    return Message("assistant", sentinel if shows_text or not calls else "", tool_calls=calls)


def named(new: Sequence[Message], call_names: Sequence[str]) -> list[Message]:
    """`new` with a name in each of its leading tool results."""
    shown = list(new)
    for k, message in enumerate(shown):
        if message.role != "tool":
            break
        if not message.tool_name and k < len(call_names):
            shown[k] = replace(message, tool_name=call_names[k])
    return shown


def pairings(call_names: Sequence[str], new: Sequence[Message]) -> list[tuple[ToolCall, ...]]:
    """Calls for the synthetic turn, the likeliest first: all of the turn's, those that are answered, one, none."""
    results = list(takewhile(lambda message: message.role == "tool", new))
    waiting = [ToolCall(m.tool_name or "tool", {}, m.tool_call_id or f"c{k}") for k, m in enumerate(results)]
    waiting = [call for _, call in sorted(zip(map(as_called, results), waiting, strict=True), key=itemgetter(0))]
    called: list[ToolCall | None] = []
    for name in call_names:
        called.append(next((call for call in waiting if call.name == name), None))
        if called[-1] is not None:
            waiting.remove(called[-1])
    for call in waiting:  # of a name that was not called
        called.append(call)
        if None in called:
            called[called.index(None)] = called.pop()
    whole = tuple(call or ToolCall(call_names[k], {}, f"open{k}") for k, call in enumerate(called))
    answered = tuple(call for call in called if call is not None)
    return [whole, answered, answered[:1], ()]


def unused(new: Sequence[Message], tools: Sequence[Tool]) -> str:
    """A sentinel that occurs nowhere in what is new, nor in the tools."""
    texts = untrusted_texts(new, [t.as_function() for t in tools])
    k = 0
    while any(f"Turn{k}Ends" in t for t in texts):
        k += 1
    return f"Turn{k}Ends"
