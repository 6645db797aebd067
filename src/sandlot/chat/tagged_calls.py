"""Tool calls between call markers, as JSON (Hermes) or as XML (Qwen3-coder): each call shows which of the two it is."""

from __future__ import annotations

import re

from sandlot.chat.json_calls import read_json_call
from sandlot.chat.markup import Found, Reading, found, skip_blanks
from sandlot.chat.xml_calls import FUNCTION, Tags, find_tags, read_xml_call

_BARE_CALL = re.compile(r"^<function=([^<>\n]+)>", re.MULTILINE)


class TaggedForm:
    """`<tool_call>{…}</tool_call>` and `<tool_call><function=…>…</function></tool_call>`."""

    def __init__(self, reading: Reading) -> None:
        self.markup, self.tools, self.reveal = reading.markup, reading.tools, reading.reveal
        self.truncated = reading.truncated
        self._tagged = ("", Tags())

    def next_call(self, text: str, at: int) -> int:
        """A marker spelled in ordinary text begins a call only when a call's body follows, or nothing does."""
        marked = text.find(self.markup.call_open, at)
        while marked >= 0 and not self._begins(text, marked):
            marked = text.find(self.markup.call_open, marked + 1)
        if self.markup.xml:
            for m in _BARE_CALL.finditer(text, at, marked if marked >= 0 else len(text)):
                if m[1].strip() in self.tools:
                    return m.start()
        return marked

    def read(self, text: str, at: int) -> list[Found]:
        """The call that begins at `at`."""
        return [self._read_call(text, at)]

    def _begins(self, text: str, at: int) -> bool:
        if self.markup.calls_are_tokens:
            return True
        body = skip_blanks(text, at + len(self.markup.call_open))
        if text.startswith(("{", FUNCTION), body) or FUNCTION.startswith(text[body : body + len(FUNCTION)]):
            return True
        line_start = at == 0 or text[at - 1] == "\n"
        return line_start and text.find(self.markup.call_close, body) >= 0

    def _read_call(self, text: str, at: int) -> Found:
        if not text.startswith(self.markup.call_open, at):
            return self._read_xml(text, at, bare=True)
        body = at + len(self.markup.call_open)
        start = skip_blanks(text, body)
        if text.startswith("{", start):
            return read_json_call(text, body, self.markup, self.reveal, truncated=self.truncated)
        if text.startswith(FUNCTION, start):
            return self._read_xml(text, body)
        return self._read_shapeless(text, body)

    def _read_xml(self, text: str, body: int, *, bare: bool = False) -> Found:
        return read_xml_call(
            text, body, self._tags(text), self.markup, self.tools, self.reveal,
            truncated=self.truncated, bare=bare, padded=self.markup.padded,
        )  # fmt: skip

    def _tags(self, text: str) -> Tags:
        if self._tagged[0] is not text:  # one text is read call after call, and its tags are looked for once
            self._tagged = (text, find_tags(text, self.markup))
        return self._tagged[1]

    def _read_shapeless(self, text: str, body: int) -> Found:
        """A call marker that is followed by no known form."""
        close = text.find(self.markup.call_close, body)
        following = text.find(self.markup.call_open, body)
        if close < 0 or 0 <= following < close:
            end = len(text) if following < 0 else following
            raw = self.reveal(text[body:end])
            return found(end, "", raw, raw, "unclosed" if following < 0 else "missing_name")
        raw = self.reveal(text[body:close])
        return found(close + len(self.markup.call_close), "", raw, raw, "missing_name")
