"""Canonical messages in the form a chat template takes them, bent only where the template cannot take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from sandlot.chat.literals import Guard, strings_in
from sandlot.chat.markup import CALL_PAIRS
from sandlot.chat.messages import Message, ToolCall

UNPARSED_ARGUMENTS = "unparsed_arguments"
"""The key under which arguments that are no JSON object are shown to a template, as the raw text they came as."""


@dataclass(frozen=True)
class Traits:
    """What a template takes, found out by trying at load. Where it does not, `conform` bends the conversation."""

    system_first: bool = True
    system_later: bool = True
    user_after_user: bool = True
    user_after_tool: bool = True
    empty_answer: bool = True
    """Whether an assistant message may say nothing and call nothing."""
    tool_role: bool = True
    calls: bool = True
    calls_together: bool = True
    """Whether one message may hold several calls."""
    arguments_as_text: bool = False
    """Whether arguments must be JSON text, since an object is refused."""
    tools: bool = True
    native_ids: bool = False
    """Whether call ids are those that the model itself writes; see `sandlot.chat.native_ids`."""
    switches: tuple[str, ...] = ()
    """Words that it reads out of texts to write something else elsewhere. They are kept from it."""


class JsonText(str):
    """Arguments that a template takes as the JSON text of an object only."""

    __slots__ = ()


def with_arguments_as_text(message: Message) -> Message:
    """The message with the arguments of its calls as `JsonText`."""

    def written(call: ToolCall) -> ToolCall:
        return replace(call, arguments=JsonText(json.dumps(shown_arguments(call.arguments), ensure_ascii=False)))

    return replace(message, tool_calls=tuple(map(written, message.tool_calls)))


def conform(messages: Sequence[Message], traits: Traits, *, head: bool = True) -> list[Message]:
    """The conversation in roles that the template takes. Nothing is dropped that says anything.

    A system message it does not take, or a tool result, becomes a user message; calls become text; neighbours that
    may not stand next to each other are joined by a blank line. Assistant messages part the list, so a tail is
    conformed as it would be within the whole (`head` is False for a tail). Calls that may not stand together become
    messages of their own.
    """
    done: list[Message] = []
    for index, message in enumerate(messages):
        if message.role == "system":
            leads = head and all(m.role == "system" for m in messages[:index])
            takes = traits.system_first if leads else traits.system_later
            if not takes:
                message = Message("user", message.text)
        elif message.role == "tool" and not traits.tool_role:
            message = Message("user", message.text)
        elif message.tool_calls and not traits.calls:
            opening, closing = CALL_PAIRS[0]
            calls = [f"{opening}\n{_as_json(call)}\n{closing}" for call in message.tool_calls]
            message = replace(message, text="\n".join([message.text, *calls] if message.text else calls), tool_calls=())
        elif message.role == "assistant" and not (traits.empty_answer or message.text or message.tool_calls):
            continue
        if message.tool_calls and traits.arguments_as_text:
            message = with_arguments_as_text(message)
        if len(message.tool_calls) > 1 and not traits.calls_together:
            first, *others = message.tool_calls
            done.append(replace(message, tool_calls=(first,)))
            done += [Message("assistant", tool_calls=(call,)) for call in others]
            continue
        last = done[-1] if done else None
        if last is not None and _must_join(last.role, message.role, traits):
            done[-1] = replace(last, text=f"{last.text}\n\n{message.text}" if last.text else message.text)
        else:
            done.append(message)
    return done


def _must_join(before: str, role: str, traits: Traits) -> bool:
    if role == "system":
        return before == "system" and not traits.system_later
    if role == "user":
        return (before == "user" and not traits.user_after_user) or (before == "tool" and not traits.user_after_tool)
    return False


def template_messages(
    messages: Sequence[Message], guard: Guard, *, native_ids: bool = False, all_names: bool = True
) -> list[dict[str, Any]]:
    """Messages as the dicts that chat templates expect, control strings in them cut by `guard`.

    A tool result without a name gets that of the call it answers. `native_ids`: ids of calls are shown as they are.
    `all_names`: thoughts also go by the names that other templates read them under.
    """

    def shown_id(call_id: str) -> str:
        return guard.text(call_id) if native_ids else short_id(call_id)

    names: dict[str, str] = {}
    shown = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role, "content": guard.content(message.text)}
        if message.role == "assistant":
            if message.reasoning:
                item["reasoning_content"] = guard.content(message.reasoning)
                if all_names:
                    item["reasoning"] = item["reasoning_content"]
                    if not (message.text and message.tool_calls):  # gpt-oss refuses both beside each other
                        item["thinking"] = item["reasoning_content"]
            if message.tool_calls:
                item["tool_calls"] = [_call(call, shown_id(call.id), guard) for call in message.tool_calls]
                names.update((call.id, call.name) for call in message.tool_calls if call.id)
        elif message.role == "tool":
            item["tool_call_id"] = shown_id(message.tool_call_id)
            if name := message.tool_name or names.get(message.tool_call_id, ""):
                item["name"] = guard.text(name)
        shown.append(item)
    return shown


def _as_json(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": shown_arguments(call.arguments)}, ensure_ascii=False)


def _call(call: ToolCall, call_id: str, guard: Guard) -> dict[str, Any]:
    function = {"name": guard.text(call.name), "arguments": guard.value(shown_arguments(call.arguments))}
    return {"type": "function", "id": call_id, "function": function}


def shown_arguments(arguments: dict[str, Any] | str) -> dict[str, Any] | JsonText:
    """Arguments as an object, which nearly all templates take: raw text that is none goes under `UNPARSED_ARGUMENTS`.

    `JsonText` stays what it is, for those that do not.
    """
    if isinstance(arguments, dict | JsonText):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {UNPARSED_ARGUMENTS: arguments}


def short_id(wire_id: str) -> str:
    """Nine letters and digits for a call's id, the one form every template takes; the same for the same id."""
    return _known_short_id(wire_id) if len(wire_id) <= _USUAL_ID else _short_id(wire_id)


def _short_id(wire_id: str) -> str:
    return blake2b(wire_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


_USUAL_ID = 100
"""Characters of the longest id that is remembered."""
_known_short_id = lru_cache(maxsize=4096)(_short_id)


def untrusted_texts(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every string of a conversation that the template will print."""
    texts = []
    for message in messages:
        texts += [message.text, message.reasoning, message.tool_name, message.tool_call_id]
        for call in message.tool_calls:
            texts += [call.name, call.id]
            texts += strings_in(shown_arguments(call.arguments))
    return [t for t in [*texts, *strings_in(list(tools))] if t]
