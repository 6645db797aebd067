"""Tool calls in the Kimi K2 form: a section of calls, each an id such as `functions.NAME:0` and a JSON object."""

from __future__ import annotations

from collections.abc import Mapping

from sandlot.chat.markup import Found, Reading, found
from sandlot.chat.messages import Tool
from sandlot.chat.sections import Sections, read_arguments

MARKER = "<|tool_call_argument_begin|>"


class KimiForm(Sections):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        mark = reading.mark
        self._open, self._close, self._arguments = mark("<|tool_call_begin|>"), mark("<|tool_call_end|>"), mark(MARKER)
        section = mark("<|tool_calls_section_begin|>"), mark("<|tool_calls_section_end|>")
        super().__init__(*section, self._open, self._read_body)

    def _read_body(self, text: str, at: int, body: int) -> Found:
        reveal = self._reading.reveal
        ends = [i for m in (self._close, self._open) if (i := text.find(m, body)) >= 0]
        split = text.find(self._arguments, body, min(ends, default=len(text)))
        if split < 0:
            end = min(ends, default=len(text))
            raw = reveal(text[body:end])
            if not ends:
                return found(end, name_in(raw, self._reading.tools), raw, raw, "unclosed")
            done = end + len(self._close) if text.startswith(self._close, end) else end
            name = name_in(raw, self._reading.tools)
            return found(done, name, raw, raw, "invalid_arguments" if name else "missing_name")
        name = name_in(reveal(text[body:split]), self._reading.tools)
        read = read_arguments(text, split + len(self._arguments), self._close, self._open, self._reading)
        raw = reveal(text[body : read.stop])
        status = read.status if name or read.status == "unclosed" else "missing_name"
        return found(read.end, name, read.value, raw, status, ambiguous=read.ambiguous)


def name_in(call_id: str, tools: Mapping[str, Tool]) -> str:
    """The tool's name in an id of the form `functions.NAME:0`; models also write the bare name."""
    call_id = call_id.strip()
    name, colon, number = call_id.rpartition(":")
    name = name if colon and number.isdecimal() else call_id
    return name if name in tools else name.removeprefix("functions.")
