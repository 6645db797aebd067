"""Tool calls in the Mistral forms: a JSON list behind `[TOOL_CALLS]`, or a name, `[ARGS]` and a JSON object each."""

from __future__ import annotations

import re

from sandlot.chat.json_calls import guess, object_end, read_object, written_name
from sandlot.chat.markup import Found, Reading, found, skip_blanks
from sandlot.chat.sections import read_arguments

MARKER = "[TOOL_CALLS]"
_NAME = re.compile(r"[^\s\[\]{}\U00100000-\U0010ffff]+")


class MistralForm:
    """`[TOOL_CALLS][{…}, {…}]` and `[TOOL_CALLS]NAME[ARGS]{…}`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._open = reading.mark(MARKER)
        self._arguments, self._id = reading.mark("[ARGS]"), reading.mark("[CALL_ID]")

    def next_call(self, text: str, at: int) -> int:
        """Where the next marker stands."""
        return text.find(self._open, at)

    def read(self, text: str, at: int) -> list[Found]:
        """The calls of one marker."""
        body = at + len(self._open)
        start = skip_blanks(text, body)
        if text.startswith("[", start) and not text.startswith(self._arguments, start):
            return self._read_list(text, start)
        if text.startswith("{", start):
            return [self._read_element(text, start)]
        return [self._read_named(text, body)]

    def _following(self, text: str, at: int) -> int:
        """Where what is broken ends at the latest, -1 when that is the end of the text."""
        return text.find(self._open, at)

    def _read_list(self, text: str, start: int) -> list[Found]:
        """Each element by itself, so that one that is broken leaves the others whole."""
        calls: list[Found] = []
        at = skip_blanks(text, start + 1)
        while text.startswith("{", at):
            read = self._read_element(text, at)
            calls.append(read)
            at = skip_blanks(text, read.end)
            if text.startswith(",", at):
                at = skip_blanks(text, at + 1)
        if calls and calls[-1].call.status in ("unclosed", "invalid_arguments") and at == len(text):
            return calls
        if text.startswith("]", at):
            end = at + 1
        else:
            following = self._following(text, at)
            end = at if calls else len(text) if following < 0 else following
        if calls:
            last = calls[-1]
            return [*calls[:-1], Found(end, last.call, last.ambiguous, last.shown)]
        raw = self._reading.reveal(text[start:end])
        return [
            found(end, "", raw, raw, "unclosed" if end == len(text) and raw.strip() in ("", "[") else "missing_name")
        ]

    def _read_element(self, text: str, at: int) -> Found:
        reveal = self._reading.reveal
        end, cut = object_end(text, at, self._reading.truncated)
        if end >= 0:
            raw = reveal(text[at:end])
            return read_object(self._named(raw), end, raw)
        following = self._following(text, at)
        if following < 0 and (cut or self._reading.truncated):
            raw = reveal(text[at:])
            return found(len(text), written_name(self._named(raw)), raw, raw, "unclosed")
        stop = len(text) if following < 0 else following
        raw = reveal(text[at:stop])
        return guess(self._named(raw.strip().removesuffix("]").rstrip()), stop, raw)

    def _named(self, source: str) -> str:
        """An element with its name where the usual form has it."""
        return source

    def _read_named(self, text: str, body: int) -> Found:
        reveal = self._reading.reveal
        name = _NAME.match(text, skip_blanks(text, body))
        at = skip_blanks(text, name.end() if name else body)
        if text.startswith(self._id, at):
            split = text.find(self._arguments, at)
            at = split if split >= 0 else len(text)
        marked = text.startswith(self._arguments, at)
        start = at + len(self._arguments) if marked else at
        if name and (marked or text.startswith("{", at)):
            read = read_arguments(text, start, "", self._open, self._reading)
            raw = reveal(text[body : read.stop])
            return found(read.end, reveal(name[0]), read.value, raw, read.status)
        following = text.find(self._open, body)
        end = len(text) if following < 0 else following
        raw = reveal(text[body:end])
        cut = end == len(text) and (self._reading.truncated or not raw.strip() or at == end)
        return found(end, name[0] if name and cut else "", raw, raw, "unclosed" if cut else "missing_name")
