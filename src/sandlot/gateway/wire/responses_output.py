"""Output items of the OpenAI Responses protocol: what a turn is told as, each with its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sandlot.chat.messages import ParsedCall, Tool
from sandlot.gateway.wire.base import Answer, ChatRequest
from sandlot.gateway.wire.framing import arguments_text, sent
from sandlot.gateway.wire.minted import turn_of
from sandlot.gateway.wire.openai_shared import freeform_text
from sandlot.gateway.wire.responses_input import flat_name
from sandlot.gateway.wire.responses_tools import own_call

_ITEM_PREFIX = {"local_shell": "lsh", "shell": "sh", "apply_patch": "apc"}


@dataclass(frozen=True)
class OutputItem:
    """One output item: as it starts, the events in between (without their place), as it ends."""

    started: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    done: dict[str, Any]


def items_of(answer: Answer, request: ChatRequest) -> list[OutputItem]:
    """The items of a turn, in order."""
    out, text, thought = sent(answer), answer.reply.text, answer.reply.reasoning
    turn = turn_of(answer.signature)
    items: list[OutputItem] = []
    if thought or not out.calls:
        items.append(_reasoning(f"rs_{turn}", thought, answer.signature))
    if text:
        cut = out.finish == "length" and not out.calls
        items.append(_message(f"msg_{turn}", text, "incomplete" if cut else "completed"))
    tools = {tool.name: tool for tool in request.callable}
    for index, (call_id, call) in enumerate(out.calls):
        items.append(_call(f"_{turn}_{index}", call_id, call, tools.get(call.name)))
    return items


def _reasoning(item_id: str, thought: str, signature: str) -> OutputItem:
    item = {"id": item_id, "type": "reasoning", "summary": [], "encrypted_content": signature}
    if not thought:
        return OutputItem(item, [], item)
    empty, part = ({"type": "summary_text", "text": value} for value in ("", thought))
    place = {"summary_index": 0}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.reasoning_summary_part.added", place | {"part": empty}),
        ("response.reasoning_summary_text.delta", place | {"delta": thought}),
        ("response.reasoning_summary_text.done", place | {"text": thought}),
        ("response.reasoning_summary_part.done", place | {"part": part}),
    ]
    return OutputItem(item, events, item | {"summary": [part]})


def _message(item_id: str, text: str, status: str) -> OutputItem:
    item = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    empty, part = ({"type": "output_text", "text": value, "annotations": [], "logprobs": []} for value in ("", text))
    place = {"content_index": 0}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.content_part.added", place | {"part": empty}),
        ("response.output_text.delta", place | {"delta": text, "logprobs": []}),
        ("response.output_text.done", place | {"text": text, "logprobs": []}),
        ("response.content_part.done", place | {"part": part}),
    ]
    return OutputItem(item, events, item | {"status": status, "content": [part]})


def _call(suffix: str, call_id: str, call: ParsedCall, tool: Tool | None) -> OutputItem:
    """A call in the form in which its tool was declared; an unknown tool, and one with arguments that have no place in
    that form, is called as a function."""
    if tool is not None and tool.kind == "search":
        item = {"id": f"tsc{suffix}", "type": "tool_search_call", "call_id": call_id, "execution": "client"}
        done = item | {"status": "completed", "arguments": call.arguments}
        return OutputItem(item | {"status": "in_progress", "arguments": {}}, [], done)
    if tool is not None and (held := own_call(tool.kind, call.arguments)) is not None:
        return _own(tool.kind, suffix, call_id, held)
    named: dict[str, Any] = {"call_id": call_id, "name": call.name}
    if tool is not None and tool.namespace:
        named |= {"name": call.name[len(flat_name(tool.namespace, "")) :], "namespace": tool.namespace}
    if tool is not None and tool.kind == "custom":
        text = freeform_text(call)
        item = {"id": f"ctc{suffix}", "type": "custom_tool_call", "status": "in_progress", **named, "input": ""}
        kind = "response.custom_tool_call_input"
        return OutputItem(
            item,
            [(f"{kind}.delta", {"delta": text}), (f"{kind}.done", {"input": text})],
            item | {"status": "completed", "input": text},
        )
    text = arguments_text(call)
    item = {"id": f"fc{suffix}", "type": "function_call", "status": "in_progress", **named, "arguments": ""}
    kind = "response.function_call_arguments"
    return OutputItem(
        item,
        [(f"{kind}.delta", {"delta": text}), (f"{kind}.done", {"name": named["name"], "arguments": text})],
        item | {"status": "completed", "arguments": text},
    )


def _own(kind: str, suffix: str, call_id: str, held: dict[str, Any]) -> OutputItem:
    """A call of a tool that has an item of its own; commands and patches have events of their own as well."""
    item = {"id": f"{_ITEM_PREFIX[kind]}{suffix}", "type": f"{kind}_call", "call_id": call_id, **held}
    started, done = item | {"status": "in_progress"}, item | {"status": "completed"}
    events: list[tuple[str, dict[str, Any]]] = []
    if kind == "shell":
        started["action"] = held["action"] | {"commands": []}
        for index, command in enumerate(held["action"]["commands"]):
            place, name = {"command_index": index}, "response.shell_call_command"
            events.append((f"{name}.added", place | {"command": ""}))
            events.append((f"{name}.delta", place | {"delta": command}))
            events.append((f"{name}.done", place | {"command": command}))
    elif kind == "apply_patch" and (diff := held["operation"].get("diff")) is not None:
        started["operation"] = held["operation"] | {"diff": ""}
        name = "response.apply_patch_call_operation_diff"
        events = [(f"{name}.delta", {"delta": diff}), (f"{name}.done", {"diff": diff})]
    return OutputItem(started, events, done)
