"""Tool calls in the MiniMax M2 form: `<invoke name="…">` and `<parameter name="…">`, read as the XML form is."""

from __future__ import annotations

import re
from dataclasses import replace

from sandlot.chat.markup import Found, Reading
from sandlot.chat.sections import Sections
from sandlot.chat.xml_calls import Tag, Tags, read_xml_call

MARKER = "<minimax:tool_call>"


class InvokeForm(Sections):
    """Calls inside a section's markers; one section holds any number of them.

    `prefix` stands in front of the names of all tags. `alone`: a call may also stand outside a section.
    """

    def __init__(
        self, reading: Reading, section_open: str, section_close: str, prefix: str = "", *, alone: bool = False
    ) -> None:
        self._reading = reading
        opening, closing = f"<{prefix}invoke name=", reading.mark(f"</{prefix}invoke>")
        self._markup = replace(reading.markup, call_open=opening, call_close=closing)
        mark, end = re.escape(prefix), re.escape(reading.mark(f"</{prefix}parameter>"))
        self._tag = re.compile(
            rf"<{mark}(invoke|parameter) name=[\"']?([^<>\n]*?)[\"']?(?: string=\"(true|false)\")?>"
            rf"|({re.escape(closing)}|{end})"
        )
        self._tagged = ("", Tags())
        super().__init__(section_open, section_close, opening, self._read_body, alone=alone)

    def _read_body(self, text: str, at: int, body: int) -> Found:
        if self._tagged[0] is not text:
            self._tagged = (text, self._find_tags(text))
        reading = self._reading
        return read_xml_call(
            text, at, self._tagged[1], self._markup, reading.tools, reading.reveal,
            truncated=reading.truncated, bare=True, padded=False,
        )  # fmt: skip

    def _find_tags(self, text: str) -> Tags:
        tags = Tags()
        for m in self._tag.finditer(text):
            tags.append(self._tag_of(m, m.start() == 0 or text[m.start() - 1] in "\n>"))
        return tags

    def _tag_of(self, m: re.Match[str], placed: bool) -> Tag:
        kind = "function" if m[1] == "invoke" or m[4] == self._markup.call_close else "parameter"
        return Tag(kind, bool(m[1]), m[2] or "", m.start(), m.end(), placed, m[3] or "")


class MiniMaxForm(InvokeForm):
    """Calls inside `<minimax:tool_call>` … `</minimax:tool_call>`."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading, reading.mark(MARKER), reading.mark("</minimax:tool_call>"))
