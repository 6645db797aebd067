"""Tool calls in the MiniMax M3 form: arguments are elements, nested as their values are, behind a token each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sandlot.chat.json_calls import is_json
from sandlot.chat.markup import Found, Reading, found
from sandlot.chat.schema import inner, kinds, typed
from sandlot.chat.sections import Sections
from sandlot.chat.written_values import Cut, Malformed, broken_call

MARKER = "]<]minimax[>["
_DEEPEST = 100
_ITEM = "item"

Element = tuple[str, list[str], list[Any]]
"""A name, pieces of text, and the elements between them."""


class ElementForm(Sections):
    """`<invoke name="NAME"><KEY>value</KEY></invoke>` with the marker before each tag; `<item>` is one of a list."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._mark = reading.mark(MARKER)
        self._close = reading.mark(f"{MARKER}</invoke>")
        mark = re.escape(self._mark)
        self._named = re.compile(r"[\"']?([^\"'<>\n]*)[\"']?>")
        self._tag = re.compile(rf"{mark}<(/?)([^<>\n]+)>")
        section = reading.mark(f"{MARKER}<tool_call>"), reading.mark(f"{MARKER}</tool_call>")
        super().__init__(*section, reading.mark(f"{MARKER}<invoke name="), self._read_body)

    def _read_body(self, text: str, at: int, body: int) -> Found:
        reading, name = self._reading, ""
        try:
            if not (begins := self._named.match(text, body)):
                raise Cut if text.find(">", body) < 0 else Malformed
            name = reading.reveal(begins[1]).strip()
            elements, stop = self._elements(text, begins.end())
            tool = reading.tools.get(name)
            schema = tool.parameters if tool else {}
            arguments = self._object(elements, schema, schema)
            if not is_json(arguments):
                raise Malformed
        except ValueError as e:
            return broken_call(text, body, name, e, self._close, self.call_open, reading)
        end = stop + len(self._close) if text.startswith(self._close, stop) else stop
        raw = reading.reveal(text[at:end])
        return found(end, name, arguments, raw, "ok" if name else "missing_name")

    def _elements(self, text: str, at: int) -> tuple[list[Element], int]:
        """The elements of a call, and where they end."""
        top: list[Element] = []
        opened: list[Element] = []
        while tag := self._tag.search(text, at):
            if opened:
                opened[-1][1].append(text[at : tag.start()])
            if not tag[1] and not (tag[2].startswith("invoke ") and not opened):
                if len(opened) > _DEEPEST:
                    raise Malformed
                opened.append((tag[2], [], []))
            elif opened:
                if opened[-1][0] != tag[2]:
                    raise Malformed
                element = opened.pop()
                (opened[-1][2] if opened else top).append(element)
            else:
                return top, tag.start()
            at = tag.end()
        raise Cut

    def _value(self, element: Element, schema: Any, root: Mapping[str, Any]) -> Any:
        _, pieces, elements = element
        text = self._reading.reveal("".join(pieces))
        wanted = kinds(schema, root)
        if not elements:
            if not text.strip() and "string" not in wanted and wanted & {"array", "object"}:
                return [] if "array" in wanted else {}
            return typed(text, schema, root)
        if text.strip():
            raise Malformed
        if "array" in wanted or (not wanted and all(name == _ITEM for name, _, _ in elements)):
            return [self._value(each, inner(schema, None, root), root) for each in elements]
        return self._object(elements, schema, root)

    def _object(self, elements: list[Element], schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, list[Any]] = {}
        for element in elements:
            name = self._reading.reveal(element[0])
            values.setdefault(name, []).append(self._value(element, inner(schema, name, root), root))
        return {name: given[0] if len(given) == 1 else given for name, given in values.items()}
