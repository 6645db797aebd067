"""Input of the OpenAI Responses protocol in canonical form.

An assistant's turn comes back as a run of items (reasoning, message, calls), which become one message. A new turn
begins with a reasoning item, or with a message after one that made no call. Tools inside a namespace are flattened;
those that a client's tool search found are told to the model where the search gave them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from sandlot.gateway.wire.framing import encode
from sandlot.gateway.wire.openai_shared import freeform_tool
from sandlot.gateway.wire.transcript import Result, Transcript

SEARCH = "tool_search"
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output", "tool_search_output"})


def tools_of(declared: Any, where: str, namespace: str = "") -> tuple[Tool, ...]:
    """Tools a model can be shown. The vendor's own (web search and others that it runs itself) are left out."""
    if declared is None:
        return ()
    if not isinstance(declared, list):
        raise invalid(where, "it must be a list")
    tools: list[Tool] = []
    for entry in declared:
        if not isinstance(entry, dict):
            continue
        kind, name = entry.get("type"), string(entry.get("name"))
        full = flat_name(namespace, name)
        parameters = entry.get("parameters")
        schema = parameters if isinstance(parameters, dict) else {}
        if kind == "function" and name:
            tools.append(Tool(full, string(entry.get("description")), schema, namespace=namespace))
        elif kind == "custom" and name:
            tools.append(freeform_tool(entry, full, namespace))
        elif kind == "namespace" and name and not namespace:
            tools += tools_of(entry.get("tools"), f"{where}.{name}", name)
        elif kind == SEARCH and entry.get("execution") == "client":
            tools.append(Tool(SEARCH, string(entry.get("description")), schema, "search"))
    return tuple(tools)


def flat_name(namespace: str, name: str) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


class InputReader:
    """Reads the items of one request, once, from the first on."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._transcript = Transcript()
        self._names = {tool.name for tool in tools}
        self._found: list[Tool] = []
        self._start()

    def read(self, body: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """The messages, and the tools that searches found."""
        if instructions := string(body.get("instructions")):
            self._transcript.add(Message("system", instructions))
        items = body.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list) or not items:
            raise invalid("input", "it must be a text or a list of at least one item")
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                raise invalid(f"input.{i}", "an item must be an object with a type")
            self._item(item, f"input.{i}")
        self._end()
        return self._transcript.done(), tuple(self._found)

    def _item(self, item: dict[str, Any], where: str) -> None:
        kind = string(item.get("type")) or ("message" if "role" in item else "")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._end()
            self._thoughts.append(_reasoning(item, where))
            self._mark(item.get("encrypted_content"))
            self._open = True
        elif kind == "function_call":
            name = flat_name(string(item.get("namespace")), string(item.get("name")))
            self._call(name, arguments_of(item.get("arguments")), item)
        elif kind == "custom_tool_call":
            name = flat_name(string(item.get("namespace")), string(item.get("name")))
            self._call(name, {"input": string(item.get("input"))}, item)
        elif kind == "tool_search_call" and item.get("call_id"):
            self._call(SEARCH, arguments_of(item.get("arguments")), item)
        elif kind in _RESULTS and item.get("call_id"):
            self._end()
            text = self._searched(item, where) if kind == "tool_search_output" else _output(item, where)
            self._transcript.result(where, Result("", string(item.get("call_id")), text))
        elif kind == "item_reference":
            raise invalid(where, "no items are stored here; send store: false and the items themselves")
        else:
            self._end()
            self._transcript.add(Message("user", note(kind_of(item))))

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, text = item.get("role"), text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            if any(self._texts) and not self._calls:
                self._end()
            self._texts.append(visible(text))
            self._open = True
            return
        self._end()
        if role in ("system", "developer"):
            self._transcript.add(Message("system", text))
        elif role == "user":
            self._transcript.add(Message("user", text))
        else:
            raise invalid(f"{where}.role", f"{role!r} is unknown; it must be system, developer, user or assistant")

    def _searched(self, item: Mapping[str, Any], where: str) -> str:
        tools = tools_of(item.get("tools"), f"{where}.tools")
        for tool in tools:
            if tool.name not in self._names:
                self._names.add(tool.name)
                self._found.append(tool)
        return encode([tool.as_function()["function"] for tool in tools]).decode()

    def _call(self, name: str, arguments: dict[str, Any] | str, item: Mapping[str, Any]) -> None:
        self._calls.append(ToolCall(name, arguments, string(item.get("call_id"))))
        self._mark(item.get("call_id"))
        self._open = True

    def _mark(self, mark: Any) -> None:
        if isinstance(mark, str) and mark:
            self._marks.append(mark)

    def _start(self) -> None:
        self._open = False
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._marks: list[str] = []

    def _end(self) -> None:
        if self._open:
            self._transcript.add(
                Message(
                    "assistant",
                    join_text(self._texts),
                    join_text(self._thoughts),
                    tuple(self._calls),
                    marks=tuple(self._marks),
                )
            )
        self._start()


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Readable thoughts: the summary, and the thoughts themselves where a client has them."""
    return join_text(text_of(item.get(field), f"{where}.{field}") for field in ("summary", "content"))


def _output(item: Mapping[str, Any], where: str) -> str:
    output = item.get("output")
    if output is None or isinstance(output, str | list):
        return text_of(output, f"{where}.output")
    return encode(output).decode()
