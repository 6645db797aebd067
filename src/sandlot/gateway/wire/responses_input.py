"""Input of the OpenAI Responses protocol in canonical form.

An assistant's turn comes back as a run of items (reasoning, message, calls), which become one message. A new turn
begins with a reasoning item, or with a message after one that made no call. Tools inside a namespace are flattened;
those that a client's tool search found are told to the model where the search gave them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sandlot.chat.messages import Message, Tool, ToolCall
from sandlot.gateway.wire.canon import (
    arguments_of,
    invalid,
    join_text,
    kind_of,
    note,
    string,
    text_of,
    visible,
)
from sandlot.gateway.wire.framing import encode, told_tools
from sandlot.gateway.wire.minted import turn_of
from sandlot.gateway.wire.openai_shared import freeform_tool
from sandlot.gateway.wire.responses_tools import captured, own_arguments, own_tool
from sandlot.gateway.wire.transcript import Found, Piece, Result, Step, made_of

SEARCH = "tool_search"
_RESULTS = frozenset(
    f"{kind}_call_output" for kind in ("function", "custom_tool", "local_shell", "shell", "apply_patch")
)


def tools_of(declared: Any, where: str) -> tuple[Tool, ...]:
    """Tools a model can be shown. Those that the vendor runs itself (web search and others) are left out."""
    if declared is None:
        return ()
    if not isinstance(declared, list):
        raise invalid(where, "it must be a list")
    return tuple(tool for entry in declared if isinstance(entry, dict) for tool in made_of(entry, where, _tools))


def _tools(entry: Mapping[str, Any], where: str) -> tuple[Tool, ...]:
    kind, name = entry.get("type"), string(entry.get("name"))
    parameters = entry.get("parameters")
    schema = parameters if isinstance(parameters, dict) else {}
    if kind == "function" and name:
        return (Tool(name, string(entry.get("description")), schema),)
    if kind == "custom" and name:
        return (freeform_tool(entry, name),)
    if kind == "namespace" and name:
        inner = entry.get("tools")
        if isinstance(inner, list):
            inner = [tool for tool in inner if isinstance(tool, dict) and tool.get("type") in ("function", "custom")]
        made = tools_of(inner, f"{where}.{name}")
        return tuple(replace(tool, name=flat_name(name, tool.name), namespace=name) for tool in made)
    if kind == SEARCH and entry.get("execution") == "client":
        return (Tool(SEARCH, string(entry.get("description")), schema, "search"),)
    own = own_tool(entry)
    return () if own is None else (own,)


def flat_name(namespace: str, name: str) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def steps_of(item: Any, where: str) -> Sequence[Step]:
    """What one item of the input says."""
    if not isinstance(item, dict):
        raise invalid(where, "an item must be an object with a type")
    kind = string(item.get("type")) or ("message" if "role" in item else "item_reference" if "id" in item else "")
    call_id = item.get("call_id")
    if kind == "message":
        return (_message(item, where),)
    if kind == "reasoning":
        mark = string(item.get("encrypted_content"))
        return (Piece(thought=_reasoning(item, where), mark=mark, turn=turn_of(mark)),)
    if kind == "function_call":
        return (_call(_name(item), arguments_of(item.get("arguments")), item),)
    if kind == "custom_tool_call":
        return (_call(_name(item), {"input": string(item.get("input"))}, item),)
    if kind == "tool_search_call" and call_id:
        return (_call(SEARCH, arguments_of(item.get("arguments")), item),)
    if kind == "tool_search_output" and call_id:
        found = tools_of(item.get("tools"), f"{where}.tools")
        return (Result("", string(call_id), told_tools(found), found=found),)
    if kind == "additional_tools":
        more = tools_of(item.get("tools"), f"{where}.tools")
        return (Message("system", told_tools(more)), Found(more))
    if own := own_arguments(item):
        return (_call(*own, item),)
    if kind == "local_shell_call_output":
        call_id = call_id or item.get("id")  # clients put the id of the call into either
    if kind in _RESULTS:
        failed = kind == "apply_patch_call_output" and item.get("status") == "failed"
        return (Result("", string(call_id), _output(item, where), _name(item), is_error=failed),)
    if kind == "configuration_update":
        return ()  # settings, as those of the request
    if kind == "compaction_trigger":
        cure = "Codex does it itself where the gateway is in its model_providers"
        raise invalid(where, f"histories are not summarised here; {cure}")
    if kind == "item_reference":
        raise invalid(where, "single items are not stored here; send store: false and the items themselves")
    return (Message("user", note(kind_of(item))),)


def _message(item: Mapping[str, Any], where: str) -> Step:
    role, text = item.get("role"), text_of(item.get("content"), f"{where}.content")
    if role == "assistant":
        return Piece(text=visible(text), turn=turn_of(string(item.get("id"))))
    if role in ("system", "developer"):
        return Message("system", text)
    if role == "user":
        return Message("user", text)
    raise invalid(f"{where}.role", f"{role!r:.80} is unknown; it must be system, developer, user or assistant")


def _name(item: Mapping[str, Any]) -> str:
    return flat_name(string(item.get("namespace")), string(item.get("name")))


def _call(name: str, arguments: dict[str, Any] | str, item: Mapping[str, Any]) -> Piece:
    call_id = string(item.get("call_id"))
    return Piece(call=ToolCall(name, arguments, call_id), mark=call_id, turn=turn_of(call_id))


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Readable thoughts: the summary, and the thoughts themselves where a client has them."""
    return join_text(text_of(item.get(field), f"{where}.{field}") for field in ("summary", "content"))


def _output(item: Mapping[str, Any], where: str) -> str:
    output = item.get("output")
    if item.get("type") == "shell_call_output" and isinstance(output, list):
        return captured(output, f"{where}.output")
    if item.get("type") == "apply_patch_call_output":
        output = output or item.get("status")
    if output is None or isinstance(output, str | list):
        return text_of(output, f"{where}.output")
    return encode(output).decode()
