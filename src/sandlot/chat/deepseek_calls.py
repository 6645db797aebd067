"""Tool calls in the two DeepSeek forms: V3 and R1 with a type, a name and a code block, V3.1 with a name and JSON."""

from __future__ import annotations

import re

from sandlot.chat.markup import Found, Reading, found, skip_blanks
from sandlot.chat.sections import Sections, read_arguments

MARKER = "<｜tool▁call▁begin｜>"
_NAME = re.compile(r"[^\n`{]*")
_FENCE = re.compile(r"```(?:json)?")


class DeepSeekForm(Sections):
    """`function<｜tool▁sep｜>NAME` and a code block, or `NAME<｜tool▁sep｜>{…}`, between the call markers."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        mark = reading.mark
        self._open, self._close, self._separator = mark(MARKER), mark("<｜tool▁call▁end｜>"), mark("<｜tool▁sep｜>")
        section = mark("<｜tool▁calls▁begin｜>"), mark("<｜tool▁calls▁end｜>")
        super().__init__(*section, self._open, self._read_body)

    def _read_body(self, text: str, at: int, body: int) -> Found:
        reveal = self._reading.reveal
        ends = [i for m in (self._close, self._open) if (i := text.find(m, body)) >= 0]
        split = text.find(self._separator, body, min(ends, default=len(text)))
        if split < 0:
            end = min(ends, default=len(text))
            raw = reveal(text[body:end])
            done = end + len(self._close) if text.startswith(self._close, end) else end
            return found(done, "", raw, raw, "missing_name" if ends else "unclosed")
        name, start = reveal(text[body:split]).strip(), split + len(self._separator)
        if name == "function" and not text.startswith("{", skip_blanks(text, start)):
            name, start = _behind_type(text, start)
            name = reveal(name)
        read = read_arguments(text, start, self._close, self._open, self._reading, fenced=True)
        raw = reveal(text[body : read.stop])
        status = read.status if name or read.status == "unclosed" else "missing_name"
        return found(read.end, name, read.value, raw, status, ambiguous=read.ambiguous)


def _behind_type(text: str, start: int) -> tuple[str, int]:
    """The name of a call, and where its object begins behind the opening of a code block; no name where none does."""
    name = _NAME.match(text, start)
    assert name is not None  # it may be empty
    at = skip_blanks(text, name.end())
    if fence := _FENCE.match(text, at):
        at = skip_blanks(text, fence.end())
    return (name[0].strip(), at) if text[at : at + 1] in ("{", "") else ("", start)
