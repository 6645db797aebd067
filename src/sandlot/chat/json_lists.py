"""Tool calls as JSON between other markers: a list of objects, or one object after the other."""

from __future__ import annotations

import re
from dataclasses import replace

from sandlot.chat.markup import Found, Reading, skip_blanks
from sandlot.chat.mistral_calls import MistralForm

PAIRS = (
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("<tool_calls>", "</tool_calls>"),
    ("<|tool_call|>", "<|/tool_call|>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    ("<|tools_prefix|>", "<|tools_suffix|>"),
    ("<|function_call|>", ""),
)
"""The markers of Nemotron Nano 2; of Apriel, MiniMax M1 and Hunyuan; of Granite 3 (never closed) and Phi 4 mini;
of Command; of Apertus; of GigaChat 3.1."""

_NAMED = {
    "<|START_ACTION|>": (re.compile(r'\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"tool_name"'), '{"name"'),
    "<|tools_prefix|>": (re.compile(r'\{\s*("(?:[^"\\]|\\.)*")\s*:'), r'{"name": \1, "arguments":'),
}
"""How elements begin that name their tool in another place, and what that is in the usual form."""


class JsonForm(MistralForm):
    """`<TOOLCALL>[{…}, {…}]</TOOLCALL>`, and the like without brackets or without an end."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._known = [(reading.mark(opening), reading.mark(closing)) for opening, closing in PAIRS]
        self._written = self._known
        self._close = ""
        self._other_names = {reading.mark(opening): names for opening, names in _NAMED.items()}

    def next_call(self, text: str, at: int) -> int:
        """A marker spelled in ordinary text begins a call only when JSON follows, or nothing does."""
        if at == 0:
            self._written = [pair for pair in self._known if pair[0] in text]
        found = [(start, pair) for pair in self._written if (start := self._next(text, at, pair[0])) >= 0]
        if not found:
            return -1
        start, (self._open, self._close) = min(found)
        return start

    def read(self, text: str, at: int) -> list[Found]:
        """The calls between one pair of markers."""
        calls = super().read(text, at)
        after = skip_blanks(text, calls[-1].end)
        while text.startswith("{", after):
            calls.append(self._read_element(text, after))
            after = skip_blanks(text, calls[-1].end)
        if self._close and text.startswith(self._close, after):
            calls[-1] = replace(calls[-1], end=after + len(self._close))
        return calls

    def _named(self, source: str) -> str:
        pattern, usual = self._other_names.get(self._open, (None, ""))
        begins = pattern.match(source) if pattern else None
        return begins.expand(usual) + source[begins.end() :] if begins else source

    def _following(self, text: str, at: int) -> int:
        following = super()._following(text, at)
        end = text.find(self._close, at, following if following >= 0 else len(text)) if self._close else -1
        return end if end >= 0 else following

    def _next(self, text: str, at: int, opening: str) -> int:
        start = text.find(opening, at)
        while start >= 0:
            body = skip_blanks(text, start + len(opening))
            if text.startswith(("{", "["), body) or body == len(text):
                return start
            start = text.find(opening, start + 1)
        return -1
