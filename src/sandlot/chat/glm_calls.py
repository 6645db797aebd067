"""Tool calls in the GLM form: a name, then `<arg_key>` and `<arg_value>` with raw values; read as the XML form is."""

from __future__ import annotations

import re
from dataclasses import replace

from sandlot.chat.markup import Found, Reading, skip_blanks
from sandlot.chat.xml_calls import Tag, Tags, read_xml_call

MARKER = "<arg_key>"
_PLAIN = r"[^\n<>\U00100000-\U0010ffff]"
_NAME = r"[^\s<>\U00100000-\U0010ffff]"


class GlmForm:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._markup = reading.markup
        opening, closing = re.escape(self._markup.call_open), re.escape(self._markup.call_close)
        key, key_end, value, value_end = (
            re.escape(reading.mark(m)) for m in (MARKER, "</arg_key>", "<arg_value>", "</arg_value>")
        )
        end = "|$" if reading.truncated else ""
        self._begins = re.compile(rf"\s*(?:{_NAME}+\s*)?(?:{key}|{closing}{end})")
        self._tag = re.compile(rf"({opening})({_PLAIN}*)|({closing})|{key}({_PLAIN}+){key_end}\s*{value}|({value_end})")
        self._tagged = ("", Tags())

    def next_call(self, text: str, at: int) -> int:
        """A marker spelled in ordinary text begins a call only when a name and the markup of a call follow."""
        marked = text.find(self._markup.call_open, at)
        while marked >= 0 and not self._markup.calls_are_tokens:
            body = marked + len(self._markup.call_open)
            if self._begins.match(text, body) or skip_blanks(text, body) == len(text):
                break
            marked = text.find(self._markup.call_open, marked + 1)
        return marked

    def read(self, text: str, at: int) -> list[Found]:
        """The call that begins at `at`."""
        if self._tagged[0] is not text:
            self._tagged = (text, self._find_tags(text))
        tags, reading = self._tagged[1], self._reading
        read = read_xml_call(
            text, at, tags, self._markup, reading.tools, reading.reveal,
            truncated=reading.truncated, bare=True, padded=False,
        )  # fmt: skip
        raw = read.call.raw.removeprefix(reading.reveal(self._markup.call_open))
        call = replace(read.call, raw=raw)
        if isinstance(call.arguments, str):
            call = replace(call, arguments=raw)
        return [replace(read, call=call)]

    def _find_tags(self, text: str) -> Tags:
        """All tags in the terms of the XML form: the call marker with its name is the function."""
        tags = Tags()
        for m in self._tag.finditer(text):
            kind = "parameter" if m[4] or m[5] else "function"
            name = (m[2] or m[4] or "").strip()
            tags.append(Tag(kind, bool(m[1] or m[4]), name, m.start(), m.end()))
        return tags
