"""Takes apart what the model wrote: its thought, its text and its tool calls.

What is trimmed is what templates put between the parts, nothing else: line breaks around a thought; one line break
before and one after each call; a text of blanks only next to calls or after a thought. Two pieces of text around a
call are joined by a line break.

A call with a name that no tool has, or with arguments that are no object, is kept with its status: the agent answers
it with its own error, in training as in evaluation. Markup that names no tool stays in the text, so the agent sees it,
and is also recorded as a call of status `missing_name`. A call that was never closed is `unclosed`, is not in the text,
and makes the reply `truncated`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sandlot.chat.json_calls import read_json_call
from sandlot.chat.markup import Found, Markup, found, skip_blanks
from sandlot.chat.messages import ParsedCall, Reply, Tool
from sandlot.chat.xml_calls import FUNCTION, Tag, find_tags, read_xml_call

_BARE_CALL = re.compile(r"^<function=([^<>\n]+)>", re.MULTILINE)


def parse_reply(
    text: str,
    *,
    thought_open: bool,
    markup: Markup,
    tools: Sequence[Tool],
    truncated: bool,
    reveal: Callable[[str], str] = str,
) -> Reply:
    """Read decoded text, in which control tokens are aliases, without its stop token.

    `thought_open`: the prompt has opened a thought and not closed it. `reveal` turns aliases into what they spell.
    """
    parser = _Parser(markup, {t.name: t for t in tools}, reveal, truncated)
    thought, rest, ambiguous = parser.split_thought(text, thought_open)
    visible, calls, unsure = parser.read_calls(rest)
    if thought and not visible.strip():
        visible = ""
    unclosed = any(c.status == "unclosed" for c in calls)
    return Reply(visible, reveal(thought), calls, truncated or unclosed, ambiguous or unsure)


class _Parser:
    def __init__(
        self, markup: Markup, tools: Mapping[str, Tool], reveal: Callable[[str], str], truncated: bool
    ) -> None:
        self.markup, self.tools, self.reveal, self.truncated = markup, tools, reveal, truncated
        self._tagged: tuple[str, list[Tag]] = ("", [])

    def split_thought(self, text: str, is_open: bool) -> tuple[str, str, bool]:
        """(thought, what follows it, whether another split could be meant).

        A thought ends at its close marker. Without one it ends at the first call, and where there is none either it
        goes to the end. A close marker inside a call that the thought runs into belongs to that call.
        """
        start = skip_blanks(text, 0)
        if text.startswith(self.markup.think_open, start):
            text = text[start + len(self.markup.think_open) :]
        elif not is_open:
            return "", text, False
        close, call = text.find(self.markup.think_close), self._next_call(text, 0)
        if close < 0:
            end = len(text) if call < 0 else call
            return text[:end].strip("\n"), text[end:], False
        while 0 <= call < close:
            read = self._read_call(text, call)
            if read.call.status == "unclosed":
                break
            if close < read.end:
                return text[:call].strip("\n"), text[call:], True
            call = self._next_call(text, read.end)
        rest = text[close + len(self.markup.think_close) :]
        return text[:close].strip("\n"), rest.lstrip("\n"), False

    def read_calls(self, text: str) -> tuple[str, tuple[ParsedCall, ...], bool]:
        """(visible text, calls, whether one of them was ambiguous)."""
        pieces: list[str] = []
        calls: list[ParsedCall] = []
        ambiguous, at, piece_start = False, self._next_call(text, 0), 0
        while at >= 0:
            read = self._read_call(text, at)
            calls.append(read.call)
            ambiguous |= read.ambiguous
            if not read.shown:
                pieces.append(text[piece_start:at])
                piece_start = read.end
            at = self._next_call(text, read.end)
        pieces.append(text[piece_start:])
        if len(pieces) > 1:
            pieces = [
                piece.removeprefix("\n" if k else "").removesuffix("\n" if k < len(pieces) - 1 else "")
                for k, piece in enumerate(pieces)
            ]
            pieces = [piece for piece in pieces if piece.strip()]
        return self.reveal("\n".join(pieces)), tuple(calls), ambiguous

    def _next_call(self, text: str, at: int) -> int:
        """Where the next call begins, -1 when there is none.

        A marker spelled in ordinary text begins a call only when a call's body follows, or nothing does.
        """
        marked = text.find(self.markup.call_open, at)
        while marked >= 0 and not self._begins(text, marked):
            marked = text.find(self.markup.call_open, marked + 1)
        if self.markup.xml:
            for m in _BARE_CALL.finditer(text, at, marked if marked >= 0 else len(text)):
                if m[1].strip() in self.tools:
                    return m.start()
        return marked

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
            return read_xml_call(
                text, at, self._tags(text), self.markup, self.tools, self.reveal, truncated=self.truncated, bare=True
            )
        body = at + len(self.markup.call_open)
        start = skip_blanks(text, body)
        if text.startswith("{", start):
            read = read_json_call(text, body, self.markup, self.reveal, truncated=self.truncated)
        elif text.startswith(FUNCTION, start):
            read = read_xml_call(
                text, body, self._tags(text), self.markup, self.tools, self.reveal, truncated=self.truncated
            )
        else:
            read = self._read_shapeless(text, body)
        if read.call.status == "ok" and read.call.name not in self.tools:
            read = replace(read, call=replace(read.call, status="unknown_tool"))
        return read

    def _tags(self, text: str) -> list[Tag]:
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
