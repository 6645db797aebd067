"""Tool calls in the MiniMax M2 form: `<invoke name="…">` and `<parameter name="…">`, read as the XML form is."""

from __future__ import annotations

import re
from dataclasses import replace

from sandlot.chat.markup import Found, Reading
from sandlot.chat.sections import Sections
from sandlot.chat.xml_calls import Tag, Tags, read_xml_call

MARKER = "<minimax:tool_call>"
_OPEN, _CLOSE = "<invoke name=", "</invoke>"
_TAG = re.compile(r"<(invoke|parameter) name=[\"']?([^<>\n]*?)[\"']?>|</(invoke|parameter)>")


class MiniMaxForm(Sections):
    """Calls inside `<minimax:tool_call>` … `</minimax:tool_call>`; one section holds any number of them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._markup = replace(reading.markup, call_open=_OPEN, call_close=_CLOSE)
        self._tagged = ("", Tags())
        section = reading.mark(MARKER), reading.mark("</minimax:tool_call>")
        super().__init__(*section, _OPEN, self._read_body, alone=False)

    def _read_body(self, text: str, at: int, body: int) -> Found:
        if self._tagged[0] is not text:
            self._tagged = (text, _find_tags(text))
        reading = self._reading
        return read_xml_call(
            text, at, self._tagged[1], self._markup, reading.tools, reading.reveal,
            truncated=reading.truncated, bare=True, padded=False,
        )  # fmt: skip


def _find_tags(text: str) -> Tags:
    tags = Tags()
    for m in _TAG.finditer(text):
        kind = "function" if "invoke" in (m[1], m[3]) else "parameter"
        placed = m.start() == 0 or text[m.start() - 1] in "\n>"
        tags.append(Tag(kind, bool(m[1]), m[2] or "", m.start(), m.end(), placed))
    return tags
