"""Tool calls in the Kimi K3 form: tags whose brackets are tokens, each value with its type; read as the XML form is."""

from __future__ import annotations

import re
from dataclasses import replace

from sandlot.chat.markup import Reading
from sandlot.chat.minimax_calls import InvokeForm
from sandlot.chat.xml_calls import Tag

MARKER = "<|open|>"


class XtmlForm(InvokeForm):
    """`<|open|>call tool="…" index="1"<|sep|>` with `<|open|>argument key="…" type="string"<|sep|>` in it."""

    def __init__(self, reading: Reading) -> None:
        opening, closing, end = map(reading.mark, (MARKER, "<|close|>", "<|sep|>"))
        super().__init__(reading, f"{opening}tools{end}", f"{closing}tools{end}", alone=True)
        self._markup = replace(reading.markup, call_open=f"{opening}call ", call_close=f"{closing}call{end}")
        self.call_open = self._markup.call_open
        opens, closes, ends = map(re.escape, (opening, closing, end))
        self._tag = re.compile(
            rf'{opens}(call|argument) (?:tool|key)="([^"\n]*)"(?: index="\d+")?(?: type="(\w+)")?{ends}'
            rf"|{closes}(call|argument){ends}"
        )

    def _tag_of(self, m: re.Match[str], placed: bool) -> Tag:
        kind = "function" if "call" in (m[1], m[4]) else "parameter"
        string = str(m[3] == "string").lower() if m[3] else ""
        name = (m[2] or "").replace("&quot;", '"').replace("&amp;", "&")
        return Tag(kind, bool(m[1]), name, m.start(), m.end(), string=string)
