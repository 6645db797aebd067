"""Tool calls as calls of Python functions, one after the other between markers."""

from __future__ import annotations

import re

from sandlot.chat.json_calls import is_json
from sandlot.chat.markup import Found, Reading, found, skip_blanks
from sandlot.chat.written_values import Malformed, Values, broken_call, end_of_values

PAIRS = (
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|python_start|>", "<|python_end|>"),
    ("<function_calls>", "</function_calls>"),
)
"""The markers of LFM 2, Llama 4 and Olmo 3."""

_SPELLED = frozenset(opening for opening, _ in PAIRS)
_NAME = re.compile(r"[^\W\d][\w.-]*")
_CALL = re.compile(rf"\s*\[?\s*({_NAME.pattern})\(")


class PythonForm:
    """`<|tool_call_start|>[NAME(key='text', other=5), NAME()]<|tool_call_end|>`, also without brackets."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._known = [{literal: reading.mark(literal) for literal in pair} for pair in PAIRS]
        self._written = self._known

    def next_call(self, text: str, at: int) -> int:
        """A marker spelled in ordinary text begins a call only when a call follows, or nothing does."""
        if at == 0:
            self._written = [marks for marks in self._known if next(iter(marks.values())) in text]
        found = [start for marks in self._written if (start := self._next(text, at, *marks.values())) >= 0]
        return min(found, default=-1)

    def read(self, text: str, at: int) -> list[Found]:
        """The calls between one pair of markers."""
        marks = next(marks for marks in self._written if text.startswith(next(iter(marks.values())), at))
        opening, closing = marks.values()
        body = at + len(opening)
        end = end_of_values(text, body, marks)
        values = Values(text, body, end, ("'", '"'), self._reading.reveal, escapes=True)
        if values.next_is("["):
            values.take("[")
        calls: list[Found] = []
        while not (calls and self._ended(values, closing)):
            read = self._read_call(values, body if not calls else values.at, opening, closing)
            calls.append(read)
            if read.call.status != "ok":
                return calls
            values.at = read.end
            if values.next_is(","):
                values.take(",")
        last = calls[-1]
        return [*calls[:-1], Found(values.at, last.call, last.ambiguous, last.shown)]

    def _ended(self, values: Values, closing: str) -> bool:
        """Whether no further call comes; all that ends the list is then behind."""
        if values.next_is("]"):
            values.take("]")
        if values.next_is(closing):
            values.take(closing)
            return True
        return not _CALL.match(values.text, values.at)

    def _read_call(self, values: Values, start: int, opening: str, closing: str) -> Found:
        reveal, text = self._reading.reveal, values.text
        name = ""
        try:
            begin = skip_blanks(text, values.at)
            name = reveal(values.word(_NAME))
            values.take("(")
            values.improper = False
            arguments = values.pairs(")", "=", lambda: reveal(values.word(_NAME)))
            if not is_json(arguments):
                raise Malformed
        except ValueError as e:
            return broken_call(text, start, name, e, closing, opening, self._reading)
        return found(values.at, name, arguments, reveal(text[begin : values.at]), ambiguous=values.improper)

    def _next(self, text: str, at: int, opening: str, closing: str) -> int:
        start = text.find(opening, at)
        while start >= 0:
            body = start + len(opening)
            if _CALL.match(text, body) or skip_blanks(text, body) == len(text) or opening not in _SPELLED:
                return start
            start = text.find(opening, start + 1)
        return -1
