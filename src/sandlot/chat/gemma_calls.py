"""Tool calls in the Gemma form: a name and an object whose strings stand between tokens of their own."""

from __future__ import annotations

import re

from sandlot.chat.json_calls import is_json
from sandlot.chat.markup import Found, Reading, found
from sandlot.chat.written_values import Malformed, Values, broken_call, end_of_values

MARKER = "<|tool_call>"
_KIND = "call:"
_NAME = re.compile(r"[^\s{}\U00100000-\U0010ffff]+")


class GemmaForm:
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._marks = {literal: reading.mark(literal) for literal in (MARKER, "<tool_call|>")}
        self._open, self._close = self._marks.values()
        self._quote = reading.mark('<|"|>')

    def next_call(self, text: str, at: int) -> int:
        """Where the next marker stands."""
        return text.find(self._open, at)

    def read(self, text: str, at: int) -> list[Found]:
        """The call that begins at `at`."""
        reveal, body = self._reading.reveal, at + len(self._open)
        values = Values(text, body, end_of_values(text, body, self._marks), (self._quote, '"'), reveal, bare=True)
        name = ""
        try:
            if values.next_is(_KIND):
                values.take(_KIND)
            name = reveal(values.word(_NAME))
            values.take("{")
            arguments = values.pairs("}", ":", values.key)
            if not is_json(arguments):
                raise Malformed
            stop = values.at
            values.take(self._close, self._open)
        except ValueError as e:
            return [broken_call(text, body, name, e, self._close, self._open, self._reading)]
        end = values.at if text.startswith(self._close, values.at - len(self._close)) else stop
        return [found(end, name, arguments, reveal(text[body:stop]))]
